"""Time to a training and a test error, side by side.

Runs are cells, one JSON file each, written when the run is over and not made again while the file
is there. A method with a learning rate first gets four short runs, a quarter of the budget long,
with one seed; the rate with the lowest training error at their end is taken for three seeds of the
whole budget. The runs that the goals of the project are about come first.
"""

from benchmarks.parts import Part
from benchmarks.target.cells import cells_of, expected_seconds
from benchmarks.target.figures import FIGURES
from benchmarks.target.measuring import measure
from benchmarks.target.tables import target_table

PART = Part(
    sections=lambda device: list(cells_of(device.type)),
    measure=measure,
    tables={"": target_table},
    figures=FIGURES,
    kept=True,
    seconds=expected_seconds,
)

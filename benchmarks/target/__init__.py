"""Time to a training and a test error, side by side.

Runs are cells, one JSON file each, written when the run is over and not made again while the file
is there, unless the run was disturbed. A method with a learning rate first gets six short tries
with a seed of their own, from which the rate and its decay are chosen for the three seeds that
count. The runs that the goals of the project are about come first.
"""

from benchmarks.parts import Part
from benchmarks.target.cells import cells_of, expected_seconds
from benchmarks.target.figures import FIGURES
from benchmarks.target.gap import gap_table
from benchmarks.target.measuring import is_stale, measure
from benchmarks.target.tables import target_table

PART = Part(
    sections=lambda device: list(cells_of(device.type)),
    measure=measure,
    tables={"": target_table, "gap": gap_table},
    figures=FIGURES,
    kept=True,
    stale=is_stale,
    seconds=expected_seconds,
)

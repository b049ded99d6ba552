"""Physics-informed nets: the error after some seconds, for each equation and method.

A section holds the run of a method on an equation with a seed. A method with settings tries all of
them with the first seed, and takes the best one for the others. Test points, which no method sees,
decide.
"""

from benchmarks.parts import Part
from benchmarks.physics.running import expected_seconds, measure, names
from benchmarks.physics.tables import table

PART = Part(
    sections=names,
    measure=measure,
    tables={"": table},
    kept=True,
    seconds=expected_seconds,
)

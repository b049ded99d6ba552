"""The road test: the defaults of KSD on many kinds of problems, beside other methods.

Each problem has a modest and a demanding loss. A section holds the runs of a method on a problem: a
method with settings tries all of them with one seed, and takes the best one for the other seeds.
"""

from benchmarks.parts import Figure, Part
from benchmarks.road.running import expected_seconds, measure, names
from benchmarks.road.tables import (
    brief_table,
    demanding_table,
    is_complete,
    modest_table,
    profile,
)

PART = Part(
    sections=names,
    measure=measure,
    tables={"": demanding_table, "modest": modest_table, "brief": brief_table},
    figures={"road-profile": Figure("Performance profile of the road test", profile, is_complete)},
    kept=True,
    seconds=expected_seconds,
)

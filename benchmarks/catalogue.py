"""The parts of the benchmark by name."""

from benchmarks import (
    estimators,
    first_net,
    growth,
    memory,
    physics,
    product,
    road,
    soundness,
    step,
    target,
    tuning,
)
from benchmarks.parts import Part

PARTS: dict[str, Part] = {
    "product": product.PART,
    "memory": memory.PART,
    "step": step.PART,
    "target": target.PART,
    "first": first_net.PART,
    "road": road.PART,
    "physics": physics.PART,
    "estimators": estimators.PART,
    "growth": growth.PART,
    "soundness": soundness.PART,
    "tuning": tuning.PART,
}

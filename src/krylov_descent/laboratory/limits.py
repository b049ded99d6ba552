"""When a run ends, and why it ended."""

from dataclasses import dataclass
from enum import Enum


class Ending(Enum):
    """Why a run ended; the value is a sentence for people."""

    SOLVED = "the validation error is below the target"
    EARLY_STOP = "the validation error has stopped falling"
    ITERATIONS = "the limit on iterations was reached"
    SECONDS = "the time limit was reached"
    PASSES = "the limit on passes over the data was reached"
    DIVERGED = "the loss or a step was NaN or infinite, several times in a row"
    STUCK = "the optimiser found no step to take, several times in a row"
    FITTED = "the method has no iterations to go on with"
    INTERRUPTED = "it was interrupted"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to stop, whichever comes first; None is no limit.

    Attributes:
        iterations: steps of the optimiser.
        seconds: of training, measuring left out.
        passes: over the training data.
        target: a validation error; below it the problem counts as solved.
        early_stop: stop when the validation error fell by no more than `tolerance` (relative) over
            this last part of the passes. By work and not by iterations, because an iteration of
            one optimiser is worth a hundred of another's.
        tolerance: see `early_stop`.
        fewest_passes: early stopping waits this long: autoencoders sit on a plateau at first, near
            the error of the mean image (HF on CURVES for some 300 passes).
        refusals: stop after so many steps in a row that changed nothing.
    """

    iterations: int | None = None
    seconds: float | None = None
    passes: float | None = None
    target: float | None = None
    early_stop: float | None = 0.25
    tolerance: float = 0.01
    fewest_passes: float = 500.0
    refusals: int = 10

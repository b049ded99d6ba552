"""Which optimiser trains which recurrent net: the runs behind `ksd reproduce sequences`.

The paper's last sentence says that KSD trains recurrent nets without structural damping. Here it
stands beside Hessian-Free, Adam and SGD on the tasks of Martens & Sutskever 2011.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from krylov_descent.laboratory.limits import Limits
from krylov_descent.laboratory.problems.sequences import SOLVED, TASKS
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.settings import RunSettings

NAME = "sequences"
TITLE = "Recurrent nets: seconds until a task is solved, or what is wrong"
LONGEST_SECONDS = 120.0
LSTM_UNITS = 50
# Half of what counts as solved, so that chance between validation and test does not decide.
TARGET = SOLVED / 2
COLUMNS = {"KSD": "ksd", "HF": "hf", "Adam": "adam", "SGD, clipped": "sgd"}


def sequence_runs() -> Iterator[tuple[str, str, RunSettings]]:
    """(row, column, settings) of each run: every task with a tanh net and with an LSTM."""
    for suffix, problem_options in (("", {}), ("-lstm", {"cell": "lstm", "units": LSTM_UNITS})):
        for task in TASKS:
            for column, optimizer in COLUMNS.items():
                settings = RunSettings(
                    problem=task,
                    problem_options=dict(problem_options),
                    optimizer=optimizer,
                    # What came through a hundred steps is often smaller than float32 can tell.
                    dtype="float64",
                    # A net that has found nothing yet is no reason to stop.
                    limits=Limits(seconds=LONGEST_SECONDS, target=TARGET, early_stop=None),
                )
                yield task + suffix, column, settings


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a run came to.

    Attributes:
        error: the part of the test sequences answered wrongly, at the lowest validation error.
        seconds: of training until then, if that is less than 0.1%: solved. Else None.
    """

    error: float
    seconds: float | None


def verdict(folder: RunFolder) -> Verdict | None:
    """The verdict on a run, also on one that was interrupted; None where it has not ended."""
    outcome = folder.outcome()
    if outcome is None:
        return None
    best = outcome["best"]
    seconds = best["seconds"] if best["test"] < SOLVED else None
    return Verdict(error=best["test"], seconds=seconds)

"""A run in front of a person: live line, Ctrl-C, and a table at the end."""

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from krylov_descent.laboratory.contenders import contender
from krylov_descent.laboratory.fitting import fit_yardstick
from krylov_descent.laboratory.problems.problem import Problem
from krylov_descent.laboratory.progress import LiveLine
from krylov_descent.laboratory.record import RunFolder, RunFolderError
from krylov_descent.laboratory.runs import (
    RunSettings,
    check_same,
    forget_beginning,
    prepare,
    settings_in,
)
from krylov_descent.laboratory.training import Ending, Training
from krylov_descent.laboratory.yardsticks import YARDSTICKS
from krylov_descent.runtime.ranks import Ranks
from krylov_descent.runtime.torchrun import under_torchrun

EXIT_INTERRUPTED = 130
# Signals that end a run like Ctrl-C; Windows lacks the second.
ENDS = ("SIGTERM", "SIGHUP")
CHECKPOINT_SECONDS = 30.0

console, complaints = Console(), Console(stderr=True)


def only_the_first_speaks(leads: bool) -> None:
    """Of several processes rank 0 prints; what goes wrong on another one it is told."""
    console.quiet = complaints.quiet = not leads


def say(line: str) -> None:
    """Print a line as it is, however long."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def complain(line: str) -> None:
    """Print a line about what did not go as asked, as it is."""
    complaints.print(line, highlight=False, markup=False, soft_wrap=True)


def run(
    settings: RunSettings,
    problem: Problem,
    target: RunFolder,
    *,
    resume: bool,
    launch: str | None = None,
    tensorboard: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Ending:
    """Train, new or resumed, and return how it ended."""
    try:
        if settings.optimizer in YARDSTICKS:
            return fit_yardstick(settings, problem, target, resume=resume)
        title = f"{contender(settings.optimizer).title} on {problem.title}"
        with (
            _free_after_failed_start(target),
            LiveLine(console, title, problem.metric, settings.limits) as line,
        ):
            training = prepare(
                settings,
                problem,
                target,
                resume=resume,
                launch=launch,
                on_row=line.row,
                on_pretraining=line.pretraining,
                tensorboard=tensorboard,
                checkpoint_seconds=checkpoint_seconds,
            )
            with _InterruptAtTheEnd(training):
                return training.run()
    except KeyboardInterrupt:  # the second one, or the first before training began
        return Ending.INTERRUPTED


@contextmanager
def _free_after_failed_start(target: RunFolder) -> Iterator[None]:
    """A run that begins here and fails before its first step is over does not keep the folder."""
    was_free = not target.started
    try:
        yield
    except RunFolderError:
        raise  # another process began a run here in between, or the folder cannot be written
    except Exception:
        if was_free and Ranks(torch.device("cpu")).leads:
            forget_beginning(target)
        raise


def is_there(settings: RunSettings, target: RunFolder) -> bool:
    """Whether this very run is finished, so that it need not be made.

    Raises:
        RunFolderError: the folder holds a run of other settings.
    """
    if not target.started:
        return False
    check_same(target, settings, device=False)
    return target.finished and settings_in(target).limits == settings.limits


def longer_seconds(settings: RunSettings, target: RunFolder) -> float | None:
    """The time limit of a finished run that was given more than is asked for; else None."""
    if not target.finished:
        return None
    made, asked = settings_in(target).limits.seconds, settings.limits.seconds
    return made if made is not None and asked is not None and made > asked else None


def say_interrupted(target: RunFolder, how_to_go_on: str) -> None:
    """Tell what is saved and how to go on."""
    if not target.started:
        say("Ended before anything was written. To begin again: the same command")
        return
    outcome = target.outcome()
    if outcome is not None:
        say(f"Interrupted and saved at iteration {outcome['last']['iteration']}.")
    elif target.checkpoint.exists():
        say("Ended at once; what the last checkpoint holds is saved.")
    else:
        say("Ended before the first checkpoint: it will begin from the start.")
    say(f"To go on: {how_to_go_on}")


def resume_command(target: RunFolder) -> str:
    """The shell line that goes on with a run."""
    return shlex.join(["ksd", "train", "--resume", str(target.path)])


class _InterruptAtTheEnd:
    """Ctrl-C ends the run after the iteration under way; a second one ends it at once.

    So do SIGTERM and the end of the terminal, but under torchrun, which ends processes that have
    lost another one.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._signals = [signal.SIGINT]
        if not under_torchrun():
            self._signals += [getattr(signal, name) for name in ENDS if hasattr(signal, name)]

    def __enter__(self) -> None:
        self._before = [signal.signal(number, self._interrupt) for number in self._signals]

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(self._signals, self._before, strict=True):
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._training.interrupted = True
        # Not the handlers of before, which ignore it where a shell began this in the background.
        for each in self._signals:
            signal.signal(each, signal.default_int_handler)
        with suppress(OSError):  # the terminal may be gone
            complaints.print("\nEnding after this iteration; Ctrl-C again ends it at once.")


def show_outcomes(problem: Problem, folders: Sequence[RunFolder]) -> None:
    """The errors at the lowest validation error, and what the runs cost, as a table.

    Runs of several seeds have theirs beside the optimiser's name.
    """
    several = len({folder.config()["seed"] for folder in folders}) > 1
    table = Table(
        title=f"{problem.title}: {problem.metric.name}",
        caption="errors at the lowest validation error; steps to seconds of the whole run",
        box=box.SIMPLE_HEAD,
    )
    table.collapse_padding, table.pad_edge = True, False  # to fit 80 columns
    table.add_column("optimiser")
    for heading in ("train", "validation", "test", "steps", "passes", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("ended by")
    for folder in folders:
        config, outcome = folder.config(), folder.outcome()
        title = config["optimizer"]["title"] + (f" {config['seed']}" if several else "")
        if outcome is None:
            table.add_row(title, *["-"] * 6, "unfinished")
            continue
        best, last = outcome["best"], outcome["last"]
        table.add_row(
            title,
            *(
                "-" if best[key] is None else problem.metric.text(best[key])
                for key in ("train", "validation", "test")
            ),
            str(last["iteration"]),
            f"{last['passes']:.1f}",
            f"{last['seconds']:.1f}",
            outcome["ending"].replace("_", " "),
        )
    console.print(table)

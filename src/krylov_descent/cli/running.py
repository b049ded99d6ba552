"""A run in front of a person: live line, Ctrl-C, and a table at the end."""

import shlex
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from rich import box
from rich.table import Table

from krylov_descent.cli.options import CHECKPOINT_SECONDS
from krylov_descent.cli.speaking import complain, complaints, console, say
from krylov_descent.laboratory.contenders import contender
from krylov_descent.laboratory.description import another_environment
from krylov_descent.laboratory.fitting import fit_yardstick
from krylov_descent.laboratory.limits import Ending
from krylov_descent.laboratory.problems.problem import Problem
from krylov_descent.laboratory.progress import LiveLine, Place, fitting
from krylov_descent.laboratory.record import RunFolder, RunFolderError
from krylov_descent.laboratory.runs import check_same, forget_beginning, prepare, settings_in
from krylov_descent.laboratory.settings import RunSettings
from krylov_descent.laboratory.training import Training
from krylov_descent.laboratory.waiting import waiting
from krylov_descent.laboratory.yardsticks import YARDSTICKS
from krylov_descent.runtime.ranks import Ranks
from krylov_descent.runtime.torchrun import under_torchrun

EXIT_INTERRUPTED = 130
HEADINGS = ("optimiser", "train", "validation", "test", "steps", "passes", "seconds", "ended by")
# What a narrow terminal does without, the first to go first.
LEAST = ("passes", "steps", "ended by", "validation", "seconds")
GAP = 2
# Signals that end a run like Ctrl-C; Windows lacks the second.
ENDS = ("SIGTERM", "SIGHUP")


def run(
    settings: RunSettings,
    problem: Problem,
    target: RunFolder,
    *,
    resume: bool,
    launch: str | None = None,
    tensorboard: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    place: Place | None = None,
) -> Ending:
    """Train, new or resumed, and return how it ended."""
    leads = Ranks(torch.device("cpu")).leads  # the others may not see the folder
    if leads and resume and (sentence := another_environment(target, settings)):
        complain(sentence)
    try:
        if settings.optimizer in YARDSTICKS:
            with waiting(console, f"fitting {YARDSTICKS[settings.optimizer].title}"):
                return fit_yardstick(settings, problem, target, resume=resume)
        title = f"{contender(settings.optimizer).title} on {problem.title}"
        with (
            _free_after_failed_start(target),
            LiveLine(
                console,
                title,
                problem.metric,
                settings.limits,
                place,
                compiles=settings.device.startswith("cuda"),
            ) as line,
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
            line.watch(lambda: training.phase)
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
    rows = [_outcome(problem, folder, several=several) for folder in folders]
    words = {h: [word for row in rows for word in row[h].split()] for h in HEADINGS}
    shown = fitting(words, LEAST, console.width, GAP)
    table = Table(
        title=f"{problem.title}: {problem.metric.name}",
        caption="errors at the lowest validation error; steps to seconds of the whole run",
        box=box.SIMPLE_HEAD,
    )
    table.collapse_padding, table.pad_edge = True, False  # to fit 80 columns
    for heading in shown:
        text = heading in (HEADINGS[0], HEADINGS[-1])
        table.add_column(heading, justify="left" if text else "right", no_wrap=not text)
    for row in rows:
        table.add_row(*(row[heading] for heading in shown))
    console.print(table)
    for note in dict.fromkeys(_notes(folders, several=several)):  # a rate is that of all seeds
        console.print(note, highlight=False, markup=False)


def _outcome(problem: Problem, folder: RunFolder, *, several: bool) -> dict[str, str]:
    config, outcome = folder.config(), folder.outcome()
    title = _title(config, several=several)
    if outcome is None:
        return dict(zip(HEADINGS, [title, *["-"] * 6, "unfinished"], strict=True))
    best, last = outcome["best"], outcome["last"]
    errors = (
        "-" if best[part] is None else problem.metric.text(best[part])
        for part in ("train", "validation", "test")
    )
    cost = str(last["iteration"]), f"{last['passes']:.1f}", f"{last['seconds']:.1f}"
    ending = outcome["ending"].replace("_", " ")
    return dict(zip(HEADINGS, [title, *errors, *cost, ending], strict=True))


def _title(config: dict[str, Any], *, several: bool) -> str:
    """The optimiser's name, with the seed where there are several."""
    return str(config["optimizer"]["title"]) + (f" {config['seed']}" if several else "")


def _notes(folders: Iterable[RunFolder], *, several: bool) -> Iterator[str]:
    """What to know of the runs: the rates, and whether the machine was busy."""
    for folder in folders:
        config, outcome = folder.config(), folder.outcome() or {}
        if rate := config["optimizer"].get("rate"):
            yield f"{config['optimizer']['title']}: rate {rate}"
        if note := outcome.get("note"):
            yield f"{_title(config, several=several)}: {note}"

"""Training from the command line: one run, or several optimisers side by side."""

from dataclasses import replace
from pathlib import Path

import typer

from krylov_descent.cli.running import (
    EXIT_INTERRUPTED,
    is_there,
    longer_seconds,
    resume_command,
    run,
    say_interrupted,
    show_outcomes,
)
from krylov_descent.cli.speaking import console, only_the_first_speaks, say
from krylov_descent.laboratory.choices import unknown_name
from krylov_descent.laboratory.contenders import competitor
from krylov_descent.laboratory.gallery import pictures
from krylov_descent.laboratory.limits import Ending
from krylov_descent.laboratory.problems import PROBLEMS
from krylov_descent.laboratory.problems.problem import Problem as LoadedProblem
from krylov_descent.laboratory.progress import places
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.report import write_report
from krylov_descent.laboratory.runs import (
    check_fitness,
    check_same,
    load,
    settings_in,
    was_begun_by,
)
from krylov_descent.laboratory.settings import RunSettings
from krylov_descent.laboratory.signatures import with_truths
from krylov_descent.laboratory.waiting import waiting
from krylov_descent.runtime.torchrun import Launch

# The settings that a recorded run already has, by the command's own names for them.
RECORDED = {
    "problem": "problem",
    "problem_options": "problem_options",
    "small": "problem_options",
    "optimizer": "optimizer",
    "options": "optimizer_options",
    "initialization": "initialization",
    "seed": "seed",
    "device": "device",
    "dtype": "dtype",
}


def train(
    asked: RunSettings,
    path: Path,
    *,
    given: set[str] | None,
    tensorboard: bool,
    checkpoint_seconds: float,
    data: Path | None,
) -> None:
    """Train a problem with one optimiser, or go on with a run.

    Args:
        asked: the settings of the command line.
        path: of the run folder.
        given: to go on with the run that is there, the options that were given in so many words;
            None for a new run.
        tensorboard: write events too.
        checkpoint_seconds: between checkpoints.
        data: the data folder.
    """
    run_folder = RunFolder(path)
    launch = Launch()
    only_the_first_speaks(launch.leads)

    def found() -> tuple[RunSettings, bool]:
        """The settings, and whether to go on with the run in the folder."""
        if given is None:
            # Processes that torchrun starts anew go on with the run that the first ones began.
            return _with_truths(asked), was_begun_by(run_folder, launch.id)
        settings = _with_truths(_recorded(given, settings_in(run_folder), asked))
        check_same(run_folder, settings)  # before any data are loaded
        return settings, True

    settings, going_on = launch.of_first(found)  # which alone has the folder on its disk
    with launch.joined(settings.device):
        with waiting(console, f"loading {settings.problem}"):
            loaded = load(settings, data)
        ending = run(
            settings,
            loaded,
            run_folder,
            resume=going_on,
            launch=launch.id,
            tensorboard=tensorboard,
            checkpoint_seconds=checkpoint_seconds,
        )
    if launch.leads:
        _tell(ending, loaded, run_folder)
    if ending is Ending.INTERRUPTED:
        raise typer.Exit(EXIT_INTERRUPTED)


def _tell(ending: Ending, problem: LoadedProblem, run_folder: RunFolder) -> None:
    if ending is Ending.INTERRUPTED:
        say_interrupted(run_folder, resume_command(run_folder))
        return
    show_outcomes(problem, [run_folder])
    say(f"It ended because {ending.value}.")
    say(f"Run folder: {run_folder.path}")


def compare(
    shared: RunSettings,
    optimizers: list[str],
    seeds: int,
    base: Path,
    *,
    report_target: float | None,
    data: Path | None,
) -> None:
    """Train a problem with several optimisers and write a report.

    Args:
        shared: the settings of all.
        optimizers: their names.
        seeds: runs of each, from the seed of the settings upwards.
        base: the folder for the runs and the report.
        report_target: the test error that the page counts the time to.
        data: the data folder.
    """
    chosen = [competitor(name).name for name in optimizers]
    initialization = shared.initialization
    shared = _with_truths(shared)
    with waiting(console, f"loading {shared.problem}"):
        loaded = load(shared, data)
    shared = replace(shared, initialization=initialization or loaded.initialization)
    contest = [
        (
            replace(shared, optimizer=name, seed=seed),
            RunFolder(base / (name if seed == shared.seed else f"{name}-seed-{seed}")),
        )
        for seed in range(shared.seed, shared.seed + seeds)  # each with all optimisers
        for name in chosen
    ]
    with waiting(console, "checking the settings"):
        for settings, target in contest:  # all of them before the first is run
            check_fitness(settings, loaded)
            is_there(settings, target)  # refuses the folder of another run
    waiting_runs = []
    for settings, target in contest:
        title = competitor(settings.optimizer).title
        if seeds > 1:
            title += f", seed {settings.seed}"
        if is_there(settings, target):
            say(f"{title}: there already")
        elif (made := longer_seconds(settings, target)) is not None:
            say(f"{title}: there already, made with {made:g} s")
        else:
            waiting_runs.append((settings, target))
    for (settings, target), place in zip(
        waiting_runs, places([settings.limits for settings, _ in waiting_runs]), strict=True
    ):
        ending = run(settings, loaded, target, resume=target.started, place=place)
        if ending is Ending.INTERRUPTED:
            say_interrupted(target, "the same command")
            raise typer.Exit(EXIT_INTERRUPTED)
    targets = [target for _, target in contest]
    show_outcomes(loaded, targets)
    page = base / "report.html"
    write_report(targets, page, pictures=pictures(loaded, targets), target=report_target)
    say(f"Report: {page}")


def _recorded(given: set[str], recorded: RunSettings, asked: RunSettings) -> RunSettings:
    """The settings of a run to go on with, changed by what was given in so many words."""
    settings = replace(
        recorded, **{RECORDED[name]: getattr(asked, RECORDED[name]) for name in given & {*RECORDED}}
    )
    limits = settings.limits
    if given & {"iterations", "seconds", "passes"}:
        limits = replace(asked.limits, target=limits.target, early_stop=limits.early_stop)
    if "target" in given:
        limits = replace(limits, target=asked.limits.target)
    if "no_early_stop" in given:
        limits = replace(limits, early_stop=None)
    return replace(settings, limits=limits)


def _with_truths(settings: RunSettings) -> RunSettings:
    """The settings with "yes", "off" and the like as booleans where an option takes one."""
    if settings.problem not in PROBLEMS:
        raise unknown_name("problem", settings.problem, PROBLEMS)
    return replace(
        settings,
        problem_options=with_truths(settings.problem_options, PROBLEMS[settings.problem].options),
        optimizer_options=with_truths(
            settings.optimizer_options, competitor(settings.optimizer).options
        ),
    )

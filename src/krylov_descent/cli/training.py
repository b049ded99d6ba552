"""Commands that train: one run, or several optimisers side by side."""

from dataclasses import replace
from pathlib import Path

import typer

from krylov_descent.cli.options import (
    CheckpointSeconds,
    DataFolder,
    Device,
    Dtype,
    Folder,
    Initialization,
    Iterations,
    NoEarlyStop,
    Optimizer,
    OptimizerOptions,
    Optimizers,
    Passes,
    Problem,
    ProblemOptions,
    ProblemToTrain,
    ReportTarget,
    Resume,
    Seconds,
    SecondsEach,
    Seed,
    Seeds,
    Small,
    Target,
    TensorBoard,
    pairs,
)
from krylov_descent.cli.running import (
    CHECKPOINT_SECONDS,
    EXIT_INTERRUPTED,
    is_there,
    longer_seconds,
    only_the_first_speaks,
    resume_command,
    run,
    say,
    say_interrupted,
    show_outcomes,
)
from krylov_descent.laboratory.choices import unknown_name
from krylov_descent.laboratory.contenders import competitor
from krylov_descent.laboratory.gallery import pictures
from krylov_descent.laboratory.problems import PROBLEMS
from krylov_descent.laboratory.problems.problem import Problem as LoadedProblem
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.report import write_report
from krylov_descent.laboratory.runs import (
    RunSettings,
    check_fitness,
    check_same,
    load,
    settings_in,
    was_begun_by,
)
from krylov_descent.laboratory.signatures import with_truths
from krylov_descent.laboratory.training import Ending, Limits
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
    context: typer.Context,
    problem: ProblemToTrain = None,
    optimizer: Optimizer = "ksd",
    options: OptimizerOptions = None,
    small: Small = False,
    problem_options: ProblemOptions = None,
    initialization: Initialization = None,
    seed: Seed = 0,
    iterations: Iterations = None,
    seconds: Seconds = None,
    passes: Passes = None,
    target: Target = None,
    no_early_stop: NoEarlyStop = False,
    device: Device = "cpu",
    dtype: Dtype = None,
    folder: Folder = None,
    resume: Resume = None,
    checkpoint_seconds: CheckpointSeconds = CHECKPOINT_SECONDS,
    tensorboard: TensorBoard = False,
    data: DataFolder = None,
) -> None:
    """Train a problem with one optimiser.

    The run folder holds the configuration, the metrics of each iteration and a checkpoint. Ctrl-C
    ends after the iteration under way and saves; --resume goes on as if nothing had happened.
    Without limits a run ends when the validation error has stopped falling.

    With torchrun each process takes its part of the data and trains on a device of its own; the
    processes that it starts anew after a failure go on from the last checkpoint.
    """
    asked = RunSettings(
        problem=problem or "",
        problem_options=pairs(problem_options) | ({"size": "small"} if small else {}),
        optimizer=optimizer,
        optimizer_options=pairs(options),
        initialization=initialization,
        seed=seed,
        device=device,
        dtype=dtype,
        limits=Limits(
            iterations=iterations,
            seconds=seconds,
            passes=passes,
            target=target,
            early_stop=None if no_early_stop else Limits().early_stop,
        ),
    )
    if resume is None and problem is None:
        raise typer.BadParameter("name one; `ksd problems` lists them", param_hint="PROBLEM")
    if resume is not None and folder is not None:
        raise typer.BadParameter("--resume names the folder already", param_hint="--folder")
    name = f"{problem}{'-small' if small else ''}-{optimizer}-{seed}"
    run_folder = RunFolder(resume or folder or Path("runs") / name)
    launch = Launch()
    only_the_first_speaks(launch.leads)

    def found() -> tuple[RunSettings, bool]:
        """The settings, and whether to go on with the run in the folder."""
        if resume is None:
            # Processes that torchrun starts anew go on with the run that the first ones began.
            return _with_truths(asked), was_begun_by(run_folder, launch.id)
        settings = _with_truths(_recorded(context, settings_in(run_folder), asked))
        check_same(run_folder, settings)  # before any data are loaded
        return settings, True

    settings, going_on = launch.of_first(found)  # which alone has the folder on its disk
    with launch.joined(settings.device):
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
    problem: Problem,
    optimizers: Optimizers = "ksd,hf,lbfgs,ncg,adam",
    small: Small = False,
    problem_options: ProblemOptions = None,
    initialization: Initialization = None,
    seed: Seed = 0,
    seeds: Seeds = 1,
    seconds: SecondsEach = 60.0,
    device: Device = "cpu",
    folder: Folder = None,
    report_target: ReportTarget = None,
    data: DataFolder = None,
) -> None:
    """Train a problem with several optimisers: same start, same data, same time.

    A run that is in the folder already is not made again, and an unfinished one goes on. It ends
    with a table and a report: one page with curves over seconds, iterations and passes. One run
    of each tells little; --seeds 3 shows how far runs from other starting weights differ.
    """
    base = folder or Path("runs") / f"compare-{problem}{'-small' if small else ''}-{seed}"
    words = (word.strip() for word in optimizers.split(","))
    chosen = [competitor(word).name for word in dict.fromkeys(words) if word]
    if not chosen:
        raise typer.BadParameter("name at least one", param_hint="--optimizers")
    shared = _with_truths(
        RunSettings(
            problem=problem,
            problem_options=pairs(problem_options) | ({"size": "small"} if small else {}),
            initialization=initialization,
            seed=seed,
            device=device,
            limits=Limits(seconds=seconds, early_stop=None),
        )
    )
    loaded = load(shared, data)
    shared = replace(shared, initialization=initialization or loaded.initialization)
    contest = [
        (
            replace(shared, optimizer=name, seed=each),
            RunFolder(base / (name if each == seed else f"{name}-seed-{each}")),
        )
        for each in range(seed, seed + seeds)  # each seed with all optimisers before the next
        for name in chosen
    ]
    for settings, target in contest:  # all of them before the first is run
        check_fitness(settings, loaded)
        is_there(settings, target)  # refuses the folder of another run
    for settings, target in contest:
        title = competitor(settings.optimizer).title
        if seeds > 1:
            title += f", seed {settings.seed}"
        if is_there(settings, target):
            say(f"{title}: there already")
        elif (made := longer_seconds(settings, target)) is not None:
            say(f"{title}: there already, made with {made:g} s")
        elif run(settings, loaded, target, resume=target.started) is Ending.INTERRUPTED:
            say_interrupted(target, "the same command")
            raise typer.Exit(EXIT_INTERRUPTED)
    targets = [target for _, target in contest]
    show_outcomes(loaded, targets)
    page = base / "report.html"
    write_report(targets, page, pictures=pictures(loaded, targets), target=report_target)
    say(f"Report: {page}")


def _recorded(context: typer.Context, recorded: RunSettings, asked: RunSettings) -> RunSettings:
    """The settings of a run to go on with, changed by what was given in so many words."""
    given = {name for name in context.params if _is_given(context, name)}
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


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"

"""What each command takes, and what its help says.

The work is in the modules that the commands import when they are called: those need torch, which
takes seconds to load, and help does not.
"""

from contextlib import AbstractContextManager
from pathlib import Path

import typer

from krylov_descent.cli.options import (
    CHECKPOINT_SECONDS,
    CheckpointSeconds,
    DataFolder,
    Device,
    Dtype,
    Exhibit,
    Files,
    Folder,
    Initialization,
    Iterations,
    NoEarlyStop,
    OneName,
    Optimizer,
    OptimizerOptions,
    Optimizers,
    Output,
    Passes,
    Problem,
    ProblemOptions,
    ProblemToTrain,
    Quick,
    ReportTarget,
    Resume,
    Rows,
    Run,
    Runs,
    Seconds,
    SecondsEach,
    Seed,
    Seeds,
    Show,
    Small,
    Target,
    TensorBoard,
    pairs,
)
from krylov_descent.cli.speaking import console
from krylov_descent.laboratory.limits import Limits
from krylov_descent.laboratory.settings import RunSettings
from krylov_descent.laboratory.waiting import waiting


def _loading() -> AbstractContextManager[None]:
    return waiting(console, "loading PyTorch")


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
        problem_options=_problem_options(problem_options, small),
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
    with _loading():
        from krylov_descent.cli import training
    training.train(
        asked,
        resume or folder or Path("runs") / name,
        given=_given(context) if resume else None,
        tensorboard=tensorboard,
        checkpoint_seconds=checkpoint_seconds,
        data=data,
    )


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
    names = list(dict.fromkeys(word.strip() for word in optimizers.split(",") if word.strip()))
    if not names:
        raise typer.BadParameter("name at least one", param_hint="--optimizers")
    shared = RunSettings(
        problem=problem,
        problem_options=_problem_options(problem_options, small),
        initialization=initialization,
        seed=seed,
        device=device,
        limits=Limits(seconds=seconds, early_stop=None),
    )
    base = folder or Path("runs") / f"compare-{problem}{'-small' if small else ''}-{seed}"
    with _loading():
        from krylov_descent.cli import training
    training.compare(shared, names, seeds, base, report_target=report_target, data=data)


def reproduce(
    name: Exhibit,
    rows: Rows = None,
    quick: Quick = False,
    show_only: Show = False,
    device: Device = "cpu",
    folder: Folder = None,
    data: DataFolder = None,
) -> None:
    """Re-run a table or figure of the paper, beside the published numbers.

    Each cell is a run. Cells that are in the folder already are not run again, and an unfinished
    one goes on, so the whole can be made in several sittings; what is not there yet is shown as
    missing. What was found is collected in the folder, in a JSON file named after the exhibit and,
    for a figure, a PNG.
    """
    with _loading():
        from krylov_descent.cli import exhibits
    exhibits.reproduce(
        name, rows, quick=quick, show_only=show_only, device=device, folder=folder, data=data
    )


def report(
    runs: Runs,
    output: Output = Path("report.html"),
    target: ReportTarget = None,
    data: DataFolder = None,
) -> None:
    """Write one page about runs, to be read in a browser without network.

    It has convergence curves, a table with the time to a target, the published numbers, pictures,
    Ritz values, where the time went, and how to re-run it. Runs of several problems get a section
    each.
    """
    with _loading():
        from krylov_descent.cli import reporting
    reporting.report(runs, output, target, data)


def words(run: Run, device: Device = "cpu", data: DataFolder = None) -> None:
    """Recognise the test set's words with the network of a run on speech.

    For each noise level it shows the frame error and the word errors of the hybrid (posteriors
    over priors), of the paper's Tandem system, and of Gaussian mixtures on MFCCs alone. The
    network is that of the lowest validation error so far. The numbers are also written into the
    run's folder, as words.json, and beside them, where the recordings are at hand, a picture of
    the alignment that the labels come from, as alignment.png.
    """
    with _loading():
        from krylov_descent.cli import words
    words.recognise(run, device, data)


def problems(name: OneName = None) -> None:
    """List the problems, or the options of one."""
    with _loading():
        from krylov_descent.cli import listing
    listing.problems(name)


def optimizers(name: OneName = None) -> None:
    """List the optimisers, or the options of one and the rates that it was tuned to."""
    with _loading():
        from krylov_descent.cli import listing
    listing.optimizers(name)


data_app = typer.Typer(no_args_is_help=True)


@data_app.command("list")
def data_list(data: DataFolder = None) -> None:
    """Show the data files and where they are looked for."""
    with _loading():
        from krylov_descent.cli import listing
    listing.data_list(data)


@data_app.command("fetch")
def data_fetch(files: Files = None, data: DataFolder = None) -> None:
    """Download what is missing or damaged, and check it."""
    with _loading():
        from krylov_descent.cli import listing
    listing.data_fetch(files, data)


@data_app.command("verify")
def data_verify(files: Files = None, data: DataFolder = None) -> None:
    """Read the files that are there and compare their sha256.

    Exit code 1 if one is damaged, or if one that was named is missing.
    """
    with _loading():
        from krylov_descent.cli import listing
    if not listing.data_verify(files, data):
        raise typer.Exit(1)


def _problem_options(words: list[str] | None, small: bool) -> dict[str, object]:
    return pairs(words) | ({"size": "small"} if small else {})


def _given(context: typer.Context) -> set[str]:
    """The options that were given in so many words."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}

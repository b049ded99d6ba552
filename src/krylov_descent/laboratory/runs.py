"""One run from its settings: problem, starting weights, optimiser, folder.

The settings are all that a run depends on. They are written into its folder, so that it can be
resumed, repeated and reported on without knowing how it was started.
"""

import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from krylov_descent.laboratory.choices import unknown_name
from krylov_descent.laboratory.contenders import competitor, contender
from krylov_descent.laboratory.description import describe, with_history
from krylov_descent.laboratory.devices import find_device, precision_of
from krylov_descent.laboratory.events import with_events
from krylov_descent.laboratory.limits import Limits
from krylov_descent.laboratory.problems import load_problem
from krylov_descent.laboratory.problems.problem import Problem
from krylov_descent.laboratory.rbm import Report
from krylov_descent.laboratory.record import RunFolder, RunFolderError
from krylov_descent.laboratory.settings import RunSettings
from krylov_descent.laboratory.training import OnRow, Training
from krylov_descent.laboratory.yardsticks import Yardstick
from krylov_descent.runtime.ranks import Ranks


def load(settings: RunSettings, data_folder: Path | None = None) -> Problem:
    """The problem of the settings with its data on their device.

    Raises:
        UnknownNameError: no such problem or option; the nearest is suggested.
        ValueError: no such device, or an option does not take such a value.
        DataError: the data cannot be had.
    """
    device, dtype = find_device(settings.device), precision_of(settings)
    options = settings.problem_options
    try:
        problem = load_problem(settings.problem, folder=data_folder, **options)
    except TypeError as error:
        raise ValueError(f"{settings.problem!r} cannot be made with {options}: {error}") from error
    return problem.to(device, dtype)


def prepare(
    settings: RunSettings,
    problem: Problem,
    folder: RunFolder,
    *,
    resume: bool = False,
    launch: str | None = None,
    on_row: OnRow | None = None,
    on_pretraining: Report | None = None,
    tensorboard: bool = False,
    checkpoint_seconds: float = 30.0,
) -> Training:
    """A run ready to go, new or where its checkpoint left it.

    Args:
        settings: what to run.
        problem: as `load` gives it for these settings; several runs may share it.
        folder: where it is recorded.
        resume: go on with the run that is there, which must have been started with these
            settings but for the limits.
        launch: of torchrun, by which it knows its own run again (`was_begun_by`).
        on_row: called with each row and the step behind it.
        on_pretraining: called after each epoch of pretraining.
        tensorboard: write events into the folder too.
        checkpoint_seconds: between checkpoints.
    """
    ranks = Ranks(find_device(settings.device))
    settings = replace(settings, initialization=settings.initialization or problem.initialization)
    if settings.initialization not in problem.initializations:
        raise unknown_name("initialisation", str(settings.initialization), problem.initializations)
    if resume and ranks.leads:
        check_same(folder, settings)
    where = find_device(settings.device), precision_of(settings)
    # What is wrong with the settings is found here, before pretraining and before anything is
    # written; the starting weights come last.
    model = problem.make_model(settings.seed, "torch", *where)
    optimizer = contender(settings.optimizer).make(
        problem, model, settings.seed, settings.optimizer_options
    )
    if ranks.size > 1 and not optimizer.data_parallel:
        raise ValueError(
            f"{settings.optimizer!r} cannot be run on {ranks.size} ranks, as it does not sum over "
            "them: choose ksd, hf or ncg, or start it without torchrun"
        )
    training = Training(
        problem.part(ranks.rank, ranks.size),
        model,
        optimizer,
        folder,
        settings.limits,
        on_row=with_events(folder.path, on_row) if tensorboard and ranks.leads else on_row,
        checkpoint_seconds=checkpoint_seconds,
    )
    config = describe(settings, problem, folder) | {"ranks": ranks.size, "launch": launch}
    if ranks.leads:
        folder.take()  # the training gives it back
    try:
        going_on = training.resume() if resume else False
        if ranks.leads and resume:
            folder.go_on(with_history(config, folder, training.iteration))
        elif ranks.leads:
            folder.begin(config)
    except BaseException:
        folder.release()
        raise
    if not going_on:
        start = problem.make_model(
            settings.seed, settings.initialization, *where, report=on_pretraining
        )
        model.load_state_dict(start.state_dict())
    return training


def check_fitness(settings: RunSettings, problem: Problem) -> None:
    """Refuse what the problem cannot be trained with, before any run is begun.

    Raises:
        ValueError: the optimiser is not for the problem, or does not take its options.
    """
    options = settings.optimizer_options
    entry = competitor(settings.optimizer)
    if isinstance(entry, Yardstick):
        entry.check(problem, options)
    else:
        model = problem.make_model(settings.seed, "torch", dtype=precision_of(settings))
        entry.make(problem, model, settings.seed, options)


def check_same(folder: RunFolder, settings: RunSettings, *, device: bool = True) -> None:
    """Refuse a folder whose run was started with other settings; limits may differ.

    Args:
        folder: holds a run.
        settings: asked for. An `initialization` or `dtype` of None is not compared.
        device: whether it must be the same kind of device, as it must to go on exactly.
    """
    before, asked = _comparable(settings_in(folder)), _comparable(settings)
    for key, value in asked.items():
        open_to_all = key in ("initialization", "dtype") and not value
        unimportant = open_to_all or (key == "device" and not device)
        if before[key] != value and not unimportant:
            raise RunFolderError(
                f"{folder.path} was started with {key} = {json.dumps(before[key])}, not "
                f"{json.dumps(value)}: ask for the same settings, or choose another --folder"
            )


def _comparable(settings: RunSettings) -> dict[str, Any]:
    """As config.json gives them back, without limits and number of the device."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    del plain["limits"]
    return plain | {"device": settings.device.partition(":")[0]}


def was_begun_by(folder: RunFolder, launch: str | None) -> bool:
    """Whether the run in a folder was begun, or gone on with, by this launch of torchrun."""
    return launch is not None and folder.started and folder.config().get("launch") == launch


def forget_beginning(folder: RunFolder) -> None:
    """Remove the files of a run that failed in its first step, so that another can begin here.

    One that has made a step, or has ended, stays as it is; so does what is not a run.
    """
    has_results = folder.outcome() is not None or any(row["iteration"] for row in folder.rows())
    if has_results or not folder.started:
        return
    # The configuration first: without it the folder holds no run.
    for name in ("config.json", "metrics.jsonl", folder.checkpoint.name):
        (folder.path / name).unlink(missing_ok=True)
    with suppress(OSError):  # it is not empty: there are events, or it was there before
        folder.path.rmdir()


def settings_in(folder: RunFolder) -> RunSettings:
    """The settings that the run in a folder was started with.

    Raises:
        RunFolderError: there is no run.
        ValueError: its configuration is not whole.
    """
    config = folder.config()
    try:
        return RunSettings(
            problem=config["problem"]["name"],
            problem_options=_with_tuples(config["problem"]["options"]),
            optimizer=config["optimizer"]["name"],
            optimizer_options=_with_tuples(config["optimizer"]["options"]),
            initialization=config["initialization"],
            seed=config["seed"],
            device=config["device"],
            dtype=config["dtype"],
            limits=Limits(**config["limits"]),
        )
    except (KeyError, TypeError) as problem:
        raise ValueError(
            f"{folder.path / 'config.json'} is damaged or of another version: {problem} is missing "
            "or unknown"
        ) from problem


def _with_tuples(options: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists only; optimisers take a pair as a tuple."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}

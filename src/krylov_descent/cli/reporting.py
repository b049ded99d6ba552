"""One page about recorded runs."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from krylov_descent.cli.speaking import complain, say
from krylov_descent.laboratory.checkpoint import CheckpointError
from krylov_descent.laboratory.gallery import has_picture, pictures
from krylov_descent.laboratory.record import RunFolder, RunFolderError
from krylov_descent.laboratory.report import Picture, write_report
from krylov_descent.laboratory.runs import load, settings_in
from krylov_descent.laboratory.settings import RunSettings
from krylov_descent.laboratory.sources import DataError


def report(runs: Iterable[Path], output: Path, target: float | None, data: Path | None) -> None:
    """Write the page.

    Args:
        runs: run folders, or folders that hold some.
        output: the page.
        target: the test error that the page counts the time to.
        data: the data folder, for the pictures.
    """
    folders = [RunFolder(path) for path in _run_folders(runs)]
    damaged = write_report(folders, output, pictures=_pictures(folders, data), target=target)
    for path, what in damaged.items():
        complain(f"The run in {path} is damaged: {what}")
    say(f"Report: {output}")


def _run_folders(paths: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = sorted(config.parent for config in path.rglob("config.json"))
        if not inside:
            raise RunFolderError(f"{path} is not a run folder and holds none")
        found += inside
    return list(dict.fromkeys(found))


def _pictures(folders: list[RunFolder], data: Path | None) -> dict[Path, Picture]:
    """The pictures of all runs that have one; the page does without what cannot be had."""
    problems: dict[str, tuple[RunSettings, list[RunFolder]]] = {}
    for folder in filter(has_picture, folders):
        settings = replace(settings_in(folder), device="cpu")
        key = json.dumps([settings.problem, settings.problem_options, settings.dtype])
        problems.setdefault(key, (settings, []))[1].append(folder)
    found: dict[Path, Picture] = {}
    failures: dict[str, None] = {}  # forms of one problem often fail alike: each is said once
    for settings, members in problems.values():
        try:
            found |= pictures(load(settings, data), members)
        except (CheckpointError, DataError) as problem:
            failures[f"No pictures for {settings.problem}: {problem}"] = None
    for failure in failures:
        complain(failure)
    return found

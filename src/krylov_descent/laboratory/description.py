"""What config.json says of a run: all that it depends on, and where it was made."""

from dataclasses import asdict
from typing import Any

from krylov_descent.laboratory.contenders import Contender, competitor
from krylov_descent.laboratory.devices import find_device, name_of, precision_of
from krylov_descent.laboratory.environment import differences, environment
from krylov_descent.laboratory.problems import PROBLEMS
from krylov_descent.laboratory.problems.problem import Problem
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.settings import RunSettings
from krylov_descent.laboratory.signatures import defaults_of, plain


def describe(settings: RunSettings, problem: Problem, folder: RunFolder) -> dict[str, Any]:
    """The full configuration of a run, for config.json.

    `options` are those that were given, by which the run is made again; `settings` are all, with
    the values that they had.
    """
    entry, options = competitor(settings.optimizer), settings.optimizer_options
    contender = entry if isinstance(entry, Contender) else None
    return {
        "problem": {
            "name": problem.name,
            "title": problem.title,
            "options": settings.problem_options,
            "settings": _problem_settings(settings),
            "samples": {
                name: 0 if split is None else len(split[0])
                for name, split in (
                    ("train", problem.train),
                    ("validation", problem.validation),
                    ("test", problem.test),
                )
            },
            "metric": {"name": problem.metric.name, "unit": problem.metric.unit},
            "published": [asdict(row) for row in problem.paper.published] if problem.paper else [],
        },
        "optimizer": {
            "name": settings.optimizer,
            "title": entry.title,
            "options": options,
            "settings": contender.effective(problem, options) if contender else {},
            "rate": contender.rate(problem, options) if contender else None,
        },
        "initialization": settings.initialization or problem.initialization,
        "seed": settings.seed,
        "device": settings.device,
        "dtype": name_of(precision_of(settings)),
        "limits": asdict(settings.limits),
        "environment": environment(find_device(settings.device)),
        "command": settings.command(folder.path),
    }


def _problem_settings(settings: RunSettings) -> dict[str, Any]:
    entry = PROBLEMS.get(settings.problem)
    defaults = defaults_of(entry.load) if entry else {}
    found = {**defaults, **settings.problem_options}
    return {name: plain(value) for name, value in found.items() if name != "folder"}


def another_environment(folder: RunFolder, settings: RunSettings) -> str | None:
    """One sentence where a run goes on with other versions, threads or hardware; else None."""
    config = folder.config()
    before = config.get("environment") or config.get("versions") or {}
    found = differences(before, environment(find_device(settings.device)))
    if not found:
        return None
    return (
        f"The run was begun with {found}: it goes on, though not bit for bit as it would have "
        "there. Its config.json keeps both environments."
    )


def with_history(config: dict[str, Any], folder: RunFolder, iteration: int) -> dict[str, Any]:
    """The configuration of a run that goes on, with the environments that it had before."""
    before = folder.config()
    last = before.get("environment") or before.get("versions") or {}
    earlier = before.get("earlier_environments", [])
    if differences(last, config["environment"]):
        earlier = [*earlier, {**last, "until_iteration": iteration}]
    else:
        config = config | {"environment": last}
    return config | ({"earlier_environments": earlier} if earlier else {})

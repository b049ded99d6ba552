"""The shell lines that make all runs of a comparison again, in a folder of their own."""

import re
import shlex
from collections.abc import Sequence
from html import escape
from os.path import commonpath
from pathlib import Path

from krylov_descent.laboratory.limits import Limits
from krylov_descent.laboratory.problems import PROBLEMS
from krylov_descent.laboratory.report.comparison import Comparison
from krylov_descent.laboratory.report.runs import Run
from krylov_descent.laboratory.runs import settings_in
from krylov_descent.laboratory.settings import RunSettings


def commands(comparison: Comparison, folder: Path, target: float | None) -> str:
    """One block to paste into a shell, and how to go on with what has not ended.

    Args:
        comparison: whose runs to make again.
        folder: for the new runs; those that are there stay as they are.
        target: that was asked for.
    """
    runs = [run for run in comparison.runs if run.config]
    again = _compare_line(runs, folder, target) or _train_lines(runs, folder, target)
    going_on = [line for run in runs if (line := _resume_line(run))]
    return "".join(
        f'{note}<pre class="command"><code>{_words(lines)}</code></pre>'
        for note, lines in (
            (f"<p>This repeats all runs, in the folder {folder}.</p>", again),
            ("<p>This goes on with what has not ended.</p>", "\n".join(going_on)),
        )
        if lines
    )


def _compare_line(runs: Sequence[Run], folder: Path, target: float | None) -> str:
    """The `ksd compare` that makes these runs; empty where it takes more than one command."""
    try:
        settings = [settings_in(run.folder) for run in runs]
    except ValueError:
        return ""
    if not settings or any(run.config.get("ranks", 1) != 1 for run in runs):
        return ""
    first = settings[0]
    names = list(dict.fromkeys(each.optimizer for each in settings))
    seeds = sorted({each.seed for each in settings})
    made = {(each.optimizer, each.seed) for each in settings}
    whole = len(made) == len(settings) == len(names) * len(seeds)
    # What `ksd compare` has no option for is as it sets it.
    plain = all(_of_comparison(each, first) for each in settings)
    if not (whole and plain and seeds == list(range(seeds[0], seeds[0] + len(seeds)))):
        return ""
    options = dict(first.problem_options)
    words = ["ksd", "compare", first.problem]
    if options.get("size") == "small":
        del options["size"]
        words.append("--small")
    for key, value in options.items():
        words += ["--problem-set", f"{key}={value}"]
    words += ["--optimizers", ",".join(names)]
    if first.initialization:
        words += ["--initialization", first.initialization]
    words += ["--seed", str(seeds[0])]
    if len(seeds) > 1:
        words += ["--seeds", str(len(seeds))]
    words += ["--seconds", str(first.limits.seconds), "--device", first.device]
    if target is not None:
        words += ["--target", str(target)]
    return shlex.join([*words, "--folder", str(folder)])


def _of_comparison(settings: RunSettings, first: RunSettings) -> bool:
    entry, limits = PROBLEMS.get(settings.problem), settings.limits
    shared = ("problem", "problem_options", "initialization", "device", "dtype", "limits")
    return (
        all(getattr(settings, name) == getattr(first, name) for name in shared)
        and entry is not None
        and entry.dtype == settings.dtype
        and not settings.optimizer_options
        and limits.seconds is not None
        and limits == Limits(seconds=limits.seconds, early_stop=None)
    )


def _train_lines(runs: Sequence[Run], folder: Path, target: float | None) -> str:
    """A line for each run, and one for the page."""
    parents = [run.folder.path.absolute().parent for run in runs]
    lines: list[str] = []
    for run, parent in zip(runs, parents, strict=True):
        words = shlex.split(run.config.get("command", ""))
        if not words:
            continue
        if "--folder" in words:
            at = words.index("--folder")
            del words[at : at + 2]
        place = folder / parent.relative_to(commonpath(parents)) / run.folder.path.name
        lines.append(shlex.join([*words, "--folder", str(place)]))
    if not lines:
        return ""
    report = ["ksd", "report", str(folder)]
    if target is not None:
        report += ["--target", str(target)]
    return "\n".join([*lines, shlex.join(report)])


def _resume_line(run: Run) -> str:
    """How to go on with a run that has not ended, where it left something to go on from."""
    if run.state != "unfinished" or not run.folder.checkpoint.exists():
        return ""
    return f"ksd train --resume {shlex.quote(str(run.folder.path))}"


def _words(code: str) -> str:
    """Each word as an element, for the style to break lines between them and not at hyphens."""
    return re.sub(r"\S+", lambda word: f"<span>{escape(word[0])}</span>", code)

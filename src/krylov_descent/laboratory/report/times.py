"""Where each method's time went: a bar of its phases, and what one iteration cost."""

from collections.abc import Iterable
from html import escape

from krylov_descent.laboratory.report.methods import Method
from krylov_descent.laboratory.report.numbers import duration, is_number, plain

# A phase narrower than this has no room for its name in the bar; the line below has it.
NARROW = 0.12
# A phase is shown from this share on, and so is the time that no shown phase counts.
REST, NEGLIGIBLE = "between phases", 0.005
PHASE_COLOURS = 5  # of page.css
# What an iteration costs: one of it, and more.
COUNTS = {
    "evaluations": ("evaluation", "evaluations"),
    "products": ("product", "products"),
    "passes": ("pass over the data", "passes over the data"),
}


def time_bars(methods: Iterable[Method]) -> str:
    """A bar for each method, of all its runs together."""
    counted = [(method, phases) for method in methods if (phases := _phases(method))]
    names = [name for _, phases in counted for name in phases if name != REST]
    names = list(dict.fromkeys(names))
    bars = []
    for method, phases in counted:
        total = sum(phases.values())
        parts = "".join(
            f'<span class="{_phase_style(names, name)}" style="flex-grow:{seconds / total:.4f}" '
            f'title="{escape(name)}: {duration(seconds)}">'
            f"{escape(name) if seconds / total > NARROW else ''}</span>"
            for name, seconds in phases.items()
        )
        words = ", ".join(
            f"{name} {duration(seconds)} ({seconds / total:.0%})"
            for name, seconds in phases.items()
        )
        runs = f" in {len(method.counted)} runs" if len(method.counted) > 1 else ""
        bars.append(
            f"<li><p><b>{escape(method.label)}</b> {duration(total)}{runs}</p>"
            f'<div class="bar" aria-hidden="true">{parts}</div>'
            f"<p><small>{escape(words)}. {escape(_cost_of_an_iteration(method))}</small></p></li>"
        )
    return f'<ul class="bars">{"".join(bars)}</ul>' if bars else ""


def _phase_style(names: list[str], name: str) -> str:
    return "phase-rest" if name == REST else f"phase-{names.index(name) % PHASE_COLOURS}"


def _phases(method: Method) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for row in (row for run in method.counted for row in run.rows):
        for name, value in (row.get("phases") or {}).items():
            if is_number(value) and value > 0:
                seconds[name] = seconds.get(name, 0.0) + value
    total = sum(float(run.rows[-1]["seconds"]) for run in method.counted)
    shown = {name: value for name, value in seconds.items() if value > NEGLIGIBLE * total}
    rest = total - sum(shown.values())
    return shown | ({REST: rest} if shown and rest > NEGLIGIBLE * total else {})


def _cost_of_an_iteration(method: Method) -> str:
    # The first row is the start, before any step.
    steps = [row for run in method.counted for row in run.rows[1:]]
    ends = [run.rows[-1] for run in method.counted if len(run.rows) > 1]
    if not steps:
        return ""
    counts = [
        _counted(sum(row.get(key) or 0 for row in steps) / len(steps), key)
        for key in ("evaluations", "products")
        if any(row.get(key) for row in steps)
    ]
    seconds, passes = (sum(row[key] for row in ends) / len(steps) for key in ("seconds", "passes"))
    per_step = [duration(seconds), *counts, _counted(passes, "passes")]
    return f"One iteration on average: {', '.join(per_step)}."


def _counted(value: float, key: str) -> str:
    one, more = COUNTS[key]
    return f"{plain(value)} {one if value == 1 else more}"

"""What the runs show, in sentences: no method is called the best by one run."""

from dataclasses import dataclass

from krylov_descent.laboratory.report.comparison import Comparison
from krylov_descent.laboratory.report.methods import RESULT, Method, Spread
from krylov_descent.laboratory.report.numbers import duration, error, given, is_number

# So many methods are named in a sentence; the table has all.
MOST_NAMED = 6


@dataclass(frozen=True)
class Summary:
    """Sentences of a comparison: the result, how it came about, and what stands against it."""

    headline: str
    details: list[str]
    caveats: list[str]


def summarize(comparison: Comparison) -> Summary:
    """The comparison by the test error at each run's lowest validation error."""
    details = [*_moment(comparison), *_speed(comparison), *_published(comparison)]
    return Summary(_headline(comparison), details, _caveats(comparison))


def _headline(comparison: Comparison) -> str:
    measured = comparison.measured
    if not measured:
        return "No run has a result yet."
    unit = comparison.unit
    if len(measured) == 1:
        return f"{measured[0].label} has a test error of {with_range(measured[0].result, unit)}."
    if any(len(method.counted) < 2 for method in measured):
        return f"Test errors: {_named(measured, unit)}."
    leaders = _leaders(measured)
    if len(leaders) > 1:
        return f"The lowest test errors overlap from seed to seed: {_named(leaders, unit)}."
    return f"{leaders[0].label} has the lowest test error: {with_range(leaders[0].result, unit)}."


def _leaders(measured: list[Method]) -> list[Method]:
    """The best method, and those with a seed that is as good as its worst."""
    best = measured[0].result
    return [m for m in measured if best and m.result and m.result.low <= best.high]


def _moment(comparison: Comparison) -> list[str]:
    """What the numbers are, who follows, and what one run is worth."""
    measured = comparison.measured
    if not measured:
        return []
    rows = [run.best or {} for method in measured for run in method.counted]
    validated = any(is_number(row.get("validation")) for row in rows)
    where = "where the validation error was lowest" if validated else "at the last iteration"
    several = any(len(method.counted) > 1 for method in measured)
    median = ", the median of the seeds, with their range" if several else ""
    sentences = [f"That is the {comparison.metric} {where}{median}."]
    if len(measured) < 2:
        return sentences
    if all(len(method.counted) > 1 for method in measured):
        following = [m for m in measured if m not in _leaders(measured)][:1]
        return sentences + [
            f"{second.label} follows with {with_range(second.result, comparison.unit)}."
            for second in following
        ]
    return [
        *sentences,
        "One run of a method does not tell a difference from chance: ksd compare --seeds 3 repeats "
        "each from other starting weights.",
    ]


def _speed(comparison: Comparison) -> list[str]:
    """Time to the target, the fastest first."""
    if comparison.target is None:
        return []
    times = [(m.label, found) for m in comparison.measured if (found := _time(comparison, m))]
    reached = sorted(((name, t) for name, t in times if is_number(t.middle)), key=lambda n: n[1])
    target = given(comparison.target, comparison.unit)
    if not reached:
        return [f"No method reached a test error of {target}."]
    named = [f"{name} {duration(found.middle)}" for name, found in reached[:MOST_NAMED]]
    return [f"To a test error of {target} it took {_listed(named)}."]


def _time(comparison: Comparison, method: Method) -> Spread | None:
    return None if comparison.target is None else method.seconds_to(comparison.target)


def _published(comparison: Comparison) -> list[str]:
    """The test errors of the source named first, which is the paper."""
    rows = [row for row in comparison.published if is_number(row.get(RESULT))]
    if not rows:
        return []
    source = rows[0].get("source", "")
    numbers = [
        f"{row['method']} {given(row[RESULT], comparison.unit)}"
        for row in rows
        if row.get("source", "") == source
    ]
    return [f"Published test errors: {_listed(numbers)}" + (f" ({source})." if source else ".")]


def _caveats(comparison: Comparison) -> list[str]:
    sentences = []
    for run in comparison.runs:
        if run.state != "finished":
            sentences.append(f"{run.label}: {run.ending}.")
        if note := (run.outcome or {}).get("note"):
            sentences.append(f"{run.label}: {note}.")
        lost = [row["iteration"] for row in run.rows if not is_number(row.get("train"))]
        if lost:
            sentences.append(f"{run.label}: its error is not finite at iteration {lost[0]}.")
    return sentences


def _named(methods: list[Method], unit: str) -> str:
    """Some methods with their errors; only their number where there are more."""
    names = [f"{m.label} {with_range(m.result, unit)}" for m in methods[:MOST_NAMED]]
    rest = len(methods) - len(names)
    return _listed([*names, f"{rest} more"] if rest else names)


def with_range(found: Spread | None, unit: str) -> str:
    """An error, and between which others it is the median."""
    if found is None:
        return "no number"
    middle = error(found.middle, unit)
    if found.count == 1:
        return middle
    low, high = error(found.low, unit), error(found.high, unit)
    return f"{middle} ({low} to {high} over {found.count} seeds)"


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

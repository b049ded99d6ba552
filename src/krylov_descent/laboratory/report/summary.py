"""Who won, by what measure, in sentences."""

from dataclasses import dataclass

from krylov_descent.laboratory.record import Row
from krylov_descent.laboratory.report.numbers import duration, error, is_number, published
from krylov_descent.laboratory.report.runs import Comparison, Run, same_error_seconds


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
    value = error(_best(measured[0])["test"], comparison.unit)
    winners = [run.label for run in _winners(comparison)]
    if len(measured) == 1:
        return f"{winners[0]} has a test error of {value}."
    verb = "has" if len(winners) == 1 else "share"
    return f"{_listed(winners)} {verb} the lowest test error of {len(measured)} runs: {value}."


def _moment(comparison: Comparison) -> list[str]:
    """When each winner had it, and who is next."""
    winners = _winners(comparison)
    sentences = []
    for run in winners:
        row = _best(run)
        whose = "its" if len(winners) == 1 else f"{run.label}'s"
        lowest = (
            ", where the validation error was lowest" if is_number(row.get("validation")) else ""
        )
        sentences.append(
            f"That is {whose} {comparison.metric} at iteration {row['iteration']}, after "
            f"{duration(row['seconds'])}{lowest}."
        )
    for second in comparison.measured[len(winners) :][:1]:
        value = error(_best(second)["test"], comparison.unit)
        sentences.append(f"{second.label} follows with {value}.")
    return sentences


def _speed(comparison: Comparison) -> list[str]:
    """Time to the same training error: the winner and HF, or the winner and the second."""
    measured = comparison.measured
    if len(measured) < 2:
        return []
    first = measured[0]
    reference = comparison.reference
    other = reference if reference is not None and reference is not first else measured[1]
    times = same_error_seconds(first, other)
    if times is None:
        return []
    level, mine, its = times
    return [
        f"To the worse of {first.label}'s and {other.label}'s final training errors, "
        f"{error(level, comparison.unit)}, {first.label} took {duration(mine)} and "
        f"{other.label} {duration(its)}."
    ]


def _published(comparison: Comparison) -> list[str]:
    """The test errors of the source named first, which is the paper."""
    rows = [row for row in comparison.published if is_number(row.get("test"))]
    if not rows:
        return []
    source = rows[0].get("source", "")
    numbers = [
        f"{row['method']} {published(row['test'], comparison.unit)}"
        for row in rows
        if row.get("source", "") == source
    ]
    return [f"Published test errors: {_listed(numbers)}" + (f" ({source})." if source else ".")]


def _caveats(comparison: Comparison) -> list[str]:
    sentences = []
    for run in comparison.runs:
        if run.state != "finished":
            sentences.append(f"{run.label}: {run.ending}.")
        lost = [row["iteration"] for row in run.rows if not is_number(row.get("train"))]
        if lost:
            sentences.append(f"{run.label}: its error is not finite at iteration {lost[0]}.")
    return sentences


def _winners(comparison: Comparison) -> list[Run]:
    measured = comparison.measured
    return [run for run in measured if _best(run)["test"] == _best(measured[0])["test"]]


def _best(run: Run) -> Row:
    return run.best or {}


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

"""The problems of a page with several of them, as one table: what there is, and where it is."""

from html import escape

from krylov_descent.laboratory.report.comparison import Comparison
from krylov_descent.laboratory.report.marks import swatch
from krylov_descent.laboratory.report.methods import Method
from krylov_descent.laboratory.report.summary import with_range
from krylov_descent.laboratory.report.tables import scrolling

# Methods that a row has room for.
MOST_SHOWN = 5


def overview(comparisons: list[Comparison], anchors: list[str]) -> str:
    """A row for each problem: its runs, and its methods' test errors, the best first."""
    rows = "".join(map(_row, comparisons, anchors))
    head = "".join(
        f'<th scope="col"{kind}>{name}</th>'
        for name, kind in (("Problem", ""), ("runs", ""), ("Test errors", ' class="text"'))
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    heading = '<h2 id="overview">Overview</h2>'
    return f'<section class="overview">{heading}{scrolling("Overview", table)}</section>'


def _row(comparison: Comparison, anchor: str) -> str:
    measured = comparison.measured
    results = [_result(method, comparison.unit) for method in measured[:MOST_SHOWN]]
    rest = len(measured) - len(results)
    results += [f"<span>{rest} more</span>"] if rest else []
    waiting = sum(run.state != "finished" for run in comparison.runs)
    if waiting:
        results.append(f'<span class="unfinished">{waiting} of them not finished</span>')
    link = f'<a href="#{anchor}">{escape(comparison.heading)}</a>'
    return (
        f'<tr><th scope="row">{link}</th><td>{len(comparison.runs)}</td>'
        f'<td class="text">{" ".join(results)}</td></tr>'
    )


def _result(method: Method, unit: str) -> str:
    text = with_range(method.result, unit)
    return f"<span>{swatch(method.style)}{escape(method.label)} {escape(text)}</span>"

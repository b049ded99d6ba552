"""The convergence curves as an SVG that needs no script; where scripts run, theirs replaces it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from krylov_descent.laboratory.report.bands import band, thinned
from krylov_descent.laboratory.report.comparison import Comparison
from krylov_descent.laboratory.report.methods import RESULT, Method
from krylov_descent.laboratory.report.numbers import given, is_number

WIDTH, HEIGHT = 1000, 420
LEFT, RIGHT, TOP, BOTTOM = 54, 790, 12, 378
LINE = 14  # between labels
LONGEST = 26  # characters of a label
MOST_STEPS = 250
Place = tuple[float, float | None]


@dataclass(frozen=True)
class Window:
    """What of the plane is shown: x from 0, y logarithmic."""

    end: float
    low: float
    high: float

    def across(self, x: float) -> float:
        """Where an x lies."""
        return LEFT + x / self.end * (RIGHT - LEFT)

    def up(self, y: float) -> float:
        """Where a y lies; what the axis has no place for is at its lower edge."""
        if y <= 0:
            return BOTTOM
        share = (math.log10(y) - self.low) / (self.high - self.low)
        return BOTTOM - max(share, 0.0) * (BOTTOM - TOP)


@dataclass(frozen=True)
class Curve:
    """A method's steps, and the band around them; without a band its edges are the steps."""

    method: Method
    middle: list[Place]
    low: list[Place]
    high: list[Place]


def convergence_svg(comparison: Comparison) -> str:
    """The test error over seconds, a curve for each method; empty with nothing to draw."""
    factor = 100.0 if comparison.unit == "%" else 1.0
    curves = [_curve(m, factor) for m in comparison.methods if m.counted and m.result]
    if not curves:
        return ""
    levels = _levels(comparison, factor)
    window = _window(curves, [level for level, _, _ in levels])
    lines = [(window.up(level), kind, text) for level, kind, text in levels]
    unit = f" in {comparison.unit}" if comparison.unit else ""
    parts = [
        f'<path class="paper" d="M{LEFT} {TOP}H{RIGHT}V{BOTTOM}H{LEFT}Z"/>',
        *_axes(window, f"{RESULT} error{unit}"),
        *(f'<path class="{kind}" d="M{LEFT} {y:.1f}H{RIGHT}"/>' for y, kind, _ in lines),
        *(part for curve in curves for part in _drawn(window, curve)),
        *(
            f'<text class="{kind}" x="{LEFT + 6}" y="{y - 3:.1f}">{escape(text)}</text>'
            for y, kind, text in lines
        ),
        *_labels(window, curves),
    ]
    label = f"{RESULT} error over seconds, one curve for each method"
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def _curve(method: Method, factor: float) -> Curve:
    if len(method.counted) > 1:
        found = band(method.counted, "seconds", RESULT, MOST_STEPS)
        edges = (found.middle, found.low, found.high)
        middle, low, high = (_places(found.x, values, factor) for values in edges)
        return Curve(method, middle, low, high)
    rows = thinned(method.counted[0].rows, MOST_STEPS)
    only = _places([row["seconds"] for row in rows], [row.get(RESULT) for row in rows], factor)
    return Curve(method, only, only, only)


def _places(xs: Iterable[float], ys: Iterable[float | None], factor: float) -> list[Place]:
    return [
        (x, factor * y if y is not None and is_number(y) else None)
        for x, y in zip(xs, ys, strict=True)
    ]


def _levels(comparison: Comparison, factor: float) -> list[tuple[float, str, str]]:
    """Level, class and text of the horizontal lines."""
    lines = [
        (
            factor * row[RESULT],
            "reference",
            f"{row.get('method')}, published: {given(row[RESULT], comparison.unit)}",
        )
        for row in comparison.published
        if is_number(row.get(RESULT)) and row[RESULT] > 0
    ]
    if comparison.target:
        text = f"target {given(comparison.target, comparison.unit)}"
        lines.append((factor * comparison.target, "target", text))
    return lines


def _window(curves: list[Curve], levels: list[float]) -> Window:
    end = max(x for curve in curves for x, _ in curve.middle) or 1.0
    edges = (y for curve in curves for _, y in (*curve.low, *curve.high))
    seen = [y for y in (*edges, *levels) if y is not None and y > 0] or [1.0]
    low, high = math.log10(min(seen)), math.log10(max(seen))
    space = (high - low) * 0.06 or 0.1
    return Window(1.01 * end, low - space, high + space)


def _axes(window: Window, name: str) -> Iterator[str]:
    for x in _even(0.0, window.end, 8):
        at = window.across(x)
        yield f'<path class="grid" d="M{at:.1f} {TOP}V{BOTTOM}"/>'
        yield f'<text x="{at:.1f}" y="{BOTTOM + 16}" text-anchor="middle">{x:g}</text>'
    for y in _logarithmic(window):
        at = window.up(y)
        yield f'<path class="grid" d="M{LEFT} {at:.1f}H{RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>'
    middle = (TOP + BOTTOM) / 2
    yield f'<text class="axis" x="{RIGHT}" y="{BOTTOM + 34}" text-anchor="end">seconds</text>'
    yield (
        f'<text class="axis" x="11" y="{middle}" text-anchor="middle" '
        f'transform="rotate(-90 11 {middle})">{name}</text>'
    )


def _even(start: float, end: float, count: int) -> list[float]:
    """Round numbers between two others."""
    rough = (end - start) / count
    ten = 10.0 ** math.floor(math.log10(rough))
    step = next(m * ten for m in (1, 2, 5, 10) if m * ten >= 0.999 * rough)
    return [i * step for i in range(math.ceil(start / step), math.floor(end / step) + 1)]


def _logarithmic(window: Window) -> list[float]:
    decades = window.high - window.low
    if decades < 0.8:
        return _even(10**window.low, 10**window.high, 6)
    stride, parts = max(1, math.ceil(decades / 9)), (1, 2, 5) if decades <= 3 else (1,)
    powers = range(math.floor(window.low), math.ceil(window.high) + 1)
    values = [part * 10.0**power for power in powers if power % stride == 0 for part in parts]
    return [value for value in values if window.low <= math.log10(value) <= window.high]


def _drawn(window: Window, curve: Curve) -> Iterator[str]:
    style = curve.method.style
    if curve.low is not curve.high:
        for low, high in zip(_pieces(curve.low), _pieces(curve.high), strict=True):
            back = _steps(window, low)[::-1]
            outline = "L".join([*_steps(window, high), *back])
            yield f'<path class="band {style}" d="M{outline}Z"/>'
    path = "".join(f"M{'L'.join(_steps(window, piece))}" for piece in _pieces(curve.middle))
    yield f'<path class="curve {style}" d="{path}"/>'


def _pieces(places: Sequence[Place]) -> list[list[tuple[float, float]]]:
    """Split where a number is missing; a piece ends where the missing one begins."""
    pieces: list[list[tuple[float, float]]] = []
    drawing = False
    for x, y in places:
        if y is None:
            if drawing:
                pieces[-1].append((x, pieces[-1][-1][1]))
            drawing = False
            continue
        if not drawing:
            pieces.append([])
        pieces[-1].append((x, y))
        drawing = True
    return pieces


def _steps(window: Window, piece: list[tuple[float, float]]) -> list[str]:
    """Corners of the steps: a value holds until the next one is measured."""
    corners, before = [], ""
    for x, y in piece:
        across, up = f"{window.across(x):.1f}", f"{window.up(y):.1f}"
        if before:
            corners.append(f"{across} {before}")
        corners.append(f"{across} {up}")
        before = up
    return corners if len(corners) > 1 else 2 * corners


def _labels(window: Window, curves: list[Curve]) -> Iterator[str]:
    """Each curve's name at its end, pushed apart where they collide."""
    ends = []
    for curve in curves:
        there = [(x, y) for x, y in curve.middle if y is not None]
        if there:
            ends.append((window.up(there[-1][1]), window.across(there[-1][0]), curve.method))
    ends.sort(key=lambda end: end[0])
    heights = _apart([y for y, _, _ in ends])
    for (y, x, method), at in zip(ends, heights, strict=True):
        name = method.label if len(method.label) <= LONGEST else method.label[: LONGEST - 1] + "…"
        leader = f"M{x:.1f} {y:.1f}H{RIGHT}L{RIGHT + 8} {at:.1f}"
        yield f'<path class="leader {method.style}" d="{leader}"/>'
        yield (
            f'<text class="label {method.style}" x="{RIGHT + 12}" y="{at + 4:.1f}">'
            f"{escape(name)}</text>"
        )


def _apart(heights: list[float]) -> list[float]:
    """Heights in the same order with room between them, none below the frame."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + LINE) if placed else height)
    lowest = float(BOTTOM)
    for index in range(len(placed) - 1, -1, -1):
        placed[index] = min(placed[index], lowest)
        lowest = placed[index] - LINE
    return placed

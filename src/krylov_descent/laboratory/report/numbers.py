"""Numbers as people read them; a dash stands for what is not there."""

import math

NOTHING = "–"


def is_number(value: object) -> bool:
    """Whether it can be compared and drawn: neither absent nor NaN nor infinite."""
    return isinstance(value, int | float) and math.isfinite(value)


def plain(value: float | None) -> str:
    """Three significant digits: 0.170, 24.2, 1,310, 2.50e-07; whole numbers as they are."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "not finite"
    if abs(value) < 1e6 and (abs(value) >= 1000 or value == int(value)):
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def error(value: float | None, unit: str) -> str:
    """An error in its problem's unit: 0.25, or 1.70% for the fraction 0.017."""
    if unit == "%" and value is not None and math.isfinite(value):
        return f"{100 * value:.2f}%"
    return plain(value)


def duration(seconds: float | None) -> str:
    """0.43 s, 13.4 s, 2 min 05 s, 1 h 12 min."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def given(value: float | None, unit: str) -> str:
    """An error with the digits that somebody gave it: 0.25, not 0.250."""
    if value is None or unit == "%":
        return error(value, unit)
    return f"{value:g}"

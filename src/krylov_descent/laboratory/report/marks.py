"""How a method is marked throughout the page: one colour for each optimiser, and a dash pattern."""

import zlib
from collections.abc import Sequence

# As many as page.css has.
COLOURS, DASHES = 10, 5
# An optimiser has its colour on every page; one that is not named here has it by its name.
KNOWN = (
    "ksd",
    "hf",
    "lbfgs",
    "ncg",
    "adam",
    "ksd-paper",
    "adamw",
    "sgd",
    "logistic-regression",
    "gradient-boosting",
)


def curve_styles(optimizers: Sequence[str]) -> list[str]:
    """The classes of each method's colour and dash pattern, given the names of their optimisers.

    Several methods of one colour differ in their dash patterns.
    """
    colours = [_colour(name) for name in optimizers]
    return [
        f"colour-{colour} dash-{colours[:index].count(colour) % DASHES}"
        for index, colour in enumerate(colours)
    ]


def swatch(style: str) -> str:
    """A short piece of the method's curve, to stand before its name."""
    return (
        f'<svg class="swatch {style}" viewBox="0 0 28 8" aria-hidden="true">'
        '<path d="M0 4H28"/></svg>'
    )


def _colour(optimizer: str) -> int:
    if optimizer in KNOWN:
        return KNOWN.index(optimizer)
    return zlib.crc32(optimizer.encode()) % COLOURS

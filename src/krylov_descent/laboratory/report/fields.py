"""Solutions of equations as coloured pictures: what a net has found, and where it is wrong."""

from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor

from krylov_descent.laboratory.report.marks import swatch
from krylov_descent.laboratory.report.numbers import plain
from krylov_descent.laboratory.report.pictures import image

# From the lowest value to the highest, as red, green and blue.
BOTH_SIGNS = ((33, 102, 172), (247, 247, 247), (178, 24, 43))
FROM_ZERO = ((252, 251, 253), (128, 125, 186), (63, 0, 125))


@dataclass(frozen=True)
class Field:
    """A solution over a plane and what a net makes of it, [rows, columns] both.

    Attributes:
        solution: from bottom to top, and from left to right.
        outputs: of the net.
        plane: a sentence on what is to the right and what upwards.
    """

    solution: Tensor
    outputs: Tensor
    plane: str

    def __post_init__(self) -> None:
        """Check that there is one plane."""
        if self.solution.dim() != 2 or self.solution.shape != self.outputs.shape:
            raise ValueError(
                "`solution` and `outputs` must have one shape [rows, columns], found "
                f"{tuple(self.solution.shape)} and {tuple(self.outputs.shape)}"
            )


def field_figure(by_method: list[tuple[str, str, Field]]) -> str:
    """The solution once, then what each method (style, label) made of it beside its error."""
    first = by_method[0][2]
    largest = float(first.solution.abs().max()) or 1.0
    rows = [_row("solution", first.plane, [_signed(first.solution, largest, "the solution")])]
    for style, label, field in by_method:
        error = (field.outputs - field.solution).abs()
        worst = float(error.max())
        pictures = [
            _signed(field.outputs, largest, f"the solution by {label}"),
            image(
                _coloured(error / worst if worst else error, FROM_ZERO),
                f"the error of {label}, from 0 to {plain(worst)}",
            ),
        ]
        note = f"beside it the error, at most {plain(worst)}"
        rows.append(_row(swatch(style) + escape(label), note, pictures))
    return f'<figure class="fields">{"".join(rows)}</figure>'


def _signed(values: Tensor, largest: float, text: str) -> str:
    return image(_coloured((values / largest + 1) / 2, BOTH_SIGNS), text)


def _row(name: str, note: str, pictures: list[str]) -> str:
    """One row of the figure: `name` is HTML, `note` is text."""
    return f'<div class="field"><p>{name}<small>{escape(note)}</small></p>{"".join(pictures)}</div>'


def _coloured(parts: Tensor, colours: tuple[tuple[int, int, int], ...]) -> Tensor:
    """Colours [rows, columns, 3] of numbers in [0, 1], the first row at the top."""
    scale = torch.tensor(colours, dtype=torch.float64)
    place = parts.double().flip(0).nan_to_num(0.0).clamp(0, 1) * (len(colours) - 1)
    below = place.floor().long().clamp(max=len(colours) - 2)
    weight = (place - below).unsqueeze(-1)
    return torch.lerp(scale[below], scale[below + 1], weight).round()

"""Reconstructions as PNG strips inside the page.

The encoder is written here: 8-bit pixels without filters are a header and one deflated block.
"""

import base64
import math
import struct
import zlib
from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor

from krylov_descent.laboratory.report.marks import swatch
from krylov_descent.laboratory.report.numbers import plain

MOST_IMAGES = 12
GAP = 2


@dataclass(frozen=True)
class Reconstructions:
    """Images in [0, 1] that went into an autoencoder and what came out, [n, side²] both."""

    inputs: Tensor
    outputs: Tensor

    def __post_init__(self) -> None:
        """Check that there are square images, as many out as in."""
        shape = tuple(self.inputs.shape)
        if tuple(self.outputs.shape) != shape:
            raise ValueError(
                f"`outputs` must have the shape of `inputs`, {shape}, found "
                f"{tuple(self.outputs.shape)}"
            )
        if len(shape) != 2 or 0 in shape or math.isqrt(shape[1]) ** 2 != shape[1]:
            raise ValueError(f"`inputs` must be square images in rows [n, side²], found {shape}")

    @property
    def squared_error(self) -> float:
        """Mean over the images of the sum over pixels, as the problems measure it."""
        return float((self.outputs - self.inputs).double().square().sum(1).mean())


def reconstruction_figure(by_method: list[tuple[str, str, Reconstructions]]) -> str:
    """Strips: the inputs once, then what each method (style, label) made of them."""
    strips = []
    shown: Tensor | None = None
    for style, label, images in by_method:
        if shown is None or not torch.equal(shown, images.inputs):
            shown = images.inputs
            strips.append(_strip("input", "", shown))
        name = swatch(style) + escape(label)
        note = f"squared error {plain(images.squared_error)}"
        strips.append(_strip(name, note, images.outputs))
    return f'<figure class="strips">{"".join(strips)}</figure>'


def png(pixels: Tensor) -> bytes:
    """A PNG file of bytes, [height, width] in grey (0 is black) or [height, width, 3] in colour."""
    height, width = pixels.shape[:2]
    rows = pixels.to(torch.uint8).reshape(height, -1).tolist()
    lines = b"".join(b"\0" + bytes(row) for row in rows)
    kind_of_colour = 0 if pixels.dim() == 2 else 2
    header = struct.pack(">IIBBBBB", width, height, 8, kind_of_colour, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def image(pixels: Tensor, text: str) -> str:
    """The HTML of a picture that lies inside the page, and what it shows in words."""
    source = "data:image/png;base64," + base64.b64encode(png(pixels)).decode()
    return f'<img src="{source}" alt="{escape(text)}">'


def _strip(name: str, note: str, images: Tensor) -> str:
    """One row of the figure: `name` is HTML, `note` is text."""
    picture = image(_side_by_side(images), f"{min(len(images), MOST_IMAGES)} images")
    return f'<div class="strip"><p>{name}<small>{escape(note)}</small></p>{picture}</div>'


def _side_by_side(images: Tensor) -> Tensor:
    """The first images as dark ink on white, [side, n·(side + gap) − gap], 0 to 255."""
    pixels = images[:MOST_IMAGES].detach().cpu().double().nan_to_num(0.0).clamp(0, 1)
    side = math.isqrt(pixels.shape[1])
    tiles = 255 * (1 - pixels.view(-1, side, side))
    padded = torch.nn.functional.pad(tiles, (0, GAP), value=255.0)
    return padded.transpose(0, 1).reshape(side, -1)[:, :-GAP].round()

"""Nets that say the next byte of a text: the manual that comes with Python."""

from functools import cache

import torch
from torch import Tensor, nn

from benchmarks.road.problem import Task

# Windows of the text, their length, and the width of the nets.
SIZES = {"cpu": (300, 24, 32), "cuda": (4000, 32, 64)}


@cache
def _windows(count: int, length: int) -> tuple[Tensor, Tensor, int]:
    """Bytes [count, length], those that follow them, and how many kinds of bytes there are."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics)).encode()
    values, numbers = torch.unique(torch.tensor(list(text)), return_inverse=True)
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(numbers) - length - 1, (count, 1), generator=generator)
    places = starts + torch.arange(length)
    return numbers[places], numbers[places + 1], len(values)


class Reader(nn.Module):
    """A recurrent net over bytes."""

    def __init__(self, cell: type[nn.GRU | nn.LSTM], kinds: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, width // 2)
        self.cell = cell(width // 2, width, batch_first=True)
        self.head = nn.Linear(width, kinds)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.cell(self.embedding(x))[0])
        return found.transpose(1, 2)


class Attentive(nn.Module):
    """A transformer of one layer that sees the bytes so far."""

    def __init__(self, kinds: int, length: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, width)
        self.places = nn.Parameter(torch.randn(length, width) / 10)
        self.layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, kinds)
        future = torch.triu(torch.full((length, length), float("-inf")), 1)
        self.register_buffer("future", future)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.layer(self.embedding(x) + self.places, src_mask=self.future)
        found: Tensor = self.head(seen)
        return found.transpose(1, 2)


def reader(cell: type[nn.GRU | nn.LSTM], kind: str, seed: int) -> Task:
    """GRU or LSTM."""
    count, length, width = SIZES[kind]
    inputs, targets, kinds = _windows(count, length)
    torch.manual_seed(seed)
    return Task(Reader(cell, kinds, width), nn.CrossEntropyLoss(), inputs, targets)


def transformer(kind: str, seed: int) -> Task:
    """Attention."""
    count, length, width = SIZES[kind]
    inputs, targets, kinds = _windows(count, length)
    torch.manual_seed(seed)
    return Task(Attentive(kinds, length, width), nn.CrossEntropyLoss(), inputs, targets)

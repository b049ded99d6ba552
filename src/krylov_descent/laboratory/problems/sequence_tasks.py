"""Sequences that ask for what stood long before, drawn at random.

The tasks of Hochreiter & Schmidhuber 1997, with the ranges of Martens & Sutskever 2011. Inputs are
[n, steps, numbers]: zeros in front of the shorter sequences, and a last number that is 1 on every
step of the sequence itself (see `recurrent`). Places are counted from 0 at a sequence's beginning.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from krylov_descent.laboratory.problems.problem import Split

Floats = npt.NDArray[np.floating]
Booleans = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]
# (number of sequences, T, generator) -> inputs and targets
Draw = Callable[[int, int, np.random.Generator], Split]
# The first place of each mark and the one past its last, as parts of T.
Ranges = tuple[tuple[float, float], ...]

# Sequences are as long as T or up to a tenth longer.
LONGER = 10
# Temporal order: the symbols of no meaning, then two that count, the beginning and the end.
DISTRACTORS, KINDS, BEGINNING, END, SYMBOLS = 4, 2, 6, 7, 8


def draw_marked(
    count: int,
    length: int,
    generator: np.random.Generator,
    *,
    ranges: Ranges,
    bits: bool,
    answer: Callable[[Floats, Floats], Floats],
) -> Split:
    """Addition, multiplication and xor: a number and a mark per step, [n, steps, 3].

    Numbers are from [0, 1), or bits. The mark is 1 at two places, -1 at the beginning and the
    end, else 0. The target [n, 1] is the answer for the two marked numbers.
    """
    inside, begin, places = _layout(count, length, ranges, generator)
    numbers = generator.random(inside.shape, dtype=np.float32)
    if bits:
        numbers = (numbers < 0.5).astype(np.float32)
    marks, rows = np.zeros_like(numbers), np.arange(count)
    marks[rows, begin] = marks[:, -1] = -1.0
    marks[rows[:, None], places] = 1.0
    first, second = (numbers[rows, places[:, i]] for i in (0, 1))
    inputs = np.stack([numbers * inside, marks, inside], 2, dtype=np.float32)
    return _split(inputs, answer(first, second)[:, None])


def draw_temporal_order(
    count: int, length: int, generator: np.random.Generator, *, ranges: Ranges
) -> Split:
    """Symbols of 8 kinds, one of n: [n, steps, 9]. The target [n] is what the marked ones were.

    X or Y stand at as many places as there are ranges, the first of them is the highest bit of
    the target; elsewhere there are random symbols of four other kinds, between one for the
    beginning and one for the end.
    """
    inside, begin, places = _layout(count, length, ranges, generator)
    symbols = generator.integers(DISTRACTORS, size=inside.shape)
    kinds = generator.integers(KINDS, size=places.shape)
    rows = np.arange(count)
    symbols[rows, begin] = BEGINNING
    symbols[:, -1] = END
    symbols[rows[:, None], places] = DISTRACTORS + kinds
    powers = KINDS ** np.arange(len(ranges))[::-1]
    return _split(_one_hot(symbols, SYMBOLS, inside), kinds @ powers)


def draw_random_permutation(count: int, length: int, generator: np.random.Generator) -> Split:
    """T symbols, of which the last is to be predicted: [n, T - 1, T + 1], target [n].

    It is the same as the first, 0 or 1; between them stand the T - 2 other symbols in random
    order.
    """
    first = generator.integers(2, size=(count, 1))
    # Several times as fast as numpy's own permutations of rows.
    others = 2 + generator.random((count, length - 2), dtype=np.float32).argsort(1)
    return _split(_one_hot(np.concatenate([first, others], 1), length), first[:, 0])


def draw_memorization(
    count: int, length: int, generator: np.random.Generator, *, places: int, symbols: int
) -> Split:
    """A pattern, T blanks, and then the pattern is asked for: [n, T + 2·places, symbols + 3].

    The last of the T blanks is a cue. The targets [n, places] are the pattern. Where no more than
    `count` patterns exist, they are all of them, each once.
    """
    if symbols**places <= count:
        count = symbols**places
        patterns = np.arange(count)[:, None] // symbols ** np.arange(places)[::-1] % symbols
    else:
        patterns = generator.integers(symbols, size=(count, places))
    blank, cue = symbols, symbols + 1
    shown = np.full((count, length + 2 * places), blank)
    shown[:, :places] = patterns
    shown[:, places + length - 1] = cue
    return _split(_one_hot(shown, symbols + 2), patterns)


def _layout(
    count: int, length: int, ranges: Ranges, generator: np.random.Generator
) -> tuple[Booleans, Integers, Integers]:
    """Sequences of T … 1.1 T steps, each at the end of its row.

    Returns:
        Which steps belong to the sequence [n, 1.1 T], the first of them [n], and the places of
        the marks [n, marks], rising.
    """
    longest = length + length // LONGER
    begin = generator.integers(longest - length, size=count, endpoint=True)
    places = []
    free = 1  # the beginning is taken
    for low, end in ranges:
        least = max(free, round(low * length))
        free = max(least + 1, round(end * length))
        places.append(begin + generator.integers(least, free, size=count))
    return np.arange(longest) >= begin[:, None], begin, np.stack(places, 1)


def _one_hot(symbols: Integers, kinds: int, inside: Booleans | None = None) -> Floats:
    """One number of `kinds` is 1, and the last, which says that this step is of the sequence."""
    here = np.ones_like(symbols, bool) if inside is None else inside
    inputs = np.zeros((*symbols.shape, kinds + 1), np.float32)
    np.put_along_axis(inputs, symbols[:, :, None], here[:, :, None], 2)
    inputs[:, :, -1] = here
    return inputs


def _split(inputs: Floats, targets: Floats | Integers) -> Split:
    whole = np.issubdtype(targets.dtype, np.integer)
    return (
        torch.from_numpy(inputs),
        torch.from_numpy(targets.astype(np.int64 if whole else np.float32)),
    )

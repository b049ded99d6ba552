"""The generated sequences, read back step by step and answered by hand."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from krylov_descent.laboratory.problems.problem import Split
from krylov_descent.laboratory.problems.sequence_tasks import Draw
from krylov_descent.laboratory.problems.sequences import TASKS

COUNT = 300


def drawn(name: str, length: int = 100, count: int = COUNT, seed: int = 0) -> Split:
    return TASKS[name].draw(count, length, np.random.default_rng(seed))


def unpadded(inputs: Tensor) -> list[Tensor]:
    """Each sequence by itself, without padding and without the number that says where it is."""
    found = []
    for sequence in inputs:
        begin = int(sequence[:, -1].argmax())
        assert not sequence[:begin].any()
        assert bool((sequence[begin:, -1] == 1).all())
        found.append(sequence[begin:, :-1])
    return found


def symbols(sequence: Tensor) -> list[int]:
    assert bool(((sequence == 0) | (sequence == 1)).all())
    assert bool((sequence.sum(1) == 1).all())
    return sequence.argmax(1).tolist()


def check_lengths(sequences: list[Tensor], shortest: int, longest: int) -> None:
    lengths = {len(sequence) for sequence in sequences}
    assert (min(lengths), max(lengths)) == (shortest, longest)


def check_places(places: list[int], first: int, end: int) -> None:
    """They fill the range, to both its ends."""
    assert min(places) == first
    assert max(places) == end - 1


@pytest.mark.parametrize(
    ("name", "length", "ranges"),
    [
        ("addition", 100, ((1, 10), (10, 50))),
        ("addition", 200, ((1, 20), (20, 100))),
        ("multiplication", 100, ((1, 10), (10, 50))),
        ("xor", 50, ((1, 10), (15, 25))),
    ],
)
def test_marked_numbers(name: str, length: int, ranges: tuple[tuple[int, int], ...]) -> None:
    inputs, targets = drawn(name, length, count=3_000)
    sequences = unpadded(inputs)
    check_lengths(sequences, length, length + length // 10)
    marked = []
    for sequence, target in zip(sequences, targets, strict=True):
        numbers, marks = sequence.T
        places = marks.eq(1).nonzero()[:, 0].tolist()
        assert len(places) == 2
        assert marks[0] == marks[-1] == -1
        assert marks.ne(0).sum() == 4
        a, b = (float(numbers[place]) for place in places)
        answer = {"addition": a + b, "multiplication": a * b, "xor": float(a != b)}[name]
        assert float(target) == pytest.approx(answer, abs=1e-6)
        marked.append(places)
    for i, (first, end) in enumerate(ranges):
        check_places([places[i] for places in marked], first, end)
    numbers = torch.cat([sequence[:, 0] for sequence in sequences])
    if name == "xor":
        assert set(numbers.tolist()) == {0.0, 1.0}
    else:
        assert numbers.min() >= 0
        assert numbers.max() < 1
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("name", "ranges"),
    [
        ("temporal-order", ((1, 10), (40, 50))),
        ("temporal-order-3", ((1, 10), (30, 40), (50, 60))),
    ],
)
def test_temporal_order(name: str, ranges: tuple[tuple[int, int], ...]) -> None:
    inputs, targets = drawn(name, count=2_000)
    sequences = unpadded(inputs)
    check_lengths(sequences, 100, 110)
    marked = []
    for sequence, target in zip(sequences, targets.tolist(), strict=True):
        found = symbols(sequence)
        places = [i for i, symbol in enumerate(found) if symbol in (4, 5)]
        assert target == int("".join(str(found[place] - 4) for place in places), 2)
        assert (found[0], found[-1]) == (6, 7)
        others = {s for i, s in enumerate(found[1:-1], 1) if i not in places}
        assert others <= {0, 1, 2, 3}
        marked.append(places)
    for i, (first, end) in enumerate(ranges):
        check_places([places[i] for places in marked], first, end)
    assert set(targets.tolist()) == set(range(2 ** len(ranges)))


def test_random_permutation() -> None:
    inputs, targets = drawn("random-permutation", length=20)
    for sequence, target in zip(unpadded(inputs), targets.tolist(), strict=True):
        first, *others = symbols(sequence)
        assert first == target
        assert sorted(others) == list(range(2, 20))
    assert set(targets.tolist()) == {0, 1}
    assert len({tuple(symbols(s)) for s in unpadded(inputs)}) > 0.99 * COUNT


@pytest.mark.parametrize(
    ("name", "places", "kinds"), [("memorization-5", 5, 2), ("memorization-20", 10, 5)]
)
def test_memorization(name: str, places: int, kinds: int) -> None:
    inputs, targets = drawn(name)
    for sequence, target in zip(unpadded(inputs), targets.tolist(), strict=True):
        found = symbols(sequence)
        assert found[:places] == target
        assert found[places:] == [kinds] * 99 + [kinds + 1] + [kinds] * places
    assert set(targets.flatten().tolist()) == set(range(kinds))


def test_five_bits_are_all_patterns_once() -> None:
    _, targets = drawn("memorization-5", length=10)
    assert sorted(targets.tolist()) == sorted([int(bit) for bit in f"{i:05b}"] for i in range(32))
    few = drawn("memorization-5", length=10, count=7)
    assert len(few[0]) == 7


@pytest.mark.parametrize("name", TASKS)
def test_the_shortest_sequences_are_right_too(name: str) -> None:
    inputs, targets = drawn(name, length=10, count=50)
    for sequence in unpadded(inputs):
        if name in ("addition", "multiplication", "xor"):
            marks = sequence[:, 1].tolist()
            assert marks.count(1) == 2
            assert marks[0] == marks[-1] == -1
    assert len(inputs) == len(targets)


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"memorization-5"}))
def test_the_seed_decides(name: str) -> None:
    draw: Draw = partial(TASKS[name].draw)
    first, again, other = (draw(20, 20, np.random.default_rng(seed)) for seed in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0], other[0])

"""Torch's way of the operations that an engine may replace, against closed forms."""

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Barrier

import pytest
import torch
from torch import Tensor

from krylov_descent.runtime.ops import Operations, Span, operations, use

TORCHS = Operations()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_jobs_run_one_after_another_and_are_let_go() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = []

    def jobs() -> Iterator[Callable[[], int]]:
        for i in range(4):
            held = torch.zeros(1)
            alive.append(weakref.ref(held))
            job = partial(run, held, i)
            del held
            yield job

    def run(held: Tensor, i: int) -> int:
        most.append(sum(ref() is not None for ref in alive))
        return i

    gc.disable()
    try:
        assert TORCHS.independent(jobs()) == [0, 1, 2, 3]
    finally:
        gc.enable()
    assert max(most) <= 2  # the job that runs, and what made it
    assert TORCHS.begin((partial(int, str(i)) for i in (7, 8)), at_a_time=1) == [7, 8]


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 3)])
def test_a_cross_entropy_and_its_derivatives(shape: tuple[int, ...], averaged: bool) -> None:
    z, t = drawn(*shape).requires_grad_(), drawn(*shape)
    losses = TORCHS.cross_entropy(z, t, averaged=averaged)
    p, share = 1 / (1 + (-z).exp()), 1 / z[0].numel() if averaged else 1.0
    elements = -t * p.log() - (1 - t) * (1 - p).log()
    torch.testing.assert_close(losses, share * elements.reshape(5, -1).sum(1))
    (first,) = torch.autograd.grad(losses, z, TORCHS.ones(losses), create_graph=True)
    torch.testing.assert_close(first, share * (p - t))
    (second,) = torch.autograd.grad(first.sum(), z)
    torch.testing.assert_close(second, share * p * (1 - p))


def test_a_cross_entropy_of_large_logits_is_finite() -> None:
    z = torch.tensor([[1000.0, -1000.0]])
    assert TORCHS.cross_entropy(z, torch.tensor([[1.0, 0.0]]), averaged=False).item() == 0
    assert TORCHS.cross_entropy(z, torch.tensor([[0.0, 0.0]]), averaged=True).item() == 500


def test_sums_over_rows() -> None:
    x, place = drawn(7, 3), torch.full((5,), torch.nan, dtype=torch.float64)
    exact = torch.stack([sum(row[i] for row in x) for i in range(3)])
    ones = x.new_ones(1, 7)
    torch.testing.assert_close(TORCHS.sums_over_rows(x, ones), exact)
    found = TORCHS.sums_over_rows(x, ones, place[1:4])
    assert found.data_ptr() == place[1:].data_ptr()
    torch.testing.assert_close(place[1:4], exact)
    assert place[[0, 4]].isnan().all()


def test_sums_over_samples() -> None:
    x, delta = drawn(7, 3), drawn(7, 2)
    gradients = [d.outer(row) for d, row in zip(delta, x, strict=True)]
    exact = (
        torch.stack(gradients).sum(0),
        torch.stack(gradients).square().sum(0),
        delta.sum(0),
        delta.square().sum(0),
    )
    for found, right in zip(TORCHS.sums_over_samples(x, delta), exact, strict=True):
        torch.testing.assert_close(found, right)


def test_squares_that_would_be_subnormal_count_nothing() -> None:
    x = torch.tensor([[1e-22, 1e-15, 3.0]], dtype=torch.float32)
    delta = torch.tensor([[-1e-20, -1e-18, 2.0]], dtype=torch.float32)
    _, squares, _, of_bias = TORCHS.sums_over_samples(x, delta)
    torch.testing.assert_close(of_bias, torch.tensor([0, 1e-36, 4.0]), rtol=1e-5, atol=0)
    torch.testing.assert_close(squares[2], torch.tensor([0, 4e-30, 36.0]), rtol=1e-5, atol=0)


def test_products_with_rows() -> None:
    rows, x, c = drawn(3, 7), drawn(7), drawn(3)
    combination = sum(c[k] * rows[k] for k in range(3))
    torch.testing.assert_close(
        TORCHS.project(rows, x), torch.stack([(row * x).sum() for row in rows])
    )
    torch.testing.assert_close(TORCHS.combine(rows, c), combination)
    torch.testing.assert_close(TORCHS.combine(rows, c, x), x + combination)
    torch.testing.assert_close(
        TORCHS.gram(rows), torch.stack([torch.stack([(a * b).sum() for b in rows]) for a in rows])
    )
    expected = x - combination
    assert TORCHS.subtract(x, rows, c) is x
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize(("first", "behind"), [(0, 3), (1, 3), (-1, 1), (2, 2), (0, 0)])
def test_products_with_the_rows_of_a_span(first: int, behind: int) -> None:
    """Only the device knows the ends; entries behind the last row are zero."""
    rows, x, most = drawn(4, 7), drawn(7), 3
    span = Span(torch.tensor([first, behind]), most)
    which = slice(max(0, first), behind)
    count = len(rows[which])
    projected, c = TORCHS.project(rows, x, span), drawn(most)
    torch.testing.assert_close(projected[:count], rows[which] @ x)
    assert not projected[count:].any()
    exact = c[:count] @ rows[which]
    torch.testing.assert_close(TORCHS.combine(rows, c, span=span), exact)
    torch.testing.assert_close(TORCHS.combine(rows, c, x, span), x + exact)
    torch.testing.assert_close(TORCHS.subtract(x.clone(), rows, c, span), x - exact)


def test_a_row_is_written() -> None:
    rows, x = drawn(3, 7), drawn(7)
    expected = torch.stack([rows[0], rows[1], 2 * x])
    TORCHS.write_row(rows, torch.tensor([2]), x, torch.tensor(2.0, dtype=x.dtype))
    torch.testing.assert_close(rows, expected)


class Own(Operations):
    """Operations of an engine."""


def test_what_is_used_ends_with_its_block_also_by_an_error() -> None:
    outer, inner, before = Own(), Own(), operations()
    with use(outer):
        assert operations() is outer
        with suppress(ValueError), use(inner):
            assert operations() is inner
            raise ValueError
        assert operations() is outer
    assert operations() is before
    assert type(before) is Operations


def test_threads_do_not_see_each_others_operations() -> None:
    both = Barrier(2, timeout=10)

    def found(own: Operations) -> bool:
        first = operations()
        with use(own):
            both.wait()  # until the other one uses its own, too
            seen = operations()
            both.wait()
        return type(first) is Operations and seen is own

    with use(Own()), ThreadPoolExecutor(2) as pool:
        assert all(pool.map(found, [Own(), Own()]))

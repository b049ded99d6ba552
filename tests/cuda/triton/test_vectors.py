"""What is done with the rows of a basis by few kernels: against float64, and what is launched."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from krylov_descent.algorithms.basis_storage import Alone, StoredBasis
from krylov_descent.algorithms.krylov import (
    KrylovSpace,
    Product,
    fill_with_krylov_space,
    found_on_host,
)
from krylov_descent.algorithms.metric import Diagonal, Metric
from krylov_descent.algorithms.subspace import store_previous
from krylov_descent.cuda.graphs.counted_basis import CountedBasis
from krylov_descent.cuda.triton import entry
from krylov_descent.curvature.preconditioners.preconditioner import Identity
from krylov_descent.runtime.ops import Operations, Span, operations
from tests.cuda.triton.kernels import (
    DEVICE,
    EXACT,
    drawn,
    error,
    launches,
    needs_tensor_cores,
    on_tensor_cores,
    products,
)
from tests.subspaces import Dear

__all__ = ["needs_tensor_cores", "products"]  # fixtures


def fill_slots(
    slots: Tensor, product: Product, metric: Metric, gradient: Tensor, steps: list[Tensor]
) -> Tensor:
    """Algorithm 2 into rows, which are counted on the device."""
    rows, placement, previous = StoredBasis.at(slots), Alone(gradient.numel()), len(steps)
    space = KrylovSpace(CountedBasis(slots), product, metric, gradient, placement)
    store_previous(rows, len(slots) - previous, steps, placement)
    return fill_with_krylov_space(space, len(slots) - previous, previous)


SIZE = 65_603
NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels for vectors that are launched, by name."""
    return launches(monkeypatch, "vectors")


@pytest.fixture
def long_rows(needs_tensor_cores: None) -> Iterator[Operations]:
    """Operations outside of recordings."""
    with torch.device(DEVICE):
        yield entry.basis_operations(torch.device(DEVICE))


def with_gaps(count: int, seed: int = 0) -> Tensor:
    """Rows [count, n] that begin anywhere."""
    return drawn(count, SIZE + 6, seed=seed)[:, 5:-1]


def error_of_gram(found: Tensor, rows: Tensor) -> float:
    """The largest, relative to the lengths of both rows."""
    exact = rows.double() @ rows.double().t()
    lengths = exact.diagonal().sqrt()
    return float(((found - exact).abs() / lengths.outer(lengths)).max())


# One block of rows, a part of one, several, and more pairs of them than a program has.
@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("count", [1, 9, 21, 35])
def test_all_inner_products_between_rows(
    long_rows: Operations, launched: list[str], count: int
) -> None:
    rows = with_gaps(count)
    rows[0] = 1 + 2**-12  # which tf32 does not know
    found = long_rows.gram(rows)
    assert launched == ["gram", "add_up_parts"]
    assert error_of_gram(found, rows) < 3 * EXACT
    assert torch.equal(found, found.t())


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("filled", [1, 8, 9, 20])
def test_all_inner_products_between_the_rows_that_are_filled(
    long_rows: Operations, filled: int
) -> None:
    rows = with_gaps(35)
    rows[filled:] = 0
    ends = torch.tensor([0, filled], device=rows.device)
    found = long_rows.gram(rows, Span(ends, len(rows)))
    assert error_of_gram(found[:filled, :filled], rows[:filled]) < 3 * EXACT
    found[:filled, :filled] = 0
    assert not found.any()


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("bad", [NAN, INFINITY])
def test_a_row_that_is_not_finite_spoils_its_own_inner_products(
    long_rows: Operations, bad: float
) -> None:
    rows = with_gaps(10)
    rows[8, 7] = bad
    found, others = long_rows.gram(rows), [k for k in range(10) if k != 8]
    assert not found[8].isfinite().any()
    assert not found[:, 8].isfinite().any()
    assert error_of_gram(found[others][:, others], rows[others]) < 3 * EXACT
    along = long_rows.project(rows, rows[0])
    assert not along[8].isfinite()
    assert along[others].isfinite().all()


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("count", [1, 2, 3, 8, 21])
def test_projections(long_rows: Operations, launched: list[str], count: int) -> None:
    rows, x = with_gaps(count), drawn(SIZE, seed=1)
    found = long_rows.project(rows, x)
    assert launched == ["project", "add_up_parts"]
    assert error(found, rows.double() @ x.double()) < 10 * EXACT


@pytest.mark.gpu
@pytest.mark.interpreted
def test_combinations_of_long_rows(long_rows: Operations, launched: list[str]) -> None:
    rows, c, start = with_gaps(7), drawn(7, seed=1), drawn(SIZE, seed=2)
    exact = rows.double().t() @ c.double()
    assert error(long_rows.combine(rows, c), exact) < EXACT
    assert error(long_rows.combine(rows, c, start), start.double() + exact) < EXACT
    expected = start.double() - exact
    assert long_rows.subtract(start, rows, c) is start
    assert error(start, expected) < EXACT
    assert launched == ["combine"] * 3


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("ends", [(0, 12), (0, 5), (3, 5), (-1, 1), (10, 12), (0, 0)])
@pytest.mark.parametrize("most", [2, 12])
def test_rows_of_a_span_are_those_of_torch(
    long_rows: Operations, launched: list[str], ends: tuple[int, int], most: int
) -> None:
    rows, x, c = with_gaps(12), drawn(SIZE, seed=1), drawn(most, seed=2)
    rows[ends[1] :] = NAN if ends[1] else 1.0  # which the kernels do not read
    span, plain, clean = Span(torch.tensor(ends), most), Operations(), rows.nan_to_num(0.0)
    if ends[1] - max(0, ends[0]) <= most:
        found = long_rows.project(rows, x, span)
        torch.testing.assert_close(found, plain.project(clean, x, span), rtol=1e-4, atol=1e-2)
        for start in (None, x):
            combined = plain.combine(clean, c, start, span)
            torch.testing.assert_close(long_rows.combine(rows, c, start, span), combined)
        expected = plain.subtract(x.clone(), clean, c, span)
        torch.testing.assert_close(long_rows.subtract(x, rows, c, span), expected)
        assert launched == ["project", "add_up_parts", "combine", "combine", "combine"]


@pytest.mark.gpu
@pytest.mark.interpreted
def test_a_row_is_written(long_rows: Operations, launched: list[str]) -> None:
    rows, x, scale = with_gaps(5), drawn(SIZE, seed=1), torch.tensor(0.3)
    expected = rows.clone()
    expected[3] = 0.3 * x
    long_rows.write_row(rows, torch.tensor([3]), x, scale)
    assert launched == ["write_row"]
    torch.testing.assert_close(rows, expected)


@pytest.mark.gpu
@pytest.mark.interpreted
def test_what_the_kernels_do_not_support_is_left_to_torch(
    long_rows: Operations, launched: list[str]
) -> None:
    for rows in (drawn(3, 100), with_gaps(3).double(), drawn(SIZE, 3).t()):
        x, c = torch.ones_like(rows[0]), torch.ones_like(rows[:, 0])
        exact = rows.double()
        assert error(long_rows.project(rows, x), exact.sum(1)) < 1e-4
        assert error(long_rows.combine(rows, c), exact.sum(0)) < 1e-4
        assert error(long_rows.subtract(x.clone(), rows, c), 1 - exact.sum(0)) < 1e-4
        assert error(long_rows.gram(rows), exact @ exact.t()) < 1e-4
    assert not launched


@pytest.mark.gpu
@pytest.mark.interpreted
def test_a_recording_knows_what_the_kernels_write(products: Any) -> None:
    """Splits of a matrix are kept until it is written to, here by a kernel of ours."""
    rows, c, other = drawn(2, 300 * 300), drawn(2, seed=1), drawn(300, 300, seed=2)
    vector = drawn(300 * 300, seed=3)
    matrix = vector.view(300, 300)
    before = matrix @ other
    exact = vector.double() - rows.double().t() @ c.double()
    operations().subtract(vector, rows, c)
    assert error(matrix @ other, exact.view(300, 300) @ other.double()) < EXACT
    assert not torch.equal(before, matrix @ other)


def curvature(vector: Tensor) -> Tensor:
    """Hv of some H that is no multiple of a diagonal one, as a new vector."""
    steep = torch.linspace(0.1, 3, len(vector), device=vector.device, dtype=vector.dtype)
    return steep * vector + 0.1 * vector.flip(0)


METRICS: dict[str, Callable[[Tensor], Metric]] = {
    "diagonal": Diagonal,
    "dear": Dear,
    "none": lambda _: Identity(),
}


def basis(metric: Metric, gradient: Tensor, steps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows, and what `fill_slots` gives."""
    slots = gradient.new_zeros(4 + len(steps), len(gradient))
    return slots, fill_slots(slots, curvature, metric, gradient, [step.clone() for step in steps])


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.usefixtures("needs_tensor_cores")
@pytest.mark.parametrize("kind", METRICS)
def test_a_basis_is_that_of_float64(launched: list[str], kind: str) -> None:
    with torch.device(DEVICE):
        g, step, diagonal = drawn(SIZE), drawn(SIZE, seed=1), drawn(SIZE, seed=2).abs() + 0.2
    with on_tensor_cores():
        rows, found = basis(METRICS[kind](diagonal), g, [step])
    exact, expected = basis(METRICS[kind](diagonal.double()), g.double(), [step.double()])
    assert error(rows, exact) < 1e-5
    for mine, theirs in zip(found_on_host(found)[1:3], found_on_host(expected)[1:3], strict=True):
        assert error(mine, theirs) < 1e-5
    assert launched.count("gram") == 1
    assert {"project", "combine", "write_row"} <= set(launched)


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.usefixtures("needs_tensor_cores")
@pytest.mark.parametrize("recorded", [True, False])
def test_directions_that_vanish_are_zero(recorded: bool) -> None:
    with torch.device(DEVICE):
        g, diagonal = drawn(SIZE), drawn(SIZE, seed=2).abs() + 0.2
    slots = torch.zeros(4, SIZE, device=DEVICE)
    with on_tensor_cores() if recorded else nullcontext():
        found = fill_slots(slots, lambda v: 2 * diagonal * v, Diagonal(diagonal), g, [])
    there, curved, *_ = found_on_host(found)
    assert there == [0]
    assert abs(float(curved) - 2) < 1e-5
    assert not slots[1:].any()

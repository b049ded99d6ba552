"""What is done with the rows of a basis by few kernels: against float64, and what is launched."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from krylov_descent.algorithms.basis_storage import Alone, StoredBasis
from krylov_descent.algorithms.krylov import Product, fill_with_krylov_space, found_on_host
from krylov_descent.algorithms.metric import Diagonal, Metric
from krylov_descent.curvature.preconditioners.preconditioner import Identity
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
    """Algorithm 2 into rows."""
    placement = Alone(gradient.numel())
    return fill_with_krylov_space(
        StoredBasis.at(slots), product, metric, gradient, steps, placement
    )


SIZE = 65_603
NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels for vectors that are launched, by name."""
    return launches(monkeypatch, "vectors")


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
def test_all_inner_products_between_rows(products: Any, launched: list[str], count: int) -> None:
    rows = with_gaps(count)
    rows[0] = 1 + 2**-12  # which tf32 does not know
    found = rows @ rows.t()
    assert launched == ["gram", "add_up_parts"]
    assert error_of_gram(found, rows) < 3 * EXACT
    assert torch.equal(found, found.t())


@pytest.mark.gpu
@pytest.mark.interpreted
def test_inner_products_with_other_rows_are_no_gram_matrix(
    products: Any, launched: list[str]
) -> None:
    rows = with_gaps(6)
    assert error(rows[:3] @ rows[3:].t(), rows[:3].double() @ rows[3:].double().t()) < 1e-4
    assert not launched


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("bad", [NAN, INFINITY])
def test_a_row_that_is_not_finite_spoils_its_own_inner_products(products: Any, bad: float) -> None:
    rows = with_gaps(10)
    rows[8, 7] = bad
    found, others = rows @ rows.t(), [k for k in range(10) if k != 8]
    assert not found[8].isfinite().any()
    assert not found[:, 8].isfinite().any()
    assert error_of_gram(found[others][:, others], rows[others]) < 3 * EXACT
    along = rows @ rows[0]
    assert not along[8].isfinite()
    assert along[others].isfinite().all()


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("count", [1, 2, 3, 8, 21])
def test_projections(products: Any, launched: list[str], count: int) -> None:
    rows, x = with_gaps(count), drawn(SIZE, seed=1)
    found = rows @ x
    assert launched == ["project", "add_up_parts"]
    assert error(found, rows.double() @ x.double()) < 10 * EXACT


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_combination_with_weights(products: Any, count: int) -> None:
    rows, c, w, weights = (
        with_gaps(count),
        drawn(count, seed=1),
        drawn(SIZE, seed=2),
        drawn(SIZE, seed=3),
    )
    exact = w.double() - weights.double() * (rows.double().t() @ c.double())
    assert products.basis_vectors.subtract_combination(w, rows, c, weights)
    assert error(w, exact) < EXACT
    before = w.clone()
    assert not products.basis_vectors.subtract_combination(w, rows, c, weights[1:])
    assert torch.equal(w, before)


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("near", [1, 2])
def test_a_remainder_and_its_scale(products: Any, divided: bool, near: int) -> None:
    rows, taken, along = with_gaps(7), drawn(7, seed=1), drawn(near, seed=2)
    w, divisor = drawn(SIZE, seed=3), drawn(SIZE, seed=4).abs() + 0.1
    start = w.clone()
    exact = (w.double() / divisor if divided else w.double()) - rows.double().t() @ taken.double()
    parts = products.basis_vectors.subtract_rows(
        start, divisor if divided else None, rows, taken, w
    )
    assert error(start, exact) < EXACT
    squared = float(exact @ w.double())
    assert abs(float(parts.double().sum()) - squared) < 10 * EXACT * squared

    projected, place = torch.full((9,), NAN), torch.full((1,), NAN)
    scale = products.basis_vectors.scale_of_remainder(
        parts, taken, along, 1e-9, projected[1:8], place
    )
    everything = taken.double()
    everything[-near:] += along
    assert error(projected[1:8], everything) < EXACT
    assert projected[[0, 8]].isnan().all()
    assert abs(float(place) - squared) < 10 * EXACT * squared
    assert abs(float(scale) - squared**-0.5) < 10 * EXACT * squared**-0.5

    # The same beside something so large that it counts as nothing.
    least = 1.001 * squared / (squared + float(everything @ everything))
    vanished = products.basis_vectors.scale_of_remainder(
        parts, taken, along, least, projected[1:8], place
    )
    assert float(vanished) == float(place) == 0
    still_there = products.basis_vectors.scale_of_remainder(
        parts, taken, along, least / 1.002, projected[1:8], place
    )
    assert float(still_there) > 0


@pytest.mark.gpu
@pytest.mark.interpreted
def test_a_remainder_in_place_of_what_it_is_multiplied_with(products: Any) -> None:
    rows, taken, w = with_gaps(3), drawn(3, seed=1), drawn(SIZE, seed=3)
    divisor, before = drawn(SIZE, seed=4).abs() + 0.1, w.double()
    parts = products.basis_vectors.subtract_rows(w, divisor, rows, taken, w)
    exact = before / divisor - rows.double().t() @ taken.double()
    assert error(w, exact) < EXACT
    assert abs(float(parts.double().sum() - exact @ before)) < 10 * EXACT * float(exact @ before)


@pytest.mark.gpu
@pytest.mark.interpreted
def test_what_is_no_number_does_not_vanish(products: Any) -> None:
    rows, taken, w = with_gaps(3), drawn(3, seed=1), drawn(SIZE, seed=3)
    w[SIZE // 2] = NAN
    parts = products.basis_vectors.subtract_rows(w.clone(), None, rows, taken, w)
    projected, place = torch.zeros(3), torch.zeros(1)
    scale = products.basis_vectors.scale_of_remainder(
        parts, taken, taken[:2], 1e-9, projected, place
    )
    assert place.isnan()
    assert scale.isnan()


def curvature(vector: Tensor) -> Tensor:
    """Hv of some H that is no multiple of a diagonal one, as a new vector."""
    steep = torch.linspace(0.1, 3, len(vector), device=vector.device, dtype=vector.dtype)
    return steep * vector + 0.1 * vector.flip(0)


METRICS: dict[str, Callable[[Tensor], Metric]] = {
    "diagonal": Diagonal,
    "dear": Dear,
    "none": lambda _: Identity(),
}
# What is launched between the scales of two directions, besides torch's kernels.
KERNELS = {
    "diagonal": ["project", "combine", "project", "remainder"],
    "dear": ["combine", "project", "combine", "project", "remainder"],
    "none": ["project", "combine", "project", "remainder"],
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
    for mine, theirs in zip(found_on_host(found)[1:], found_on_host(expected)[1:], strict=True):
        assert error(mine, theirs) < 1e-5
    assert launched.count("gram") == rows.is_cuda
    kernels = [name for name in launched if name != "add_up_parts"]
    before_last, last = [k for k, name in enumerate(kernels) if name == "scale_of_remainder"][-2:]
    assert kernels[before_last + 1 : last] == KERNELS[kind]


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
    there, curved, _ = found_on_host(found)
    assert there == [0]
    assert abs(float(curved) - 2) < 1e-5
    assert not slots[1:].any()

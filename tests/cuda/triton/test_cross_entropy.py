"""Cross entropies by one kernel with their derivatives: against float64, and what is launched."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from krylov_descent.cuda.graphs.aliased_network import Aliased
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.layers.layer_gradients import losses_and_gradients
from krylov_descent.objective.layers.squared_gradients import SquaredGradients
from krylov_descent.objective.network import Network
from krylov_descent.runtime.ops import operations
from krylov_descent.runtime.precision import derivatives_in_tf32, forward_precision
from tests.cuda.triton.kernels import (
    DEVICE,
    EXACT,
    ROUGH,
    drawn,
    error,
    launches,
    needs_tensor_cores,
    on_tensor_cores,
    products,
    set_to,
)

__all__ = ["needs_tensor_cores", "products"]  # fixtures

# With numbers that are read one by one and four at a time, and rows in several pieces.
SHAPES = [(70, 784), (33, 61), (21, 1502), (16, 2100)]
NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of ours that are launched, by name."""
    return launches(monkeypatch, "cross_entropy", "split_fp16", "matrix_cache", "vectors")


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations of torch that have something to compute, by name."""
    modes = pytest.importorskip("krylov_descent.cuda.triton.products")
    dispatch, names = modes.TensorCoreProducts.__torch_dispatch__, list[str]()

    def counted(self: Any, func: Any, *args: Any) -> Any:
        if not func.is_view and "empty" not in func.name():
            names.append(func.name())
        return dispatch(self, func, *args)

    monkeypatch.setattr(modes.TensorCoreProducts, "__torch_dispatch__", counted)
    return names


@pytest.fixture
def dirty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits have NaN where nothing is written."""
    split = pytest.importorskip("krylov_descent.cuda.triton.split_fp16").SplitMatrix
    room = split.empty

    def dirty(*args: Any, **kwargs: Any) -> Any:
        found = room(*args, **kwargs)
        for part in found.parts:
            part.fill_(NAN)
        return found

    monkeypatch.setattr(split, "empty", dirty)


PRECISIONS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "float32": partial(set_to, "none"),
    "tf32": partial(set_to, "tf32"),
    "tf32 back": partial(derivatives_in_tf32, True),
}


def logits_and_targets(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Logits from small to large ones, and targets that are no probabilities."""
    return 5 * drawn(rows, columns).requires_grad_(), 3 * drawn(rows, columns, seed=1)


def torchs(z: Tensor, target: Tensor) -> Tensor:
    elements = functional.binary_cross_entropy_with_logits(z, target, reduction="none")
    return elements.sum(1)


def made(z: Tensor, target: Tensor, *, averaged: bool = False) -> Tensor:
    return operations().cross_entropy(z, target, averaged=averaged)


def gradient(losses: Tensor, z: Tensor, factors: Tensor | None = None, **kwargs: Any) -> Tensor:
    factors = operations().ones(losses) if factors is None else factors
    (found,) = torch.autograd.grad(losses, z, factors, **kwargs)
    return found


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.usefixtures("dirty_memory")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_their_derivative_with_its_split(
    products: Any,
    shape: tuple[int, int],
    averaged: bool,
    precision: str,
) -> None:
    (rows, columns), (z, target) = shape, logits_and_targets(*shape)
    with PRECISIONS[precision]():
        with forward_precision():
            losses = made(z, target, averaged=averaged)
        delta = gradient(losses, z)
    split, bound = products._lazy.cache.split_of(delta), products._lazy.cache.bound_of(delta)

    share = 1 / columns if averaged else 1.0
    exact = share * (z.double().sigmoid() - target.double())
    assert error(losses, share * torchs(z.double(), target.double())) < EXACT
    assert error(delta, exact) < EXACT
    assert float(bound.view(torch.float32)) >= float(exact.detach().abs().max())
    assert (split.low is not None) == (precision == "float32")
    total = split.high.double() + (0 if split.low is None else split.low.double())
    digits = EXACT if precision == "float32" else ROUGH
    assert error(total[:rows, :columns] * split.unscale.double(), exact) < digits
    assert total.shape == (-(-rows // 16) * 16, -(-columns // 16) * 16)
    total[:rows, :columns] = 0
    assert not total.any()


@pytest.mark.gpu
@pytest.mark.interpreted
def test_the_derivative_of_the_sum_comes_with_the_losses(
    products: Any, launched: list[str], dispatched: list[str]
) -> None:
    z, target = logits_and_targets(70, 784)
    for job in products.prepare([], [target]):
        job()
    assert launched == ["find_bound"]
    launched.clear()
    dispatched.clear()
    delta = gradient(made(z, target), z)
    assert launched == ["cross_entropy"]
    assert not dispatched
    w = drawn(784, 64, seed=3)
    assert error(delta @ w, (z.double().sigmoid() - target.double()) @ w.double()) < EXACT
    assert launched == ["cross_entropy", "find_bound", "split", "product"]  # both of w


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("off", [torch.no_grad, torch.enable_grad])
def test_without_a_gradient_there_are_losses_alone(
    products: Any, launched: list[str], dispatched: list[str], off: Callable[[], Any]
) -> None:
    z, target = logits_and_targets(70, 61)
    given = z if off is torch.no_grad else z.detach()
    dispatched.clear()
    with off():
        losses = made(given, target)
    assert launched == ["cross_entropy"]  # without a bound of the targets
    assert not dispatched
    assert error(losses, torchs(z.double(), target.double())) < EXACT


@pytest.mark.gpu
@pytest.mark.interpreted
def test_derivatives_by_turns_and_twice(products: Any) -> None:
    z, target = logits_and_targets(70, 61)
    weights, direction = drawn(70, seed=2), drawn(70, 61, seed=3)
    losses, slope = made(z, target), z.double().sigmoid() * (1 - z.double().sigmoid())
    of_sum = z.double().sigmoid() - target.double()
    for _ in range(2):
        assert error(gradient(losses, z, retain_graph=True), of_sum) < EXACT
        exact = weights.double().unsqueeze(1) * of_sum
        assert error(gradient(losses, z, weights, retain_graph=True), exact) < EXACT
    for averaged, share in ((False, 1.0), (True, 1 / 61)):
        first = gradient(made(z, target, averaged=averaged), z, create_graph=True)
        assert error(first, share * of_sum) < EXACT
        along = (first * direction).sum()
        (second,) = torch.autograd.grad(along, z)
        assert error(second, share * slope * direction.double()) < EXACT


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("where", ["logits", "targets"])
def test_what_is_not_finite_stays_so_in_its_row(products: Any, where: str, bad: float) -> None:
    z, target = logits_and_targets(40, 61)
    w = drawn(61, 64, seed=3)
    with torch.no_grad():
        (z if where == "logits" else target)[3, 4] = bad
    losses = made(z, target)
    delta = gradient(losses, z)
    back = delta @ w

    exact_losses = torchs(z.double(), target.double())
    exact = z.double().sigmoid() - target.double()
    assert not losses[3].isfinite()
    assert torch.equal(delta.isnan(), exact.isnan())
    assert torch.equal(delta.isinf(), exact.isinf())
    assert back[3].isfinite().all() == delta[3].isfinite().all()
    others = torch.arange(len(z), device=z.device) != 3
    assert error(losses[others], exact_losses[others]) < EXACT
    assert error(delta[others], exact[others]) < EXACT
    assert error(back[others], exact[others] @ w.double()) < EXACT


def autoencoder(sizes: Sequence[int], dtype: torch.dtype) -> Network:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    modules = [module for layer in layers for module in (layer, nn.Sigmoid())][:-1]
    found = Network(nn.Sequential(*modules).to(DEVICE, dtype), nn.BCEWithLogitsLoss(), None, None)
    found.trusted_layers = frozenset(str(2 * i) for i in range(len(layers)))
    return found


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.usefixtures("needs_tensor_cores")
@pytest.mark.parametrize("rough", [False, True])
def test_nothing_is_waited_for_between_values_and_derivatives(
    launched: list[str], rough: bool
) -> None:
    sizes, x = (140, 200, 140), drawn(90, 140).sigmoid()
    with derivatives_in_tf32(rough), on_tensor_cores():
        losses, gradients = losses_and_gradients(
            Aliased(autoencoder(sizes, torch.float32)), Batch(x, x.clone(), len(x))
        )
    assert launched.count("cross_entropy") == 1
    assert "find_bound" not in launched[launched.index("product") :]
    after = launched[launched.index("cross_entropy") + 1 :]
    assert after[0] == "product"
    # Back to the layer in between, and both weights; both biases.
    assert [after.count(name) for name in ("product", "sum_columns")] == [3, 2]
    assert not {"find_bound", "split"} & set(after)
    exact = losses_and_gradients(
        autoencoder(sizes, torch.float64), Batch(x.double(), x.double(), len(x))
    )
    assert error(losses, exact[0]) < EXACT
    for mine, right in zip(gradients, exact[1], strict=True):
        assert mine is not None
        assert right is not None
        assert error(mine, right) < (ROUGH if rough else 10 * EXACT)


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.usefixtures("needs_tensor_cores")
def test_squares_are_made_of_the_same_derivative(launched: list[str]) -> None:
    sizes, x = (140, 200, 140), drawn(90, 140).sigmoid()
    batch, memory = Batch(x, x.clone(), len(x)), 1 << 30
    network, exact_one = (autoencoder(sizes, dtype) for dtype in (torch.float32, torch.float64))
    squares = SquaredGradients(network)
    squares.of_batch(batch, memory)  # to know which layers to trust
    with on_tensor_cores():
        losses, gradients, found = squares.on(Aliased(network)).of_batch(batch, memory)
    assert launched.count("cross_entropy") == 1
    exact = SquaredGradients(exact_one).of_batch(batch.map(Tensor.double), memory)
    assert error(losses, exact[0]) < EXACT
    for mine, right in zip(gradients, exact[1], strict=True):
        assert mine is not None
        assert right is not None
        assert error(mine, right) < 10 * EXACT
    for mine, right in zip(found, exact[2], strict=True):
        assert error(mine, right) < ROUGH


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.usefixtures("needs_tensor_cores")
def test_bounds_begin_with_zero_and_one() -> None:
    cache = pytest.importorskip("krylov_descent.cuda.triton.matrix_cache")
    used = torch.full((cache.BOUNDS,), -1, dtype=torch.int32, device=DEVICE)
    del used  # its memory is the next one's
    bounds = cache.Bounds(DEVICE)
    assert float(bounds.one.view(torch.float32)) == 1
    others = [bounds.new() for _ in range(cache.BOUNDS - 1)]
    assert not torch.cat(others).any()
    further = bounds.new()
    assert not further.any()
    assert further.data_ptr() not in {other.data_ptr() for other in others}

"""Narrow layers by one kernel: the numbers of float64 and of single kernels, whoever looks when."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent.cuda.graphs.parallel_branches import side_by_side
from krylov_descent.cuda.triton import entry
from krylov_descent.curvature.double_backward import gauss_newton
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.layers.layer_gradients import losses_and_gradients
from krylov_descent.objective.network import Network
from krylov_descent.runtime.precision import SETTINGS
from tests.cuda.triton.kernels import needs_tensor_cores, products

__all__ = ["needs_tensor_cores", "products"]  # fixtures

CUDA = torch.device("cuda", 0)
# Narrow between two that are not, with odd widths; and no multiple of the rows of a program.
SIZES, SAMPLES = (140, 50, 25, 6, 25, 50, 140), 331
EXACT, ROUGH = 3e-7, 1e-3


@pytest.fixture
def chains() -> Any:
    return pytest.importorskip("krylov_descent.cuda.triton.chains")


@pytest.fixture
def lengths(chains: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of stages, for each chain that was made by one kernel."""
    found: list[int] = []
    make = chains.make_stages

    def counting(stages: Sequence[Any]) -> Any:
        found.append(len(stages))
        return make(stages)

    monkeypatch.setattr(chains, "make_stages", counting)
    return found


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=CUDA, dtype=torch.float32)


def layers(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Weights and biases between layers of these sizes."""
    return [(drawn(b, a, seed=i) / a**0.5, drawn(b, seed=50 + i)) for i, (a, b) in _steps(sizes)]


def _steps(sizes: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    return enumerate(pairwise(sizes))


def network(function: Callable[[], nn.Module], linear: int | None, dtype: torch.dtype) -> Network:
    """An autoencoder without a function at one of its layers, all of which are trusted."""
    modules: list[nn.Module] = []
    for i, (weight, bias) in enumerate(layers(SIZES)):
        modules.append(nn.Linear(weight.shape[1], weight.shape[0]))
        modules[-1].weight = nn.Parameter(weight)
        modules[-1].bias = nn.Parameter(bias)
        if i not in (linear, len(SIZES) - 2):
            modules.append(function())
    model = nn.Sequential(*modules).to(dtype)
    found = Network(model, nn.BCEWithLogitsLoss(), None, None)
    names = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    found.trusted_layers = frozenset(names)
    return found


def derivatives(network: Network, x: Tensor, mode: Callable[..., Any]) -> list[Tensor]:
    """The losses, the gradient, and a Gauss-Newton product."""
    batch = Batch(x, x, len(x))
    direction = [drawn(*p.shape, seed=7).to(x.dtype) for p in network.parameters.tensors]
    with mode():
        losses, gradient = losses_and_gradients(network, batch)
    with mode() as before:
        product = gauss_newton(network, batch)
    with mode(before):
        curved = product(direction)
    pieces = [losses, *gradient, *curved]
    assert all(isinstance(piece, Tensor) for piece in pieces)
    return [piece.clone() for piece in pieces if piece is not None]


@pytest.mark.gpu
@pytest.mark.usefixtures("needs_tensor_cores")
@pytest.mark.parametrize("linear", [None, 2])
@pytest.mark.parametrize("function", [nn.Sigmoid, nn.Tanh])
def test_derivatives_of_a_network_with_narrow_layers(
    chains: Any,
    lengths: list[int],
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[[], nn.Module],
    linear: int | None,
) -> None:
    x = drawn(SAMPLES, SIZES[0], seed=100).sigmoid()
    mine, exact_one = (network(function, linear, d) for d in (torch.float32, torch.float64))
    exact = derivatives(exact_one, x.double(), nullcontext)

    def products(before: Any = None) -> Any:
        return entry.tensor_core_products(CUDA, before)

    found, again = (derivatives(mine, x, products) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    # Forward and back; forward, and with zeros back; along the direction and back.
    assert lengths == 12 * [4]
    monkeypatch.setattr(chains, "WIDEST", 0)
    single = derivatives(mine, x, products)
    assert len(lengths) == 12
    for chained, apart, right in zip(found, single, exact, strict=True):
        assert error(chained, right) < 10 * EXACT
        assert error(chained, right) < 2 * error(apart, right) + EXACT / 3


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["none", "tf32"])
@pytest.mark.parametrize("samples", [17, 256, 1000])
def test_a_chain_has_the_digits_of_its_products(
    products: Any,
    lengths: list[int],
    monkeypatch: pytest.MonkeyPatch,
    samples: int,
    precision: str,
) -> None:
    x, parameters = drawn(samples, 100, seed=9), layers((100, 128, 50, 100))
    monkeypatch.setattr(SETTINGS, "fp32_precision", precision)
    h = x
    for weight, bias in parameters:
        h = torch.addmm(bias, h, weight.t()).sigmoid()
    made = h.clone()
    SETTINGS.fp32_precision = "none"
    assert lengths == [3]
    right = x.double()
    for weight, bias in parameters:
        right = torch.addmm(bias.double(), right, weight.double().t()).sigmoid()
    assert error(made, right) < (EXACT if precision == "none" else ROUGH)


@pytest.mark.gpu
def test_who_looks_at_a_part_of_a_chain_sees_it(products: Any, lengths: list[int]) -> None:
    x, ((v, _), (w, bias), (u, _)) = drawn(SAMPLES, 60), layers((60, 40, 30, 20))
    first = (x.double() @ v.double().t()).sigmoid()
    second = torch.addmm(bias.double(), first, w.double().t()).sigmoid()

    def queued() -> tuple[Tensor, Tensor, Tensor]:
        a = (x @ v.t()).sigmoid()
        z = torch.addmm(bias, a, w.t())
        return a, z, z.sigmoid()

    a, z, b = queued()
    assert not lengths
    part, other_name = a[100:110], b.detach()
    assert error(part.clone(), first[100:110]) < EXACT
    assert error(other_name.clone(), second) < EXACT
    assert error(z.clone(), second.logit()) < 10 * EXACT
    assert lengths == [2]

    a, _, b = queued()
    assert error(b * a[:, :30], second * first[:, :30]) < EXACT
    a, _, b = queued()
    b.mul_(2)  # the next product has what it is then
    assert error((b @ u.t()).sigmoid() + 0, (2 * second @ u.double().t()).sigmoid()) < EXACT
    before = bias.clone()
    a, _, b = queued()
    bias.zero_()  # which is still to be read
    assert error(b.clone(), second) < EXACT
    bias.copy_(before)
    a, z, b = queued()
    heads = [(b @ u.t()).sigmoid(), (a @ v).sigmoid(), (b @ w).sigmoid()]
    exact = [(second @ u.double().t()), first @ v.double(), second @ w.double()]
    for head, right in zip(heads, exact, strict=True):
        assert error(head.clone(), right.sigmoid()) < EXACT
    a, _, b = queued()
    assert error(b.t() @ a + 0, second.t() @ first) < EXACT
    a, _, b = queued()
    sums = products.matrices.sums_over_rows(a, squares=False)
    assert error(sums, first.sum(0)) < EXACT
    with entry.tensor_core_products(CUDA):
        a, z, b = queued()
    assert error(a, first) < EXACT
    assert error(b, second) < EXACT
    assert error(z, second.logit()) < 10 * EXACT


@pytest.mark.gpu
def test_a_chain_goes_back_and_along_a_direction(products: Any, lengths: list[int]) -> None:
    """Between widths from 6 to 128, with and without functions, from numbers of any size."""
    sizes = (128, 50, 6, 25, 128)
    weights = [weight for weight, _ in layers(sizes)]
    y = [drawn(SAMPLES, size, seed=20 + size).sigmoid() for size in sizes]
    moved = [drawn(SAMPLES, 60, seed=40) @ drawn(60, size, seed=41) for size in sizes]
    assert all(bool(dz.isfinite().all()) for dz in moved)  # and so they are made

    def back(x: Tensor, scale: float) -> list[Tensor]:
        found = [scale * x]
        for weight, value in zip(reversed(weights), reversed(y[:-1]), strict=True):
            down = found[-1] @ weight.to(x.dtype)
            if value.shape[1] > 6:
                down = torch.ops.aten.sigmoid_backward(down, value.to(x.dtype))
            found.append(down)
        return found[1:]

    def along(x: Tensor) -> list[Tensor]:
        found = [x]
        for weight, value, dz in zip(weights, y[1:], moved[1:], strict=True):
            total = dz.to(x.dtype) + found[-1] @ weight.to(x.dtype).t()
            if value.shape[1] > 6:
                total = torch.ops.aten.tanh_backward(total, value.to(x.dtype))
            found.append(total)
        return found[1:]

    x = drawn(SAMPLES, 128, seed=60)
    for scale in (1.0, 1e-25, 1e20):
        found = back(x, scale)
        for mine, right in zip(found, back(x.double(), scale), strict=True):
            assert error(mine, right) < 2 * EXACT
    assert lengths == 3 * [4]
    for mine, right in zip(along(x), along(x.double()), strict=True):
        assert error(mine, right) < 2 * EXACT
    assert lengths == 4 * [4]


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_no_other(
    products: Any, lengths: list[int], bad: float
) -> None:
    x, ((v, bias), (w, _)), u = drawn(200, 60), layers((60, 40, 30)), drawn(30, 20, seed=5)
    rows = torch.arange(200, device=CUDA) != 3

    def found() -> Tensor:
        linear = torch.addmm(bias, x, v.t())
        return ((linear @ w.t()) @ u).clone()

    right = found()
    x[3, 4] = bad
    spoilt = found()
    assert lengths == [1, 1] * 2
    assert not spoilt[3].isfinite().any()
    assert error(spoilt[rows], right[rows].double()) < EXACT


@pytest.mark.gpu
def test_what_is_too_long_or_too_much_is_divided(
    products: Any, chains: Any, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = drawn(SAMPLES, 40), drawn(40, 40, seed=1)

    def found(x: Tensor) -> Tensor:
        for _ in range(8):
            x = (x @ w.to(x.dtype)).sigmoid()
        return x + 0

    assert error(found(x), found(x.double())) < 4 * EXACT
    assert lengths == [6, 2]
    monkeypatch.setattr(chains, "MOST_ROWS", SAMPLES - 1)
    assert error(found(x), found(x.double())) < 4 * EXACT
    assert lengths == [6, 2]


@pytest.mark.gpu
@pytest.mark.usefixtures("needs_tensor_cores")
def test_chains_on_branches_are_ready_for_each_other(lengths: list[int]) -> None:
    """In a recording: made on their own branch, and before whatever comes after all branches."""
    x = drawn(1000, 100)
    parameters = [layers((100, 50 + i, 25, 60)) for i in range(8)]

    def forward(x: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        for weight, bias in own:
            x = torch.addmm(bias.to(x.dtype), x, weight.to(x.dtype).t()).sigmoid()
        return x

    def work(x: Tensor) -> list[Tensor]:
        common = (x @ parameters[0][0][0].to(x.dtype).t()).sigmoid()
        ends = side_by_side([lambda own=own: forward(x, own) for own in parameters])  # type: ignore[misc]
        total = ends[0]
        for end in ends[1:]:
            total = total + end
        return [total, common]

    with entry.tensor_core_products(CUDA):
        work(x)
    torch.cuda.synchronize()
    lengths.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), entry.tensor_core_products(CUDA):
        found = work(x)
    assert lengths == 8 * [3]
    for seed in range(5):
        x.copy_(drawn(1000, 100, seed=seed))
        for result in found:
            result.fill_(float("nan"))
        graph.replay()
        for result, right in zip(found, work(x.double()), strict=True):
            assert error(result, right) < EXACT


@pytest.mark.gpu
@pytest.mark.usefixtures("needs_tensor_cores")
def test_a_chain_is_made_where_it_began_and_waited_for_elsewhere(lengths: list[int]) -> None:
    x, ((v, _), (w, _)) = drawn(1000, 100), layers((100, 50, 100))
    other, graph = torch.cuda.Stream(CUDA), torch.cuda.CUDAGraph()

    def work() -> Tensor:
        b = ((x @ v.t()).sigmoid() @ w.t()).sigmoid()
        current = torch.cuda.current_stream()
        other.wait_stream(current)
        with torch.cuda.stream(other):
            found = b.exp()
        current.wait_stream(other)
        return found

    with entry.tensor_core_products(CUDA):
        work()
    torch.cuda.synchronize()
    lengths.clear()
    with torch.cuda.graph(graph), entry.tensor_core_products(CUDA):
        found = work()
    assert lengths == [2]
    x.copy_(drawn(1000, 100, seed=3))
    graph.replay()
    exact = ((x.double() @ v.double().t()).sigmoid() @ w.double().t()).sigmoid().exp()
    assert error(found, exact) < EXACT

"""Products on tensor cores against float64, and that what is known of a matrix is never stale."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD
from krylov_descent.cuda.graphs.parallel_branches import side_by_side
from krylov_descent.cuda.triton import entry
from krylov_descent.objective.network import Network
from krylov_descent.runtime.ops import operations
from tests.cuda.triton.kernels import (
    DEVICE,
    EXACT,
    ROUGH,
    drawn,
    error,
    needs_tensor_cores,
    on_tensor_cores,
    products,
    set_to,
)

__all__ = ["needs_tensor_cores", "products"]  # fixtures

LAYOUTS = {"rows·rows": (True, True), "rows·columns": (True, False), "columns": (False, False)}
# Odd sizes, large and small tiles, sums that are divided into shares.
SHAPES = [(1000, 784, 400), (257, 33, 65), (64, 64, 5000), (30, 6, 1000), (3000, 250, 500)]


def test_nothing_happens_without_a_gpu() -> None:
    with entry.tensor_core_products(torch.device("cpu")) as products:
        assert products is None
        assert entry.under_way() is None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether it was exact, for each product that ran on tensor cores."""
    split_fp16 = pytest.importorskip("krylov_descent.cuda.triton.split_fp16")
    found: list[bool] = []

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(what: Any, *args: Any, **kwargs: Any) -> Any:
            found.append(what.exact)
            return function(what, *args, **kwargs)

        return counted

    for name in ("product", "function_of_product"):
        monkeypatch.setattr(split_fp16, name, counting(getattr(split_fp16, name)))
    return found


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("precision", ["none", "tf32"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_has_its_digits(
    products: Any,
    calls: list[bool],
    shape: tuple[int, int, int],
    layout: str,
    precision: str,
) -> None:
    m, n, k = shape
    a_along, b_along = LAYOUTS[layout]
    a = drawn(m, k) if a_along else drawn(k, m).t()
    b = drawn(n, k, seed=1).t() if b_along else drawn(k, n, seed=1)
    bias = drawn(n, seed=2)
    with set_to(precision):
        found, plain = torch.addmm(bias, a, b), a @ b

    exact = a.double() @ b.double()
    for result, right in ((found, exact + bias.double()), (plain, exact)):
        assert error(result, right) < (EXACT if precision == "none" else ROUGH)
    assert calls == 2 * [precision == "none"]


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("factor", [1e-30, 1e-6, 1e6, 1e18])
def test_the_scale_of_a_matrix_does_not_matter(
    products: Any, calls: list[bool], factor: float
) -> None:
    a, b = factor * drawn(200, 100), drawn(100, 80, seed=1)
    assert error(a @ b, a.double() @ b.double()) < EXACT
    assert calls


@pytest.mark.gpu
@pytest.mark.interpreted
def test_small_rows_beside_a_large_one_keep_their_digits(products: Any) -> None:
    a, b = drawn(200, 100), drawn(100, 80, seed=1)
    a[0] *= 1e4
    found, exact = a @ b, a.double() @ b.double()
    assert error(found[1:], exact[1:]) < 4 * EXACT


@pytest.mark.gpu
@pytest.mark.interpreted
def test_zeros_and_what_is_not_finite(products: Any) -> None:
    a, b = drawn(200, 100), drawn(100, 80, seed=1)
    assert not (torch.zeros_like(a) @ b).any()
    for bad in (float("nan"), float("inf")):
        spoilt = a.clone()
        spoilt[3, 4] = bad
        assert not (spoilt @ b)[3].isfinite().any()


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_no_other(products: Any, bad: float) -> None:
    a, b = drawn(200, 100), drawn(100, 80, seed=1)
    a[3, 4] = bad
    found, exact = a @ b, a.double() @ b.double()
    assert not found[3].isfinite().any()
    assert error(found[4:], exact[4:]) < EXACT
    functions = (
        found[4:].sigmoid() @ drawn(80, 60, seed=2),
        found.sigmoid() @ drawn(80, 60, seed=2),
    )
    assert error(functions[1][4:], functions[0].double()) < EXACT


@pytest.mark.gpu
@pytest.mark.interpreted
def test_scales_are_undone_without_overflow(products: Any, calls: list[bool]) -> None:
    a, b = 1e35 * drawn(200, 100), 1e-30 * drawn(100, 80, seed=1)
    assert error(a @ b, a.double() @ b.double()) < EXACT
    assert calls


@pytest.mark.gpu
@pytest.mark.interpreted
def test_what_torch_refuses_is_refused(products: Any, calls: list[bool]) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        drawn(200, 100) @ drawn(90, 80)
    with pytest.raises(RuntimeError):
        drawn(3, 70_000).t() @ drawn(5)
    assert not calls


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_other_layouts_are_left_to_torch(products: Any, calls: list[bool]) -> None:
    dense = drawn(200, 100) * (drawn(200, 100, seed=1) > 1)
    for sparse in (dense.to_sparse_csr(), dense.to_sparse_coo()):
        found = torch.sparse.mm(sparse, drawn(100, 80, seed=2))
        assert error(found, dense.double() @ drawn(100, 80, seed=2).double()) < 2e-6
    dense.to_sparse_coo().mul_(2)
    assert not calls


@pytest.mark.gpu
def test_images_are_left_to_torch(products: Any) -> None:
    images = drawn(64, 32, 8, 2)
    held = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    found = images.sigmoid()
    if DEVICE.type == "cuda":
        assert torch.cuda.memory_allocated() - held <= 2 * found.numel() * 4
    assert torch.equal(found, torch.sigmoid(images))


@pytest.mark.gpu
@pytest.mark.interpreted
def test_torch_is_followed_where_it_is_told_to_be_exact(products: Any, calls: list[bool]) -> None:
    a = drawn(200, 200)
    with set_to("ieee"):
        found = a @ a
    assert not calls
    assert error(found, a.double() @ a.double()) < 2e-6


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Tanh, nn.ReLU, nn.Softplus, nn.Identity])
def test_values_and_gradients_of_a_network(
    products: Any, calls: list[bool], activation: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(50, 70), activation(), nn.Linear(70, 33), activation(), nn.Linear(33, 20)]
    model = nn.Sequential(*layers)
    x, target = drawn(300, 50), drawn(300, 20, seed=1).sigmoid()

    def gradients(x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), target, reduction="none")
        return torch.autograd.grad(loss.sum(1).mean(), tuple(model.parameters()))

    found = gradients(x, target)
    assert len(calls) == 3 + 2 + 3
    model.double()
    for mine, exact in zip(found, gradients(x.double(), target.double()), strict=True):
        assert error(mine, exact) < 10 * EXACT


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("change", ["in place", "behind torch's back", "by another name"])
def test_a_matrix_that_changes_is_looked_at_again(
    products: Any, calls: list[bool], change: str
) -> None:
    a, b = drawn(100, 90), drawn(90, 80, seed=1)
    before = a @ b
    if change == "in place":
        a.mul_(2)
    elif change == "behind torch's back":
        a.data.mul_(2)
    else:
        torch._foreach_mul_([a.view(-1)], 2.0)
    assert torch.equal(a @ b, 2 * before)
    assert len(calls) == 2


@pytest.mark.gpu
@pytest.mark.interpreted
def test_a_matrix_that_changed_since_the_last_recording_is_looked_at_again(products: Any) -> None:
    a, b = drawn(100, 90), drawn(90, 80, seed=1)
    before = a @ b
    with on_tensor_cores(products):
        assert torch.equal(a @ b, before)
        a.mul_(2)
        assert torch.equal(a @ b, 2 * before)


@pytest.mark.gpu
@pytest.mark.interpreted
def test_another_matrix_in_the_same_memory_is_another_matrix(products: Any) -> None:
    b = drawn(90, 80, seed=1)
    places = set()
    for seed in range(5):
        a = drawn(100, 90, seed=seed)
        places.add(a.data_ptr())
        assert error(a @ b, a.double() @ b.double()) < EXACT
        del a
    assert len(places) < 5  # else nothing was tested


@pytest.mark.gpu
@pytest.mark.usefixtures("needs_tensor_cores")
def test_matrices_that_jobs_share_are_ready_for_each_of_them() -> None:
    """In a recording jobs run side by side, and what one makes of a matrix another one uses."""
    with torch.device(DEVICE):
        x = drawn(4000, 1000)
        weights = [drawn(1000, 100, seed=seed) for seed in range(8)]

        def all_products() -> list[Tensor]:
            return side_by_side([lambda w=w: x @ w for w in weights])  # type: ignore[misc]

        with on_tensor_cores():
            all_products()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), on_tensor_cores():
            found = all_products()
        for seed in range(5):
            x.copy_(drawn(4000, 1000, seed=100 + seed))
            for result in found:
                result.fill_(float("nan"))
            graph.replay()
            for result, w in zip(found, weights, strict=True):
                assert error(result, x.double() @ w.double()) < EXACT


@pytest.mark.gpu
@pytest.mark.usefixtures("needs_tensor_cores")
def test_what_was_known_is_gone_when_nobody_has_use_for_it() -> None:
    """At once: on a GPU nothing tells Python's collector of garbage that memory is short."""
    x, layer = drawn(200, 90), nn.Linear(90, 80, device=DEVICE)
    gc.disable()
    try:
        for wrong in (False, True):
            with suppress(ValueError), on_tensor_cores() as products:
                gone = weakref.ref(products)
                layer(x).sigmoid().sum().backward()
                if wrong:
                    raise ValueError
            del products
            assert gone() is None
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.usefixtures("needs_tensor_cores")
def test_with_unknown_functions_only_large_products_are_ours(
    monkeypatch: pytest.MonkeyPatch, calls: list[bool]
) -> None:
    monkeypatch.setattr("krylov_descent.cuda.triton.matrices.LEAST_WORK_ALONE", 200 * 100 * 80)
    with torch.device(DEVICE), entry.tensor_core_products(DEVICE, sparing=True):
        assert entry.under_way() is None
        a, b = drawn(200, 100), drawn(100, 80, seed=1)
        assert error(a @ b, a.double() @ b.double()) < EXACT
        assert calls == [True]
        a[1:].tanh() @ b
        assert calls == [True]


@pytest.mark.parametrize(
    ("model", "is_one"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Sequential(nn.Linear(4, 2))), True),
        (nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), False),
        (nn.GRU(3, 4), False),
    ],
)
def test_what_a_stack_is(model: nn.Module, is_one: bool) -> None:
    assert Network(model, nn.MSELoss(), None, None).is_stack is is_one
    derived = Network(model, nn.MSELoss(), lambda model, x: 2 * model(x), None)
    assert not derived.is_stack


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.usefixtures("needs_tensor_cores")
def test_a_mode_that_fails_at_its_end_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    split_fp16 = pytest.importorskip("krylov_descent.cuda.triton.split_fp16")

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    def multiply(kept: list[Tensor]) -> None:
        a = torch.ones(100, 90, device=DEVICE)
        with on_tensor_cores():
            kept.append(a @ a.t())
            monkeypatch.setattr(split_fp16, "product", fails)

    with pytest.raises(RuntimeError, match="no memory"):
        multiply([])
    assert entry.under_way() is None


@pytest.mark.gpu
@pytest.mark.usefixtures("needs_tensor_cores")
def test_a_product_with_a_use_already_is_ready_for_all_jobs() -> None:
    """What comes back to a layer beside a sigmoid is read by its weight and by its bias."""
    a, b, y = (torch.rand(3000, 1000, device=DEVICE, dtype=torch.float32) for _ in range(3))
    weight = torch.rand(1000, 1000, device=DEVICE) - 0.5
    graph, results = torch.cuda.CUDAGraph(), []

    def work() -> list[Tensor]:
        back = (a - 0.5) @ weight
        torch.ops.aten.sigmoid_backward(back, y)
        return side_by_side([lambda: back.t() @ b, lambda: back.sum(0), lambda: back * 1.0])

    with on_tensor_cores():
        work()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph), on_tensor_cores():
        results = work()
    graph.replay()
    torch.cuda.synchronize()
    exact = (a.double() - 0.5) @ weight.double()
    for found, right in zip(results, (exact.t() @ b.double(), exact.sum(0), exact), strict=True):
        assert error(found, right) < 20 * EXACT


@pytest.mark.gpu
@pytest.mark.interpreted
def test_a_cross_entropy_has_both_derivatives(products: Any) -> None:
    z, target = drawn(200, 60).requires_grad_(), drawn(200, 60, seed=1).sigmoid()
    weights, direction = drawn(200, seed=2), drawn(200, 60, seed=3)

    def found(z: Tensor, losses: Tensor, *, twice: bool) -> list[Tensor]:
        total = (losses * weights.to(z.dtype)).sum()
        (first,) = torch.autograd.grad(total, z, create_graph=twice)
        if not twice:
            return [losses, first]
        along = (first * direction.to(z.dtype)).sum()
        return [losses, first, *torch.autograd.grad(along, z)]

    exact_z = z.detach().double().requires_grad_()
    elements = nn.functional.binary_cross_entropy_with_logits(
        exact_z, target.double(), reduction="none"
    )
    exact = found(exact_z, elements.sum(1), twice=True)
    for twice in (False, True):
        mine = found(z, operations().cross_entropy(z, target, averaged=False), twice=twice)
        for result, right in zip(mine, exact, strict=False):
            assert error(result, right) < EXACT


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("shape", [(3000, 500), (60, 6), (20_000, 25)])
def test_sums_over_rows(products: Any, shape: tuple[int, int]) -> None:
    x, w = drawn(*shape), drawn(shape[0], 30, seed=1)
    sums = products.matrices.sums_over_rows(x, squares=True)
    exact = torch.cat([x.double().sum(0), x.double().square().sum(0)])
    assert error(sums, exact) < EXACT
    into = torch.zeros(shape[1] + 1)[1:]
    assert products.matrices.sums_over_rows(x, squares=False, out=into) is into
    assert error(into, exact[: shape[1]]) < 10 * EXACT  # of which most cancels
    found = products.matrices.product_of_squares(x, w)
    assert error(found, x.double().square().t() @ w.double().square()) < ROUGH


@pytest.mark.gpu
@pytest.mark.usefixtures("needs_tensor_cores")
def test_steps_repeat_to_the_last_bit_and_agree_with_torch(
    monkeypatch: pytest.MonkeyPatch, calls: list[bool]
) -> None:
    x, y = torch.rand(2000, 200, device=DEVICE), torch.rand(2000, 100, device=DEVICE)

    def trained() -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(200, 600), nn.Sigmoid(), nn.Linear(600, 100)).to(DEVICE)
        settings: dict[str, Any] = {"dimension": 8, "bfgs_iterations": 30, "subset_size": 500}
        optimizer = KSD(model, nn.BCEWithLogitsLoss(), tf32=False, **settings)
        for _ in range(4):
            optimizer.step((x, y))
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    first, second = trained(), trained()
    assert calls
    assert torch.equal(first, second)
    monkeypatch.setattr(
        "krylov_descent.cuda.graphs.capture.tensor_core_products", lambda *_, **__: nullcontext()
    )
    assert error(first, trained().double()) < 1e-3


@pytest.mark.gpu
@pytest.mark.interpreted
@pytest.mark.parametrize("precision", ["none", "tf32"])
@pytest.mark.parametrize("kind", ["sigmoid", "tanh", "relu"])
def test_functions_of_products_are_made_with_them(
    products: Any, calls: list[bool], kind: str, precision: str
) -> None:
    """Going forward, along a direction, and back; each with halves that the next product has."""
    a, b, last = drawn(200, 90), drawn(70, 90, seed=1), drawn(60, 70, seed=2)
    bias, added, value = drawn(70, seed=3), drawn(200, 60, seed=4) @ last, drawn(200, 70, seed=5)
    value = getattr(torch, kind)(value)
    backward: Callable[[Tensor], Tensor] = {
        "sigmoid": lambda x: torch.ops.aten.sigmoid_backward(x, value.to(x.dtype)),
        "tanh": lambda x: torch.ops.aten.tanh_backward(x, value.to(x.dtype)),
        "relu": lambda x: torch.ops.aten.threshold_backward(x, value.to(x.dtype), 0),
    }[kind]

    def found(*given: Tensor) -> list[Tensor]:
        a, b, last, bias, added, value = given
        results = [getattr(torch, kind)(torch.addmm(bias, a, b.t()))]
        results += [backward(added + a @ b.t()), backward(a @ b.t().contiguous())]
        results.append(value * (added + a @ b.t()))
        return [*results, *(result @ last.t() for result in results)]

    assert added.isfinite().all()  # and so it is made, and its bound is known
    given, before = (a, b, last, bias, added, value), len(calls)
    with set_to(precision):
        mine = found(*given)
        sums = [result.sum() for result in mine]

    exact = found(*(tensor.double() for tensor in given))
    for result, right in zip(mine, exact, strict=True):
        assert error(result, right) < (2 * EXACT if precision == "none" else 2 * ROUGH)
    assert all(total.isfinite() for total in sums)
    assert len(calls) == before + 8


@pytest.mark.gpu
@pytest.mark.interpreted
def test_a_product_that_waits_is_there_for_all_that_look(products: Any) -> None:
    """In place, through another name, as a part, by several, or when all is over."""
    a, b = drawn(200, 90), drawn(90, 80, seed=1)
    exact = a.double() @ b.double()
    z = a @ b
    other_name, part = z.detach(), z[10:20]
    activations = z.sigmoid()
    assert error(activations, exact.sigmoid()) < EXACT
    assert error(part, exact[10:20]) < EXACT
    assert error(other_name, exact) < EXACT
    assert error((a @ b).mul_(2), 2 * exact) < EXACT
    assert error(torch.cat([a @ b, a @ b]), torch.cat([exact, exact])) < EXACT
    bias = drawn(80, seed=2)
    shifted, before = torch.addmm(bias, a, b), bias.clone()
    bias.zero_()
    assert error(shifted, exact + before.double()) < EXACT
    known = a @ b
    assert error(known, exact) < EXACT
    together, other = known + a @ b, known.clone()
    known.zero_()
    assert error(together, exact + other.double()) < EXACT
    part, whole = (a @ b).chunk(2)[0], a[:100] @ b
    assert error(whole * part, exact[:100] ** 2) < EXACT
    learned = drawn(200, 90).requires_grad_()
    product = learned @ b
    together = product + product.sigmoid()
    assert error(together * 2, 2 * (exact + exact.sigmoid())) < EXACT
    twice = a @ b
    assert error(twice + twice, 2 * exact) < EXACT
    assert error(twice * twice, exact**2) < EXACT
    with on_tensor_cores():
        last = a @ b
        used = a @ b
        used.sigmoid()
    assert error(last, exact) < EXACT
    assert error(used, exact) < EXACT

"""Products through layers with a double backward of their own: those of the dense matrix."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.parametrizations import weight_norm
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from krylov_descent.curvature.double_backward import gauss_newton
from krylov_descent.curvature.lean_functions import LeanFunctions
from krylov_descent.curvature.products import Curvature, CurvatureKind
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.pass_measures import kept_bytes


class Checkpointed(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, input, use_reentrant=False)
        return result


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


def twice(layer: nn.Module) -> list[nn.Module]:
    return [layer, nn.Tanh(), layer]


NETS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "strides and no bias": (
        lambda: [
            nn.Conv2d(2, 3, 3, stride=2),
            nn.Tanh(),
            nn.Conv2d(3, 4, 2, padding=1, bias=False),
        ],
        (2, 5, 5),
    ),
    "in place": (
        lambda: [
            nn.Conv2d(2, 3, 3),
            nn.ReLU(inplace=True),
            nn.Conv2d(3, 4, 2),
            nn.ReLU(inplace=True),
        ],
        (2, 5, 5),
    ),
    "groups and dilation": (
        lambda: [nn.Conv1d(4, 8, 3, groups=2, dilation=2, padding=2)],
        (4, 6),
    ),
    "padding by name": (lambda: [nn.Conv2d(2, 3, 3, padding="same"), nn.Tanh()], (2, 4, 4)),
    "padding by mode": (
        lambda: [nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")],
        (2, 4, 4),
    ),
    "three dimensions": (lambda: [nn.Conv3d(1, 2, 2), nn.Tanh()], (1, 3, 3, 3)),
    "called twice": (lambda: twice(nn.Conv1d(2, 2, 3, padding=1)), (2, 5)),
    "parametrized": (lambda: [weight_norm(nn.Conv1d(2, 3, 3)), nn.Tanh()], (2, 5)),
    "layer norms": (
        lambda: [nn.LayerNorm(5), nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm([3, 4], bias=False)],
        (3, 5),
    ),
    "nothing to train": (
        lambda: [nn.Linear(5, 4), nn.LayerNorm(4, elementwise_affine=False), nn.Tanh()],
        (3, 5),
    ),
    "group norms": (
        lambda: [
            nn.GroupNorm(1, 2),
            nn.Conv2d(2, 4, 2),
            nn.GroupNorm(2, 4),
            nn.Tanh(),
            nn.Conv2d(4, 3, 2),
            nn.GroupNorm(3, 3, affine=False),
        ],
        (2, 4, 4),
    ),
    "channels last": (
        lambda: [nn.Conv2d(2, 4, 2), ChannelsLast(), nn.GroupNorm(2, 4), nn.LayerNorm([4, 3, 3])],
        (2, 4, 4),
    ),
    "checkpointed norms": (
        lambda: [
            Checkpointed(
                nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.LayerNorm(4), nn.Tanh()
            )
        ],
        (2, 6),
    ),
    "checkpointed": (
        lambda: [Checkpointed(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 2, 2))],
        (2, 6),
    ),
}


def net(name: str) -> tuple[nn.Sequential, Tensor, Tensor]:
    layers, shape = NETS[name]
    torch.manual_seed(0)
    x = torch.randn(7, *shape).double()
    body = nn.Sequential(*layers()).double()
    width = body(x.clone()).flatten(1).shape[1]
    return (
        nn.Sequential(body, nn.Flatten(), nn.Linear(width, 2).double()),
        x,
        torch.randn(7, 2).double(),
    )


def dense(model: nn.Module, x: Tensor, y: Tensor, kind: CurvatureKind) -> Tensor:
    """JᵀJ, one backward pass for each row of J: of the outputs, or of the losses of samples."""
    z: Tensor = model(x.clone())
    rows = z.flatten() if kind == "gauss-newton" else (z - y).square().mean(1)
    parameters = list(model.parameters())
    J = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(r, parameters, retain_graph=True)])
            for r in rows
        ]
    )
    return J.t() @ J / len(x)  # the squared error's second derivative is 2, over 2 outputs


class Slope(nn.Module):
    """The derivative of a net along its input, as physics-informed nets have it."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body, nn.Flatten(), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        z = self.body(x)
        (slope,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
        result: Tensor = z + slope.sum(-1)
        return result


BODIES: dict[str, Callable[[], list[nn.Module]]] = {
    "convolutions": lambda: [nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 2, 2)],
    "norms": lambda: [
        *(nn.LayerNorm(6), nn.Conv1d(2, 4, 4), nn.GroupNorm(2, 4), nn.Tanh()),
        *(nn.LayerNorm(3, elementwise_affine=False), nn.Conv1d(4, 2, 1)),
    ],
}


@pytest.mark.parametrize("kind", ["gauss-newton", "fisher"])
@pytest.mark.parametrize("body", BODIES)
def test_a_forward_pass_may_differentiate_them(body: str, kind: CurvatureKind) -> None:
    torch.manual_seed(0)
    model, x, y = Slope(*BODIES[body]()).double(), torch.randn(7, 2, 6), torch.randn(7, 2)
    x, y = x.double(), y.double()
    objective = Objective(model, nn.MSELoss())
    v = torch.randn(objective.parameters.numel).double()
    matrix = dense(model, x, y, kind)
    found = Curvature(kind).at(objective, (x, y))(v)
    torch.testing.assert_close(found, matrix @ v, rtol=1e-10, atol=1e-12)


def hessian_by_differences(objective: Objective, data: tuple[Tensor, Tensor], v: Tensor) -> Tensor:
    """Of gradients at four points, with an error of the fifth derivative times step⁴ / 30."""
    theta, step = objective.parameters.copy(), 1e-4
    total = torch.zeros_like(theta)
    for k, weight in {-2: 1, -1: -8, 1: 8, 2: -1}.items():
        objective.parameters.assign(theta + k * step * v)
        total += weight * objective.value_and_gradient(data).gradient
    objective.parameters.assign(theta)
    return total / (12 * step)


@pytest.mark.parametrize("name", [name for name in NETS if name != "parametrized"])
def test_the_hessian_is_the_derivative_of_the_gradient(name: str) -> None:
    model, *data = net(name)
    objective = Objective(model, nn.MSELoss())
    v = torch.randn(objective.parameters.numel).double()
    found = Curvature("hessian").at(objective, tuple(data))(v)
    expected = hessian_by_differences(objective, (data[0], data[1]), v)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_wrong_double_backward_of_torch_is_refused() -> None:
    """That of weight_norm, by which the Hessian is off by a tenth and more (torch 2.13)."""
    model, *data = net("parametrized")
    objective = Objective(model, nn.MSELoss())
    v = torch.randn(objective.parameters.numel).double()
    with pytest.warns(UserWarning, match=r"not symmetric.*forward-mode.*central differences"):
        found = Curvature("hessian").at(objective, tuple(data))(v)
    expected = hessian_by_differences(objective, (data[0], data[1]), v)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kind", ["gauss-newton", "fisher"])
@pytest.mark.parametrize("name", NETS)
def test_products_are_those_of_the_dense_matrix(name: str, kind: CurvatureKind) -> None:
    model, x, y = net(name)
    objective = Objective(model, nn.MSELoss())
    v = torch.randn(objective.parameters.numel).double()
    matrix = dense(model, x, y, kind)
    found = Curvature(kind).at(objective, (x, y))(v)
    torch.testing.assert_close(found, matrix @ v, rtol=1e-10, atol=1e-12)


def test_frozen_weights_are_no_directions() -> None:
    model, x, y = net("strides and no bias")
    rows = [not name.startswith("0.0") for name, p in model.named_parameters() for _ in p.flatten()]
    matrix = dense(model, x, y, "gauss-newton")[rows][:, rows]
    model[0][0].requires_grad_(False)  # type: ignore[index]
    objective = Objective(model, nn.MSELoss())
    v = torch.randn(objective.parameters.numel).double()
    found = Curvature().at(objective, (x, y))(v)
    torch.testing.assert_close(found, matrix @ v, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["weight", "bias"]])
@pytest.mark.parametrize("name", ["layer norms", "group norms"])
def test_parts_of_norms_may_be_frozen(name: str, frozen: list[str]) -> None:
    model, x, y = net(name)
    norms = {m for m in model.modules() if isinstance(m, nn.LayerNorm | nn.GroupNorm)}
    still = {id(p) for m in norms for key, p in m.named_parameters() if key in frozen}
    rows = [id(p) not in still for p in model.parameters() for _ in p.flatten()]
    matrix = dense(model, x, y, "gauss-newton")[rows][:, rows]
    for p in model.parameters():
        p.requires_grad_(id(p) not in still)
    objective = Objective(model, nn.MSELoss())
    v = torch.randn(objective.parameters.numel).double()
    found = Curvature().at(objective, (x, y))(v)
    torch.testing.assert_close(found, matrix @ v, rtol=1e-10, atol=1e-12)


def operations_of_a_product(name: str) -> dict[str, int]:
    model, x, y = net(name)
    product = Curvature().at(Objective(model, nn.MSELoss()), (x, y))
    v = torch.randn(sum(p.numel() for p in model.parameters())).double()
    product(v)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        product(v)
    return {event.key: event.count for event in seen.key_averages()}


def test_a_product_has_no_convolution_too_many() -> None:
    counts = operations_of_a_product("strides and no bias")
    # dW of both layers, and dx of the second; then one transposed convolution for each of them.
    assert counts["aten::convolution"] == 3
    assert counts["aten::convolution_backward"] == 2


def test_a_product_has_a_norm_forward_and_twice_backward() -> None:
    counts = operations_of_a_product("layer norms")
    # Nothing moves with the weights in front of the first of two.
    assert counts["aten::native_layer_norm"] == 2
    assert counts["aten::native_layer_norm_backward"] == 3


def test_norms_of_mixed_precision_are_torchs_own() -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(7, 5).bfloat16(), nn.LayerNorm(5)
    with LeanFunctions(only_linear=True):
        found, lean = norm(x), norm(x.float())
    assert type(found.grad_fn) is type(norm(x).grad_fn) is not type(lean.grad_fn)


def test_a_linearisation_keeps_the_inputs_of_layers_and_no_more() -> None:
    """Its backward pass is at u = 0, which is of no use to a product."""
    torch.manual_seed(0)
    layers = [nn.Conv1d(2, 3, 3, bias=False), nn.Conv1d(3, 4, 3, bias=False)]
    model, x, y = nn.Sequential(*layers, nn.Flatten()), torch.randn(7, 2, 8), torch.randn(7, 16)
    network = Objective(model, nn.MSELoss()).network
    linearize = partial(gauss_newton, network, Batch(x, y, 7))
    kept = kept_bytes(linearize, network.parameters.tensors)
    assert kept == x.nbytes + layers[0](x).nbytes


@pytest.mark.parametrize("only_linear", [False, True])
@pytest.mark.parametrize("name", ["strides and no bias", "layer norms", "group norms"])
def test_afterwards_the_model_is_as_it_was(name: str, only_linear: bool) -> None:
    model, x, _ = net(name)
    with LeanFunctions(only_linear=only_linear):
        within = model(x)
    after = model(x)
    assert torch.equal(within, after)
    weights = list(model.parameters())
    gradients = [torch.autograd.grad(z.sum(), weights, retain_graph=True) for z in (within, after)]
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:.*mkldnn_matmul failed:UserWarning")
def test_autocast_keeps_torchs_own() -> None:
    model, x, _ = net("strides and no bias")
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x.float())
        with LeanFunctions():
            found = model(x.float())
    assert torch.equal(found, expected)


class BatchedSlope(nn.Module):
    """Several derivatives at once, which torch has by a transform of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        z = self.layer(x)
        few = z.tanh().sum(0).flatten()[:3]
        directions = torch.eye(3, dtype=x.dtype)
        (slopes,) = torch.autograd.grad(
            few, x, directions, create_graph=True, is_grads_batched=True
        )
        result: Tensor = (z + slopes.sum(0)).sum(-1)
        return result


class ForwardSlope(nn.Module):
    """A derivative along a direction, by forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(2, 2, 3), nn.LayerNorm(4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            z, slope = forward_ad.unpack_dual(
                self.body(forward_ad.make_dual(x, torch.ones_like(x)))
            )
            assert slope is not None
            result: Tensor = (z + slope).sum(-1)
            return result


class OtherWeights(nn.Module):
    """A copy of a layer with weights that are made in the forward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        layer = copy.copy(self.layer)
        layer._parameters = {}
        layer.weight = 3 * self.layer.weight  # type: ignore[operator,assignment]
        layer.bias = self.layer.bias
        result: Tensor = layer(x).tanh().sum(-1)
        return result


def single_numbers() -> nn.Module:
    layer: Any = nn.Conv1d(2, 2, 3)
    layer.stride, layer.padding, layer.dilation = 2, 1, 1
    return nn.Sequential(layer, nn.Flatten())


UNUSUAL: dict[str, Callable[[], nn.Module]] = {
    "several derivatives at once": BatchedSlope,
    "forward mode": ForwardSlope,
    "copied convolution": lambda: OtherWeights(nn.Conv1d(2, 2, 3)),
    "copied norm": lambda: OtherWeights(nn.LayerNorm(6)),
    "single numbers": single_numbers,
}


@pytest.mark.parametrize("kind", ["gauss-newton", "fisher"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_forward_passes(name: str, kind: CurvatureKind) -> None:
    torch.manual_seed(0)
    model, x = UNUSUAL[name]().double(), torch.randn(7, 2, 6).double()
    y = torch.randn_like(model(x).detach())
    matrix = dense(model, x, y, kind) * (2 / y.shape[1] if kind == "gauss-newton" else 1)
    objective = Objective(model, nn.MSELoss())
    v = torch.randn(objective.parameters.numel).double()
    found = Curvature(kind).at(objective, (x, y))(v)
    torch.testing.assert_close(found, matrix @ v, rtol=1e-10, atol=1e-12)


def test_other_threads_have_torchs_own() -> None:
    model, x, _ = net("layer norms")
    found: list[Tensor] = []
    with LeanFunctions(only_linear=True):
        thread = threading.Thread(target=lambda: found.append(model(x)))
        thread.start()
        thread.join()
    weights, curved = list(model.parameters()), []
    for z in (found[0], model(x)):
        slope = torch.autograd.grad(z.square().sum(), weights, create_graph=True)
        curved.append(torch.autograd.grad([s.sum() for s in slope], weights))
    torch.testing.assert_close(*curved)

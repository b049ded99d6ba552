"""The checks pass every sound model in every arithmetic, and find a missing part."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from krylov_descent.curvature.derivative_checks import check_double_backward, check_symmetric
from tests.problems import MODELS, call, make

EPSILON = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


class Once(torch.autograd.Function):
    """The identity, differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


def once(x: Tensor) -> Tensor:
    result: Tensor = Once.apply(x)  # type: ignore[no-untyped-call]
    return result


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("model", [m for m in MODELS if m != "nested"])
def test_sound_models_pass(model: str, dtype: torch.dtype) -> None:
    problem = make(model, "mse")
    problem.model.to(dtype)
    x = problem.inputs.to(dtype) if problem.inputs.is_floating_point() else problem.inputs
    with sdpa_kernel(SDPBackend.MATH):
        outputs = tree_leaves(call(problem.model, x))
    check_double_backward(outputs, [*problem.trained.values()], EPSILON[dtype])


def deep(activation: type[nn.Module], layers: int = 12) -> nn.Sequential:
    stack = [part for _ in range(layers) for part in (nn.Linear(30, 30), activation())]
    return nn.Sequential(*stack, nn.Linear(30, 4))


@pytest.mark.filterwarnings("ignore:.*mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.ReLU, nn.Tanh])
def test_deep_models_pass_though_gradients_vanish(
    activation: type[nn.Module], bfloat16: bool
) -> None:
    model = deep(activation)
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        outputs = model(torch.randn(8, 30))
    epsilon = torch.finfo(torch.bfloat16 if bfloat16 else torch.float32).eps
    check_double_backward([outputs], [*model.parameters()], epsilon)


def test_a_gradient_of_nothing_but_rounding_passes() -> None:
    # The bias is taken out again by the normalisation, which has nothing else to divide by.
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4), nn.Flatten(), nn.Linear(40, 3))
    outputs = model(torch.randn(8, 2, 12))
    bias = model.get_parameter("0.bias")
    (gradient,) = torch.autograd.grad(outputs.sum(), bias, retain_graph=True)
    assert bool(gradient.any())
    check_double_backward([outputs], [*model.parameters()], EPSILON[torch.float32])


@pytest.mark.parametrize("share", [1.0, 1e-3])
def test_a_missing_path_is_found_even_where_its_gradient_is_small(share: float) -> None:
    first, last = nn.Linear(5, 5), nn.Linear(5, 3)
    outputs = last(torch.randn(8, 5) + share * once(first(torch.randn(8, 5))))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        check_double_backward(
            [outputs], [*first.parameters(), *last.parameters()], EPSILON[torch.float32]
        )


def test_one_missing_path_of_two_is_found() -> None:
    layer = nn.Linear(5, 3)
    z = layer(torch.randn(8, 5))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        check_double_backward([z + 0.1 * once(z)], [*layer.parameters()], EPSILON[torch.float32])


def test_nothing_to_check_and_not_finite_pass() -> None:
    layer = nn.Linear(5, 3)
    z = layer(torch.randn(8, 5))
    check_double_backward([0 * z], [*layer.parameters()], EPSILON[torch.float32])
    check_double_backward([z * float("nan")], [*layer.parameters()], EPSILON[torch.float32])
    check_double_backward([z, torch.ones(3)], [*layer.parameters()], EPSILON[torch.float32])


def test_symmetric_matrices_pass_and_others_do_not() -> None:
    H = torch.randn(6, 6)
    H = H + H.t()
    leaves = [torch.zeros(2, 2), torch.zeros(2)]

    def product(matrix: Tensor) -> Any:
        def multiply(pieces: list[Tensor]) -> list[Tensor | None]:
            found = matrix @ torch.cat([piece.reshape(-1) for piece in pieces])
            return [found[:4].view(2, 2), found[4:]]

        return multiply

    check_symmetric(product(H), leaves, EPSILON[torch.float32])
    check_symmetric(lambda pieces: [None, None], leaves, EPSILON[torch.float32])
    H[0, 5] += 0.1
    with pytest.raises(RuntimeError, match="not symmetric"):
        check_symmetric(product(H), leaves, EPSILON[torch.float32])


def test_global_random_state_is_left_alone() -> None:
    layer = nn.Linear(5, 3)
    before = torch.get_rng_state()
    check_double_backward([layer(torch.ones(2, 5))], [*layer.parameters()], EPSILON[torch.float32])
    check_symmetric(lambda pieces: pieces, [*layer.parameters()], EPSILON[torch.float32])
    assert torch.equal(torch.get_rng_state(), before)

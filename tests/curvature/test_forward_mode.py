"""The second route of curvature: right numbers, taken only where the first has none, said once."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from krylov_descent.curvature import forward_mode
from krylov_descent.curvature.products import Curvature, CurvatureError, CurvatureKind
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.objective import Objective
from tests import dense
from tests.matrices import numbers
from tests.once_differentiable import OnceTanh
from tests.problems import MODELS, Problem, make

# Torch itself uses what it deprecates when it first differentiates forward.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

ROUTES: dict[CurvatureKind, tuple[Any, Callable[[Problem], Tensor]]] = {
    "gauss-newton": (forward_mode.gauss_newton, dense.gauss_newton),
    "hessian": (forward_mode.hessian, dense.hessian),
    "fisher": (forward_mode.fisher, dense.fisher),
}
KINDS = list(ROUTES)
FALLS_BACK = "no second derivative by double backward.*forward-mode"


class DetachedTanh(OnceTanh):
    """Its backward pass leaves the graph, as one in NumPy does, and does not say so."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        y: Tensor = ctx.saved_tensors[0]
        return gradient.detach() * (1 - y.detach().square())


class OnceIdentity(torch.autograd.Function):
    """The identity, differentiable once."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()


class Activation(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function.apply(x)


def with_activation(function: Any, loss: str = "cross-entropy") -> Problem:
    """The small net, its tanh replaced; the dense reference keeps torch's own."""
    problem = make("mlp", loss)
    setattr(problem.model, "1", Activation(function))
    return problem


def with_torch_tanh(problem: Problem, matrix: Callable[[Problem], Tensor]) -> Tensor:
    own = problem.model.get_submodule("1")
    setattr(problem.model, "1", nn.Tanh())
    found = matrix(problem)
    setattr(problem.model, "1", own)
    return found


# The products ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (model, kind)
        for model in MODELS
        for kind in KINDS
        # For these see test_hessian_through_a_layer_norm_is_not_believed.
        if model != "nested" and not (kind == "hessian" and model in ("layernorm", "transformer"))
    ],
)
@pytest.mark.parametrize("loss", ["weighted-cross-entropy", "mean"])
def test_batch_product_equals_the_dense_matrix(model: str, loss: str, kind: CurvatureKind) -> None:
    route, matrix = ROUTES[kind]
    problem = make(model, loss)
    H = matrix(problem)
    objective = Objective(problem.model, problem.loss)
    batch = Batch.of(problem.data)
    v = numbers(len(H))
    pieces = route(objective.network, batch)(objective.parameters.pieces(v))
    W = problem.case.normaliser
    scale = batch.size / W**2 if kind == "fisher" else 1 / W
    found = scale * objective.parameters.flatten(pieces)
    torch.testing.assert_close(found, H @ v, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_nested_outputs(kind: CurvatureKind) -> None:
    route, matrix = ROUTES[kind]
    problem = make("nested", "per-sample")
    objective = Objective(problem.model, problem.loss)
    v = numbers(objective.parameters.numel)
    pieces = route(objective.network, Batch.of(problem.data))(objective.parameters.pieces(v))
    found = objective.parameters.flatten(pieces) / problem.case.normaliser
    torch.testing.assert_close(found, matrix(problem) @ v, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_as_before(kind: CurvatureKind) -> None:
    problem = make("tied", "mean")
    objective = Objective(problem.model, problem.loss)
    before = objective.parameters.copy()
    owners = [id(p) for p in problem.model.parameters()]
    product = ROUTES[kind][0](objective.network, Batch.of(problem.data))
    product(objective.parameters.pieces(numbers(objective.parameters.numel)))
    assert torch.equal(objective.parameters.copy(), before)
    assert [id(p) for p in problem.model.parameters()] == owners


# The way there ----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [OnceTanh, DetachedTanh])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", ["cross-entropy", "mse", "mean"])
def test_model_without_double_backward_falls_back_and_says_so_once(
    function: Any, kind: CurvatureKind, loss: str
) -> None:
    problem = with_activation(function, loss)
    matrix = with_torch_tanh(problem, ROUTES[kind][1])
    objective = Objective(problem.model, problem.loss, micro_batch=2)
    curvature = Curvature(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=UserWarning)
        product = curvature.at(objective, problem.data)
        found = [product(numbers(len(matrix), seed=seed)) for seed in range(3)]
    (warning,) = (w for w in caught if w.category is UserWarning)
    assert re.search(FALLS_BACK, str(warning.message))
    assert not product.kept
    assert product.products == 3
    for seed, result in enumerate(found):
        expected = matrix @ numbers(len(matrix), seed=seed)
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)

    # The next step remembers the route, and is silent.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = curvature.at(objective, problem.data)(numbers(len(matrix)))
    assert torch.equal(again, found[0])


def test_weight_decay_is_added_on_this_route_too() -> None:
    problem = with_activation(OnceTanh)
    matrix = with_torch_tanh(problem, dense.gauss_newton)
    groups = [{"params": list(problem.model.parameters()), "weight_decay": 0.7}]
    objective = Objective(problem.model, problem.loss, params=groups)
    v = numbers(len(matrix))
    with pytest.warns(UserWarning, match=FALLS_BACK):
        found = Curvature().at(objective, problem.data)(v)
    torch.testing.assert_close(found, matrix @ v + 0.7 * v)


def test_a_layer_of_zeros_hides_a_missing_derivative_for_one_step_only() -> None:
    """What lies behind it has a gradient of zero, from which nothing can be missing."""
    problem = with_activation(OnceTanh)
    last = [m for m in problem.model.modules() if isinstance(m, nn.Linear)][-1]
    weight = last.weight.detach().clone()
    nn.init.zeros_(last.weight)
    objective, curvature = Objective(problem.model, problem.loss), Curvature()
    v = numbers(objective.parameters.numel)
    curvature.at(objective, problem.data)(v)
    last.weight.data.copy_(weight)
    matrix = with_torch_tanh(problem, dense.gauss_newton)
    with pytest.warns(UserWarning, match=FALLS_BACK):
        found = curvature.at(objective, problem.data)(v)
    torch.testing.assert_close(found, matrix @ v, rtol=1e-10, atol=1e-12)


def test_hessian_through_a_layer_norm_is_not_believed() -> None:
    # Torch's forward derivative of layer_norm takes mean and variance as constants when it is
    # differentiated once more, and the result is not a Hessian.
    problem = make("layernorm", "cross-entropy")
    matrix = dense.hessian(problem)
    own = problem.model.get_submodule("2")
    setattr(problem.model, "2", nn.Sequential(Activation(OnceIdentity), own))
    objective = Objective(problem.model, problem.loss)
    v = numbers(len(matrix))
    with pytest.warns(UserWarning, match=rf"{FALLS_BACK}.*not symmetric.*central differences"):
        found = Curvature("hessian").at(objective, problem.data)(v)
    torch.testing.assert_close(found, matrix @ v, rtol=1e-7, atol=1e-8)


def test_parameters_that_a_forward_derivative_does_not_reach_are_an_error() -> None:
    problem = with_activation(OnceTanh)
    weight = problem.model.get_parameter("0.weight")

    def loss(z: Tensor, t: Tensor) -> Tensor:
        return z.square().sum(1) + weight.square().sum()

    objective = Objective(problem.model, loss)
    message = r"forward-mode.*a variable of its own for 0\.weight"
    with pytest.raises(CurvatureError, match=message):
        Curvature("fisher").at(objective, problem.data)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_goes_by_the_math_kernel(kind: CurvatureKind) -> None:
    problem = make("attention", "cross-entropy")
    matrix = ROUTES[kind][1](problem)
    linear = problem.model.get_submodule("parts.linear")

    parts: Any = problem.model.get_submodule("parts")
    parts["linear"] = nn.Sequential(linear, Activation(OnceIdentity))
    objective = Objective(problem.model, problem.loss)
    v = numbers(len(matrix))
    with pytest.warns(UserWarning, match=FALLS_BACK):
        found = Curvature(kind).at(objective, problem.data)(v)
    torch.testing.assert_close(found, matrix @ v, rtol=1e-10, atol=1e-12)


def test_a_loss_without_second_derivative_is_refused_for_gauss_newton() -> None:
    problem = with_activation(OnceTanh)

    def loss(z: Tensor, t: Tensor) -> Tensor:
        return OnceTanh.apply(z).square().sum(1)  # type: ignore[no-any-return,no-untyped-call]

    objective = Objective(problem.model, loss)
    with pytest.raises(CurvatureError, match=r"the loss has no second derivative.*'fisher'"):
        Curvature("gauss-newton").at(objective, problem.data)
    with pytest.warns(UserWarning, match=FALLS_BACK):
        product = Curvature("fisher").at(objective, problem.data)
    v = numbers(objective.parameters.numel)

    def losses(theta: Tensor) -> Tensor:
        return dense.outputs_at(problem, theta).tanh().square().sum(1)  # type: ignore[no-any-return]

    setattr(problem.model, "1", nn.Tanh())
    rows = torch.func.jacrev(losses)(dense.point(problem))
    setattr(problem.model, "1", Activation(OnceTanh))
    torch.testing.assert_close(product(v), rows.T @ (rows @ v) / len(rows))

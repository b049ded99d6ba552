"""A route that leaves out a part of the curvature is not taken, and a sound one is."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import Objective
from krylov_descent.curvature.products import Curvature, CurvatureError, CurvatureKind
from tests.curvature_reference import DENSE, KINDS
from tests.matrices import numbers
from tests.once_differentiable import Applied, NumpyTanh, SoundTanh, StraightThrough
from tests.problems import make

# Torch itself uses what it deprecates when it first differentiates forward.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*mkldnn_matmul failed:UserWarning"),
]
LEAVES = r"double backward \(the second derivative is not that of the gradient.*NumpyTanh"


def test_a_hessian_through_a_backward_pass_in_numpy_is_right() -> None:
    problem = make("mlp", "cross-entropy")
    matrix = DENSE["hessian"](problem)
    setattr(problem.model, "1", Applied(NumpyTanh))
    v = numbers(len(matrix))
    with pytest.warns(UserWarning, match=LEAVES):
        found = Curvature("hessian").at(Objective(problem.model, problem.loss), problem.data)(v)
    assert float((found - matrix @ v).norm() / (matrix @ v).norm()) < 1e-7


@pytest.mark.parametrize("kind", ["gauss-newton", "fisher"])
def test_products_without_its_second_derivative_are_right_by_double_backward(
    kind: CurvatureKind,
) -> None:
    problem = make("mlp", "cross-entropy")
    matrix = DENSE[kind](problem)
    setattr(problem.model, "1", Applied(NumpyTanh))
    product = Curvature(kind).at(Objective(problem.model, problem.loss), problem.data)
    v = numbers(len(matrix))
    assert product.kept
    torch.testing.assert_close(product(v), matrix @ v, rtol=1e-10, atol=1e-12)


def deep(function: Any) -> nn.Sequential:
    """Three hundred units with kinks beside the function."""
    hidden = [part for _ in range(3) for part in (nn.Linear(100, 100), nn.ReLU())]
    return nn.Sequential(
        nn.Linear(10, 100), nn.ReLU(), *hidden[:-2], Applied(function), nn.Linear(100, 3)
    )


def route(function: Any, loss: nn.Module, arithmetic: str) -> bool:
    """Whether the Hessian goes by double backward."""
    torch.manual_seed(0)
    dtype = torch.float64 if arithmetic == "float64" else torch.float32
    model, x, t = deep(function).to(dtype), torch.randn(20, 10, dtype=dtype), torch.randn(20, 3)
    objective, curvature = Objective(model, loss), Curvature("hessian")
    data = (x, t.argmax(1) if isinstance(loss, nn.CrossEntropyLoss) else t.to(dtype))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model has no second derivative")
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=arithmetic == "bfloat16")
        with autocast, objective.network.algebra():
            curvature.at(objective, data)
    return curvature.keeps_graphs


@pytest.mark.parametrize("arithmetic", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.L1Loss()])
def test_a_missing_part_is_found_among_kinks_and_a_sound_function_is_not_blamed(
    loss: nn.Module, arithmetic: str
) -> None:
    assert not route(NumpyTanh, loss, arithmetic)
    assert route(SoundTanh, loss, arithmetic)
    # What is no derivative of anything cannot be compared, and is what its author wants.
    assert route(StraightThrough, loss, arithmetic)


class ForFloat32(NumpyTanh):
    """One that does not run in float64, so that there is nothing more precise to compare with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise TypeError("float32 only")
        y = x.tanh()
        ctx.save_for_backward(y)
        return y


def test_a_missing_part_is_found_in_float32_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), Applied(ForFloat32), nn.Linear(8, 3))
    objective, curvature = Objective(model, nn.MSELoss()), Curvature("hessian")
    with pytest.warns(UserWarning, match="ForFloat32"):
        curvature.at(objective, (torch.randn(20, 5), torch.randn(20, 3)))
    assert not curvature.keeps_graphs


# The loss ----------------------------------------------------------------------------------------


class Cosh(torch.autograd.Function):
    """Σ log cosh, a smooth |z|, with all of its derivatives."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.cosh().log()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        z: Tensor = ctx.saved_tensors[0]
        return gradient * z.tanh()


class NumpyCosh(Cosh):
    """The same with a backward pass in NumPy."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.from_numpy(ctx.saved_tensors[0].detach().tanh().numpy())


def loss_by(function: Any) -> Any:
    def loss(z: Tensor, t: Tensor) -> Tensor:
        # The square by itself has a second derivative: with half of it missing nothing is zero.
        found: Tensor = (function.apply(z - t) + (z - t).square()).sum(1)
        return found

    return loss


def test_a_loss_whose_backward_pass_leaves_the_graph_is_refused_for_gauss_newton() -> None:
    problem = make("mlp", "mse")
    objective = Objective(problem.model, loss_by(NumpyCosh))
    message = r"the loss has no second derivative in the outputs .*NumpyCosh.*'fisher'"
    with pytest.raises(CurvatureError, match=message):
        Curvature("gauss-newton").at(objective, problem.data)


@pytest.mark.parametrize("margin", [10.0, 13.0])
def test_a_classifier_that_is_nearly_perfect_is_taken(margin: float) -> None:
    """Its derivatives are mostly rounding: p - y is 1e-4 and 5e-6."""
    labels, eye = torch.arange(30) % 3, torch.eye(3, dtype=torch.float32)
    model = nn.Linear(3, 3, bias=False, dtype=torch.float32)
    model.weight.data.copy_(margin * eye)
    data = eye[labels], labels
    product = Curvature("gauss-newton").at(Objective(model, nn.CrossEntropyLoss()), data)
    v = numbers(9).float()
    # Column i of the weight has the outputs of class i, so H is a block for each class.
    probabilities = (margin * eye).double().softmax(1)
    columns = [
        (torch.diag(p) - p.outer(p)) @ c / 3
        for p, c in zip(probabilities, v.double().reshape(3, 3).t(), strict=True)
    ]
    expected = torch.stack(columns).t().reshape(-1)
    torch.testing.assert_close(product(v).double(), expected, rtol=0.2, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_with_a_sound_function_is_taken(kind: CurvatureKind) -> None:
    problem = make("mlp", "mse")
    x, t = problem.data
    v = numbers(sum(p.numel() for p in problem.model.parameters()))

    def plain(z: Tensor, t: Tensor) -> Tensor:
        return ((z - t).cosh().log() + (z - t).square()).sum(1)

    found, expected = (
        Curvature(kind).at(Objective(problem.model, loss), (x, t))
        for loss in (loss_by(Cosh), plain)
    )
    assert found.kept
    torch.testing.assert_close(found(v), expected(v), rtol=1e-9, atol=1e-11)

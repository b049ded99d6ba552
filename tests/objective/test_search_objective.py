"""f_C in the coordinates of a subspace: values, gradients, where the parameters end, and noise.

Values and gradients are compared with dense float64 algebra (V̄ formed by NumPy) and with finite
differences; the noise with the error that a float64 copy of the model shows.
"""

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from krylov_descent.algorithms.basis_storage import Alone, StoredBasis
from krylov_descent.algorithms.coordinates import Coordinates
from krylov_descent.algorithms.krylov import Found
from krylov_descent.algorithms.subspace import Subspace
from krylov_descent.curvature.preconditioners.preconditioner import Identity
from krylov_descent.curvature.products import Curvature
from krylov_descent.objective.batches import as_samples
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.search_objective import SearchObjective
from tests import dense
from tests.matrices import numbers
from tests.problems import make
from tests.subspaces import basis_in_one_process, vectors

Data = tuple[Tensor, Tensor]
EPSILON = 1e-4


def around(
    objective: Objective,
    data: Data,
    dimension: int,
    previous: Callable[[], Tensor] | None = None,
) -> tuple[SearchObjective, Subspace, Tensor]:
    """The function of a step without preconditioner whose three sets are the same; V and θ.

    There is no previous step by default.
    """
    gradient = objective.value_and_gradient(data).gradient
    product = Curvature().at(objective, data)
    subspace = basis_in_one_process(product, Identity(), gradient, [], dimension)
    coordinates = Coordinates(subspace.curvature, subspace.gram, EPSILON)
    none = torch.zeros_like(gradient)
    function = SearchObjective(objective, as_samples(data), previous or none.clone)
    return function.over(subspace, coordinates), subspace, objective.parameters.copy()


def v_bar(subspace: Subspace) -> Tensor:
    """V̄ = VC⁻ᵀ [n, r] by NumPy."""
    values, Q = np.linalg.eigh(subspace.curvature.numpy())
    floored = (Q * np.maximum(values, EPSILON * values.max())) @ Q.T
    factor = np.linalg.cholesky(floored)
    return torch.from_numpy(vectors(subspace).double().numpy().T @ np.linalg.inv(factor).T)


# Values and gradients ----------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["cross-entropy", "weighted-cross-entropy", "mean"])
@pytest.mark.parametrize("model", ["mlp", "conv", "lstm", "tied"])
def test_value_and_gradient_equal_the_dense_ones(model: str, loss: str) -> None:
    problem = make(model, loss)
    objective = Objective(problem.model, problem.loss, micro_batch=2)
    function, subspace, theta = around(objective, problem.data, 5)
    V = v_bar(subspace)

    def f(point: Tensor) -> Tensor:
        return dense.losses_at(problem, point).mean()

    for seed in range(3):
        a = numbers(subspace.rank, seed=seed)
        value, gradient = function(a.numpy())
        point = theta + V @ a
        assert value == pytest.approx(float(f(point)), rel=1e-12)
        expected: Tensor = V.T @ torch.func.grad(f)(point)
        np.testing.assert_allclose(gradient, expected, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(function.direction(a.numpy()), V @ a, rtol=1e-9, atol=1e-11)


def test_gradient_equals_finite_differences_with_weight_decay() -> None:
    problem = make("mlp", "cross-entropy")
    groups = [{"params": list(problem.model.parameters()), "weight_decay": 0.1}]
    objective = Objective(problem.model, problem.loss, params=groups)
    function, subspace, _ = around(objective, problem.data, 4)
    a, h = numbers(subspace.rank).numpy(), 1e-5
    found = function(a)[1]
    for i, direction in enumerate(np.eye(subspace.rank)):
        slope = (function(a + h * direction)[0] - function(a - h * direction)[0]) / (2 * h)
        assert float(found[i]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_a_quadratic_is_round_in_the_coordinates() -> None:
    # A linear model with squared error has its Gauss-Newton matrix as Hessian, so with H̄ = CCᵀ the
    # objective is f(0) + gᵀa + ½‖a‖², and a = -g its minimum in the subspace.
    torch.manual_seed(3)
    model = nn.Linear(6, 1, dtype=torch.float64)
    x, t = torch.randn(40, 6).double(), torch.randn(40, 1).double()
    function, subspace, _ = around(Objective(model, nn.MSELoss()), (x, t), 7)
    assert subspace.rank == 7
    start, gradient = function(np.zeros(7))
    for seed in range(3):
        a = numbers(7, seed=seed).numpy()
        expected = start + float(gradient @ a) + 0.5 * float(a @ a)
        value, slope = function(a)
        assert value == pytest.approx(expected, rel=1e-12)
        np.testing.assert_allclose(slope, gradient + a, rtol=1e-9, atol=1e-11)
    # All of the parameters are in the subspace: this is the least-squares solution.
    function(-gradient)
    columns = torch.cat([x, torch.ones(40, 1).double()], 1)
    solution = torch.linalg.lstsq(columns, t).solution[:, 0]
    found = torch.cat([model.weight.detach()[0], model.bias.detach()])
    torch.testing.assert_close(found, solution, rtol=1e-10, atol=1e-12)


# Where the parameters end ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_are_left_at_the_point_and_come_back_exactly(dtype: torch.dtype) -> None:
    problem = make("mlp", "cross-entropy")
    problem.model.to(dtype)
    data = problem.inputs.to(dtype), problem.case.targets
    objective = Objective(problem.model, problem.loss)
    before = objective.parameters.copy()
    storage = [p.data_ptr() for p in problem.model.parameters()]
    function, subspace, theta = around(objective, data, 4)
    zero = np.zeros(subspace.rank)
    start = function(zero)
    for seed in range(20):
        a = numbers(subspace.rank, seed=seed).numpy()
        function(a)
        assert torch.equal(objective.parameters.copy(), theta + function.direction(a))
    assert torch.equal(theta, before)  # the copy is never written to
    # After any number of moves zero is θ bit for bit: nothing is added and subtracted.
    again = function.start()
    assert torch.equal(objective.parameters.copy(), before)
    assert again[0] == start[0]
    assert np.array_equal(again[1], start[1])
    function(numbers(subspace.rank).numpy())
    function.restore()
    assert torch.equal(objective.parameters.copy(), before)
    assert [p.data_ptr() for p in problem.model.parameters()] == storage


def test_a_step_that_is_taken_is_given_in_pieces_that_stay() -> None:
    problem = make("mlp", "cross-entropy")
    objective = Objective(problem.model, problem.loss)
    function, subspace, theta = around(objective, problem.data, 4)
    a = numbers(subspace.rank).numpy()
    expected = v_bar(subspace) @ torch.from_numpy(a)
    taken = function.take(a)
    parameters = list(problem.model.parameters())
    torch.testing.assert_close(objective.parameters.copy(), theta + expected)
    assert taken.norm == pytest.approx(float(expected.norm()), rel=1e-9)
    assert [piece.shape for piece in taken.pieces] == [p.shape for p in parameters]
    function.restore()
    flat = torch.cat([piece.reshape(-1) for piece in taken.pieces])
    torch.testing.assert_close(flat, expected, rtol=1e-9, atol=1e-11)


def test_a_step_of_another_length_is_taken_as_it_is_given() -> None:
    problem = make("mlp", "cross-entropy")
    objective = Objective(problem.model, problem.loss)
    function, _, theta = around(objective, problem.data, 4)
    step = numbers(len(theta))
    taken = function.take_step(step)
    assert torch.equal(objective.parameters.copy(), theta + step)
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in taken.pieces]), step)
    assert taken.norm == float(step.norm())


def test_value_is_that_of_the_parameters_as_they_are() -> None:
    problem = make("mlp", "cross-entropy")
    objective = Objective(problem.model, problem.loss)
    function, _, theta = around(objective, problem.data, 3)
    objective.parameters.assign(theta + 0.1)
    expected = float(dense.losses_at(problem, theta + 0.1).mean())
    assert function.value() == pytest.approx(expected, rel=1e-12)


def test_samples_are_counted() -> None:
    problem = make("mlp", "cross-entropy")
    objective = Objective(problem.model, problem.loss)
    theta = objective.parameters.copy()
    for previous in (theta, torch.zeros_like(theta)):
        function, _, _ = around(objective, problem.data, 3, previous.clone)
        start, gradient = function.start()
        function(-gradient)
        assert function.samples == 5
        assert function.samples_seen == 2 * 5
        function.noise(start, gradient)
        assert function.samples_seen == (2 + 4) * 5  # four forward passes
        function.restore()


# Noise -------------------------------------------------------------------------------------------

SAMPLES, CLASSES = 100, 10
PROBLEMS: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {
    "cross-entropy": (nn.CrossEntropyLoss(), lambda: torch.randint(CLASSES, (SAMPLES,))),
    "logistic": (nn.BCEWithLogitsLoss(reduction="sum"), lambda: torch.rand(SAMPLES, CLASSES)),
    "mse": (nn.MSELoss(), lambda: torch.randn(SAMPLES, CLASSES)),
}


def wider(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def measured_and_true_noise(
    loss: str,
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    bfloat16: bool = False,
    previous: float = 0.0,
) -> tuple[float, float, float]:
    """The noise as measured, the same as a float64 copy of the model shows it, and the value.

    With a previous step of some direction, of that length.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, CLASSES)).to(dtype)
    function, make_targets = PROBLEMS[loss]
    x, t = torch.randn(SAMPLES, 20), make_targets()
    exact_objective = Objective(copy.deepcopy(model).double(), function)
    objective = Objective(model, function)
    data = x.to(dtype), t.to(dtype) if t.is_floating_point() else t
    direction = numbers(objective.parameters.numel, seed=seed).to(dtype)
    f, subspace, theta = around(objective, data, 4, lambda: previous * direction / direction.norm())
    of_exact = Subspace(
        StoredBasis.at(vectors(subspace).double()),
        Alone(len(theta)),
        Found(subspace.kept, subspace.curvature, subspace.gram, subspace.squared_gradient),
    )
    exact = SearchObjective(
        exact_objective, as_samples((x.double(), wider(t))), theta.double().clone
    ).over(of_exact, Coordinates(subspace.curvature, subspace.gram, EPSILON))
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16), objective.network.algebra():
        start, gradient = f.start()
        noise = f.noise(start, gradient)
        # Near θ: far from it the rounding of the point itself adds to that of the value.
        length = 3e-3 * float(np.linalg.norm(gradient)) / math.sqrt(subspace.rank)
        points = [length * numbers(subspace.rank, seed=k).numpy() for k in range(25)]
        values = [f(a)[0] for a in points]
    errors = [value - exact(a)[0] for a, value in zip(points, values, strict=True)]
    return noise, float(np.std(errors, ddof=1)), start


@pytest.mark.parametrize("loss", PROBLEMS)
@pytest.mark.parametrize("previous", [0.0, 0.01, 1.0])
def test_float32_noise_is_the_error_against_float64(loss: str, previous: float) -> None:
    found = [measured_and_true_noise(loss, seed, previous=previous) for seed in range(7)]
    pairs = [(measured, true) for measured, true, _ in found]
    ratios = [measured / true for measured, true in pairs]
    # A few points tell it to a factor of two or so.
    assert 1 / 2 < float(np.median(ratios)) < 2
    assert max(ratios) < 6
    assert min(ratios) > 1 / 6


@pytest.mark.parametrize("previous", [0.0, 1.0])
def test_float64_noise_is_near_machine_rounding(previous: float) -> None:
    for seed in range(3):
        noise, _, value = measured_and_true_noise(
            "cross-entropy", seed, torch.float64, previous=previous
        )
        assert 1e-18 < noise / value < 1e-15


def test_a_previous_step_that_tells_nothing_is_as_none() -> None:
    first, _, _ = measured_and_true_noise("cross-entropy", 0)
    for length in (math.inf, 1e20, 1e-30):  # in the midst one at which losses are of other sizes
        noise, _, _ = measured_and_true_noise("cross-entropy", 0, previous=length)
        assert noise == first


# Where the CPU lacks bfloat16, torch says that it computes it in another way.
@pytest.mark.filterwarnings("ignore:.*mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize("loss", PROBLEMS)
def test_bfloat16_noise_is_orders_larger(loss: str) -> None:
    coarse = [measured_and_true_noise(loss, seed, bfloat16=True) for seed in range(3)]
    fine = [measured_and_true_noise(loss, seed)[0] for seed in range(3)]
    assert float(np.median([noise for noise, _, _ in coarse])) > 300 * float(np.median(fine))
    ratios = [measured / true for measured, true, _ in coarse]
    assert 1 / 4 < float(np.median(ratios)) < 4


class Cliff(nn.Module):
    """Finite at one value of its parameter only."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.p == 2.0, self.p, math.inf) * x


def test_noise_without_a_finite_neighbourhood_is_rounding_of_the_value() -> None:
    objective = Objective(Cliff(), nn.MSELoss())
    data = torch.ones(4, 1).double(), torch.zeros(4, 1).double()
    for previous in (torch.zeros(1).double(), torch.ones(1).double()):
        function, _, theta = around(objective, data, 1, previous.clone)
        start, gradient = function.start()
        assert start == 4.0
        noise = function.noise(start, gradient)
        assert noise == pytest.approx(torch.finfo(torch.float64).eps * 4.0 / 2)
        assert torch.equal(function.theta, torch.tensor([2.0], dtype=torch.float64))
        function.restore()
        assert torch.equal(objective.parameters.copy(), theta)

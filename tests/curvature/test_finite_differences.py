"""The third route of curvature: close numbers, for models with first derivatives alone."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from krylov_descent import KSD, Objective, Status
from krylov_descent.curvature import finite_differences
from krylov_descent.curvature.products import Curvature, CurvatureError, CurvatureKind
from krylov_descent.objective.batches import Batch
from tests import dense
from tests.curvature_reference import DENSE, KINDS
from tests.matrices import numbers
from tests.once_differentiable import NAMED, NETS, Applied, BackwardOnlyTanh, Net, StraightThrough
from tests.problems import MODELS, Problem, make, physics_informed

# Torch itself uses what it deprecates when it first differentiates forward.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

ROUTES: dict[CurvatureKind, Any] = {
    "gauss-newton": finite_differences.gauss_newton,
    "hessian": finite_differences.hessian,
    "fisher": finite_differences.fisher,
}
EPSILON = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32)}
FALLS_BACK = "no second derivative by double backward.*, nor by forward-mode.*central differences"


def product(problem: Problem, kind: CurvatureKind, v: Tensor, epsilon: float) -> Tensor:
    objective, batch = Objective(problem.model, problem.loss), Batch.of(problem.data)
    step = finite_differences.relative_step(epsilon)
    pieces = ROUTES[kind](objective.network, batch, step)(objective.parameters.pieces(v))
    W = problem.case.normaliser
    scale = batch.size / W**2 if kind == "fisher" else 1 / W
    return scale * objective.parameters.flatten(pieces)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


# The products ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_batch_product_is_close_to_the_dense_matrix(model: str, kind: CurvatureKind) -> None:
    problem = make(model, "per-sample" if model == "nested" else "weighted-cross-entropy")
    H = DENSE[kind](problem)
    v = numbers(len(H))
    assert relative_error(product(problem, kind, v, EPSILON[torch.float64]), H @ v) < 1e-7


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_that_differentiates(kind: CurvatureKind) -> None:
    problem = physics_informed()
    H = DENSE[kind](problem)
    v = numbers(len(H))
    assert relative_error(product(problem, kind, v, EPSILON[torch.float64]), H @ v) < 1e-7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_in_float32_whatever_the_length_of_the_vector(kind: CurvatureKind, size: float) -> None:
    problem = make("mlp", "mean")
    H = DENSE[kind](problem)
    v = numbers(len(H))
    problem.model.float()
    x, t = (t.float() if t.is_floating_point() else t for t in problem.data)
    objective, batch = Objective(problem.model, problem.loss), Batch.of((x, t))
    step = finite_differences.relative_step(EPSILON[torch.float32])
    pieces = objective.parameters.pieces((size * v).float())
    found = objective.parameters.flatten(ROUTES[kind](objective.network, batch, step)(pieces))
    scale = len(x) / problem.case.normaliser**2 if kind == "fisher" else 1 / problem.case.normaliser
    assert relative_error(scale * found / size, H @ v) < 3e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last", [0.0, 1e3], ids=["a layer of zeros", "a layer of large numbers"])
def test_tensors_of_unequal_size(kind: CurvatureKind, last: float) -> None:
    problem = make("mlp", "mse")
    with torch.no_grad():
        for p in problem.model.get_submodule("2").parameters():
            p.mul_(last)
    H = DENSE[kind](problem)
    v = numbers(len(H))
    assert relative_error(product(problem, kind, v, EPSILON[torch.float64]), H @ v) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_zero_and_not_finite_vectors(kind: CurvatureKind) -> None:
    problem = make("mlp", "mse")
    zero = torch.zeros(len(dense.point(problem)), dtype=torch.float64)
    assert not bool(product(problem, kind, zero, EPSILON[torch.float64]).any())
    zero[0] = torch.nan
    assert not bool(product(problem, kind, zero, EPSILON[torch.float64]).isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_as_before(kind: CurvatureKind) -> None:
    problem = make("tied", "mean")
    before = [p.detach().clone() for p in problem.model.parameters()]
    owners = [(id(p), p._version) for p in problem.model.parameters()]
    n = len(dense.point(problem))
    product(problem, kind, numbers(n), EPSILON[torch.float64])
    assert [(id(p), p._version) for p in problem.model.parameters()] == owners
    assert all(map(torch.equal, problem.model.parameters(), before))


# The way there ----------------------------------------------------------------------------------


def products(curvature: Curvature, net: Net, model: nn.Module) -> list[Tensor]:
    objective = Objective(model, net.loss, micro_batch=15)
    at = curvature.at(objective, net.data)
    return [at(numbers(objective.parameters.numel, seed=seed)) for seed in range(2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETS)
def test_models_with_first_derivatives_alone(name: str, kind: CurvatureKind) -> None:
    net = NETS[name]()
    curvature = Curvature(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=UserWarning)
        found = products(curvature, net, net.model)
    (warning,) = (w for w in caught if w.category is UserWarning)
    assert re.search(FALLS_BACK, str(warning.message))
    assert NAMED[name] in str(warning.message)
    assert "two gradients each and are exact to about 4e-11" in str(warning.message)
    expected = products(Curvature(kind), net, net.twin)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-7
    # The next step remembers the route, and is silent.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = products(curvature, net, net.model)
    assert all(map(torch.equal, again, found))


@pytest.mark.filterwarnings("ignore:the model has no second derivative")
@pytest.mark.parametrize("kind", KINDS)
def test_no_graph_is_kept_and_nothing_recorded(kind: CurvatureKind) -> None:
    net = NETS["EmbeddingBag"]()
    curvature = Curvature(kind)
    for _ in range(2):
        at = curvature.at(Objective(net.model, net.loss), net.data)
        assert not curvature.keeps_graphs
        assert not at.kept
        assert at.single_batch is None  # what recordings are made of


@pytest.mark.filterwarnings("ignore:the model has no second derivative")
@pytest.mark.filterwarnings("ignore:.*mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize("kind", ["gauss-newton", "fisher"])
def test_under_autocast_products_have_some_digits(kind: CurvatureKind) -> None:
    net = NETS["EmbeddingBag"]()
    expected = products(Curvature(kind), net, net.twin)
    net.model.float()
    with torch.autocast("cpu", torch.bfloat16):
        objective = Objective(net.model, net.loss)
        with objective.network.algebra():
            at = Curvature(kind).at(objective, net.data)
            found = [at(numbers(at.objective.parameters.numel, seed=s).float()) for s in range(2)]
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 0.2


@pytest.mark.filterwarnings("ignore:the model has no second derivative")
@pytest.mark.filterwarnings("ignore:.*mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.ReLU, nn.Tanh])
def test_deep_models_are_taken_though_gradients_vanish(activation: Any, bfloat16: bool) -> None:
    torch.manual_seed(0)
    hidden = [part for _ in range(12) for part in (nn.Linear(30, 30), activation())]
    model = nn.Sequential(*hidden, Applied(BackwardOnlyTanh), nn.Linear(30, 4))
    data = torch.randn(20, 30), torch.randint(0, 4, (20,))
    for kind in KINDS:
        objective = Objective(model, nn.CrossEntropyLoss())
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16), objective.network.algebra():
            Curvature(kind).at(objective, data)


@pytest.mark.filterwarnings("ignore:the model has no second derivative")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETS)
def test_training_goes_as_with_all_derivatives(name: str, kind: CurvatureKind) -> None:
    net = NETS[name]()
    reached = []
    for model in (net.model, net.twin):
        optimizer = KSD(model, net.loss, curvature=kind, dimension=6, preconditioner="identity")
        results = [optimizer.step(net.data) for _ in range(4)]
        reached.append(results[-1].loss_after)
        assert reached[-1] < 0.8 * results[0].loss_before
    # The same way, as far as rounding and 1e-9 of a product leave it so.
    assert reached[0] == pytest.approx(reached[1], rel=0.1)


# Losses with a gradient alone --------------------------------------------------------------------


def ctc(outputs: Tensor, targets: Tensor) -> Tensor:
    n = len(outputs)
    times, labels = torch.full((n,), outputs.shape[1]), torch.full((n,), targets.shape[1])
    probabilities = outputs.log_softmax(2).transpose(0, 1)
    return F.ctc_loss(probabilities, targets, times, labels, reduction="none")


def classes() -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    x = torch.randn(40, 4, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, nn.MultiMarginLoss(), (x, (x[:, 0] > 0).long() + (x[:, 2] > 0))


def sequences() -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(20, 5, 4, dtype=torch.float64)
    return model, ctc, (x, 1 + (x[:, (0, 4), 0] > 0).long())


@pytest.mark.filterwarnings("ignore:the model has no second derivative")
@pytest.mark.parametrize("make_problem", [classes, sequences])
def test_the_advice_for_a_loss_without_second_derivative_works(make_problem: Any) -> None:
    torch.manual_seed(0)
    model, loss, data = make_problem()
    start = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(CurvatureError, match="second derivative in the outputs") as problem:
        KSD(model, loss).step(data)
    advised = [kind for kind in KINDS if f"'{kind}'" in str(problem.value)]
    assert advised == ["hessian", "fisher"]
    for kind in advised:
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), start)
        optimizer = KSD(model, loss, curvature=kind, dimension=6)
        results = [optimizer.step(data) for _ in range(3)]
        assert results[0].status is Status.MOVED
        assert results[-1].loss_after < 0.8 * results[0].loss_before


# No route ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hessian", "fisher"])
def test_parameters_that_cannot_be_exchanged_are_an_error(kind: CurvatureKind) -> None:
    """The loss has them in a variable of its own: there they are still the old ones."""
    net = NETS["once_differentiable"]()
    weights = [p for p in net.model.parameters() if p.dim() > 1]

    def loss(z: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(z, t, reduction="none") + sum(w.square().sum() for w in weights)

    objective = Objective(net.model, loss)
    before = objective.parameters.copy()
    message = rf"{kind}.*not by double backward.*0\.weight, 2\.weight.*attributes.*LBFGS"
    with pytest.raises(CurvatureError, match=message):
        Curvature(kind).at(objective, net.data)
    assert torch.equal(objective.parameters.copy(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_none_has_no_differences(kind: CurvatureKind) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), Applied(StraightThrough), Applied(BackwardOnlyTanh), nn.Linear(6, 3)]
    objective = Objective(nn.Sequential(*layers).double(), nn.MSELoss())
    x, t = numbers(40).reshape(10, 4), numbers(30, seed=1).reshape(10, 3)
    with pytest.raises(CurvatureError, match=r"differences.*straight-through.*StraightThrough"):
        Curvature(kind).at(objective, (x, t))

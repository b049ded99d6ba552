"""Curvature products against dense float64 matrices and against curvlinops.

Every product is compared with a matrix that torch.func builds from a pure function of θ
(`tests.dense`). The second opinion is an independent library.
"""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from krylov_descent.curvature.products import Curvature, CurvatureKind
from krylov_descent.objective.objective import Objective
from tests import dense
from tests.curvature_reference import DENSE, KINDS, assert_equals_dense, product_of
from tests.loss_cases import LOSSES, LossCase
from tests.matrices import numbers
from tests.problems import MODELS, PAIRS, make, physics_informed

# The loss's own Hessian is part of the Gauss-Newton matrix alone, so all pairs are for it.
FEWER_PAIRS = [
    (model, loss)
    for model, loss in PAIRS
    if model in ("mlp", "sequence") or loss in ("weighted-cross-entropy", "mean")
]


# Models × losses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "loss", "kind"),
    [(*pair, "gauss-newton") for pair in PAIRS]
    + [(*pair, kind) for pair in FEWER_PAIRS for kind in ("hessian", "fisher")],
)
def test_product_equals_the_dense_matrix(model: str, loss: str, kind: CurvatureKind) -> None:
    problem = make(model, loss)
    assert_equals_dense(product_of(problem, kind), DENSE[kind](problem))


@pytest.mark.parametrize("model", ["mlp", "sequence"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("ignored", [False, True], ids=["all targets", "some ignored"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "class weights"])
def test_closed_forms_of_cross_entropy(
    model: str, reduction: str, smoothing: float, ignored: bool, weighted: bool
) -> None:
    problem = make(model, "cross-entropy")
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    settings: dict[str, Any] = {"label_smoothing": smoothing}
    targets = problem.case.targets.clone()
    if ignored:
        targets[targets == 1] = -100
    if weighted:
        settings["weight"] = weight
    counted = (weight if weighted else torch.ones_like(weight))[targets[targets >= 0]]
    samples = len(targets)

    def by_autodiff(z: Tensor) -> Tensor:
        return F.cross_entropy(z, targets, reduction="none", **settings).reshape(samples, -1).sum(1)

    case = LossCase(
        nn.CrossEntropyLoss(reduction=reduction, **settings),
        targets,
        by_autodiff,
        float(counted.sum()) if reduction == "mean" else samples,
    )
    problem = dataclasses.replace(problem, case=case)
    assert_equals_dense(product_of(problem, "gauss-newton"), dense.gauss_newton(problem))


def test_the_matrix_of_cases_is_complete() -> None:
    layers = {"linear", "conv", "embedding", "layernorm", "rnn", "gru", "lstm", "attention"}
    assert layers | {"tied", "called-twice", "nested"} <= set(MODELS)
    losses = {"mse", "mse-sum", "logistic", "cross-entropy", "weighted-cross-entropy", "mean"}
    assert losses | {"per-sample"} <= set(LOSSES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_that_differentiates(kind: CurvatureKind) -> None:
    problem = physics_informed()
    assert_equals_dense(product_of(problem, kind), DENSE[kind](problem))


@pytest.mark.parametrize("kind", KINDS)
def test_fused_attention_is_replaced_by_the_math_kernel(kind: CurvatureKind) -> None:
    problem = make("attention", "cross-entropy")
    heads = torch.randn(5, 2, 3, 2, dtype=torch.float64)
    fused = torch._fused_sdp_choice(heads, heads, heads)
    assert fused != torch.nn.attention.SDPBackend.MATH.value  # else there is nothing to test
    (slope,) = torch.autograd.grad(
        problem.model(problem.inputs).square().sum(),
        [problem.trained["parts.attend.in_proj_weight"]],
        create_graph=True,
    )
    with pytest.raises(RuntimeError, match="derivative for aten::_scaled_dot_product_"):
        slope.sum().backward()

    product = product_of(problem, kind)
    assert product.kept  # by double backward, not by a slower route
    assert_equals_dense(product, DENSE[kind](problem))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_model(kind: CurvatureKind) -> None:
    problem = make("mlp", "cross-entropy")
    matrix = DENSE[kind](problem)

    def forward(model: nn.Module, x: Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=False)

    assert_equals_dense(product_of(problem, kind, forward=forward), matrix)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("loss", ["mse", "mse-sum", "cross-entropy", "logistic"])
@pytest.mark.parametrize("model", ["mlp", "conv", "lstm"])
def test_curvlinops_agrees(model: str, loss: str) -> None:
    import curvlinops  # here, where the warning it raises is not an error

    problem = make(model, loss)
    n = len(dense.point(problem))
    arguments: Any = (problem.model, problem.loss, [*problem.trained.values()], [problem.data])
    peers: dict[CurvatureKind, Any] = {
        "gauss-newton": curvlinops.GGNLinearOperator,
        "hessian": curvlinops.HessianLinearOperator,
        "fisher": curvlinops.EFLinearOperator,
    }
    # Their sum is over samples, ours is their mean.
    scale = 1 / len(problem.inputs) if loss == "mse-sum" else 1.0
    for kind, peer in peers.items():
        if kind == "fisher" and loss in ("mse", "logistic"):
            continue  # their empirical Fisher takes each element of an output for a sample
        operator = peer(*arguments, check_deterministic=False)
        v = numbers(n)
        expected = scale * (operator @ v)
        torch.testing.assert_close(product_of(problem, kind)(v), expected, rtol=1e-10, atol=1e-12)


# Outputs and parameters of any form --------------------------------------------------------------


def squared_error(outputs: Any, targets: Tensor) -> Tensor:
    losses: Tensor = (outputs["z"] - targets).square().sum(1) * (1 + outputs["weight"].square())
    return losses


class Weighted(nn.Module):
    """Outputs: one trained, one constant, one of whole numbers; and a parameter without use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=torch.float64)
        self.idle = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.linear(x).tanh()
        return {"best": z.argmax(1), "weight": x[:, 0], "z": z}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_without_gradient_and_parameters_without_use(kind: CurvatureKind) -> None:
    model = Weighted()
    x, t = numbers(24).reshape(6, 4), numbers(18, seed=1).reshape(6, 3)
    objective = Objective(model, squared_error)
    found = Curvature(kind).at(objective, (x, t))(numbers(17))

    def losses(outputs: Tensor, targets: Any) -> Tensor:
        return squared_error({"z": outputs, "weight": targets["weight"]}, targets["t"])

    plain = Objective(nn.Sequential(model.linear, nn.Tanh()), losses)
    targets = {"t": t, "weight": x[:, 0]}
    expected = Curvature(kind).at(plain, (x, targets))(numbers(17)[2:])
    assert torch.equal(found[:2], torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(found[2:], expected)


def test_a_loss_linear_in_the_outputs_has_no_gauss_newton_matrix() -> None:
    problem = make("mlp", "mse")
    targets = problem.case.targets

    def linear(z: Tensor, t: Tensor) -> Tensor:
        return (z * t).sum(1)

    objective = Objective(problem.model, linear)
    v = numbers(objective.parameters.numel)
    with pytest.warns(UserWarning, match="linear in the model's outputs.*CrossEntropyLoss"):
        product = Curvature("gauss-newton").at(objective, problem.data)
    assert not bool(product(v).any())
    # The Hessian has the curvature of the model.
    at = dense.point(problem)

    def mean(theta: Tensor) -> Tensor:
        return linear(dense.outputs_at(problem, theta), targets).mean()

    expected = torch.autograd.functional.hessian(mean, at) @ v
    torch.testing.assert_close(Curvature("hessian").at(objective, problem.data)(v), expected)


def test_a_loss_linear_in_the_parameters_has_no_hessian() -> None:
    problem = make("linear", "mse")
    objective = Objective(problem.model, lambda z, t: (z * t).sum(1))
    product = Curvature("hessian").at(objective, problem.data)
    assert not bool(product(numbers(objective.parameters.numel)).any())


# Sums over samples -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", ["mse", "weighted-cross-entropy", "mean"])
def test_unequal_micro_batches(kind: CurvatureKind, loss: str) -> None:
    problem = make("mlp", loss)
    matrix = DENSE[kind](problem)
    x, t = problem.data
    batches = [(x[:3], t[:3]), (x[3:4], t[3:4]), (x[4:], t[4:])]
    loader = DataLoader(TensorDataset(x, t), batch_size=3)
    for product in (
        product_of(problem, kind, micro_batch=2),
        product_of(problem, kind, batches),
        product_of(problem, kind, loader, micro_batch=2),
    ):
        assert product.samples == 5
        assert_equals_dense(product, matrix)


def test_a_stream_may_fill_the_same_tensors_again() -> None:
    problem = make("mlp", "mse")
    x, y = problem.data
    objective = Objective(problem.model, problem.loss)
    v = numbers(objective.parameters.numel)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        inputs, targets = torch.empty_like(x[:2]), torch.empty_like(y[:2])
        for start in range(0, len(x) - 1, 2):
            yield inputs.copy_(x[start : start + 2]), targets.copy_(y[start : start + 2])

    even = len(x) // 2 * 2
    expected = Curvature().at(objective, (x[:even], y[:even]))(v)
    torch.testing.assert_close(Curvature().at(objective, batches())(v), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay_adds_lambda_to_its_group(kind: CurvatureKind) -> None:
    problem = make("mlp", "cross-entropy")
    first, last = problem.model.get_submodule("0"), problem.model.get_submodule("2")
    groups = [
        {"params": list(first.parameters()), "weight_decay": 0.3},
        {"params": list(last.parameters()), "weight_decay": 2.0},
    ]
    decay = torch.tensor([0.3] * 15 + [2.0] * 12, dtype=torch.float64)
    product = product_of(problem, kind, params=groups, micro_batch=2)
    assert_equals_dense(product, DENSE[kind](problem) + torch.diag(decay))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_counts_is_a_clear_error(kind: CurvatureKind) -> None:
    problem = make("mlp", "weighted-cross-entropy")
    ignored = torch.full_like(problem.case.targets, -7)
    with pytest.raises(ValueError, match="no sample that counts"):
        product_of(problem, kind, (problem.inputs, ignored))
    with pytest.raises(ValueError, match="no sample that counts"):
        product_of(problem, kind, iter([]))


def test_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match=r"`curvature` must be one of .*found 'newton'"):
        Curvature("newton")  # type: ignore[arg-type]


# Algebra -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["mlp", "conv", "lstm", "attention", "embedding"])
def test_product_is_linear_and_repeats_bit_for_bit(kind: CurvatureKind, model: str) -> None:
    problem = make(model, "per-sample")
    product = product_of(problem, kind)
    n = len(dense.point(problem))
    u, v = numbers(n), numbers(n, seed=1)
    Hu, Hv = product(u), product(v)
    torch.testing.assert_close(product(2 * u - 3 * v), 2 * Hu - 3 * Hv, rtol=1e-9, atol=1e-12)
    assert not bool(product(torch.zeros(n, dtype=torch.float64)).any())
    assert torch.equal(product(u), Hu)
    assert torch.equal(product_of(problem, kind)(v), Hv)
    assert product.products == 5


CONVEX: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {
    "mse": (nn.MSELoss(), torch.randn_like),
    "cross-entropy": (nn.CrossEntropyLoss(), lambda z: torch.arange(len(z)) % z.shape[1]),
    "logistic": (nn.BCEWithLogitsLoss(), torch.rand_like),
    "poisson": (nn.PoissonNLLLoss(), torch.rand_like),
}


# A cross-entropy of a single class is constant.
@pytest.mark.filterwarnings("ignore:the loss is linear")
@settings(max_examples=60)
@given(
    widths=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    samples=st.integers(1, 12),
    micro_batch=st.integers(1, 5),
    loss=st.sampled_from(sorted(CONVEX)),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
)
def test_products_are_symmetric_and_positive_semidefinite(
    widths: list[int], samples: int, micro_batch: int, loss: str, kind: CurvatureKind, seed: int
) -> None:
    torch.manual_seed(seed)
    layers = [
        layer
        for i, o in pairwise(widths)
        for layer in (nn.Linear(i, o, dtype=torch.float64), nn.Tanh())
    ]
    model = nn.Sequential(*layers[:-1])
    function, targets = CONVEX[loss]
    x = torch.randn(samples, widths[0], dtype=torch.float64)
    objective = Objective(model, function, micro_batch=micro_batch)
    product = Curvature(kind).at(objective, (x, targets(model(x).detach())))
    n = objective.parameters.numel
    u, v = numbers(n, seed=1), numbers(n, seed=2)
    Hu, Hv = product(u), product(v)
    scale = float(Hu.norm() * v.norm() + Hv.norm() * u.norm())
    assert abs(float(u @ Hv - v @ Hu)) <= 1e-12 * scale
    if kind != "hessian":
        assert float(u @ Hu) >= -1e-14 * scale

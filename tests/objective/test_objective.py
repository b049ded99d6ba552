"""The function that is minimised: model + loss + L2, over any set of samples."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.objective import Objective
from tests import dense
from tests.problems import PAIRS, Problem, make, physics_informed


def _objective(problem: Problem, **arguments: Any) -> Objective:
    return Objective(problem.model, problem.loss, **arguments)


def _close(found: Evaluation, expected: Evaluation, rel: float = 1e-12) -> None:
    assert found.value == pytest.approx(expected.value, rel=rel)
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=rel, atol=1e-14)
    torch.testing.assert_close(found.squares, expected.squares, rtol=rel, atol=1e-14)
    assert (found.samples, found.normaliser) == (expected.samples, expected.normaliser)


def _cut(problem: Problem, sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """The data of a problem with tensors for inputs and targets, in batches of these sizes."""
    inputs, targets = problem.data
    yield from zip(torch.split(inputs, sizes), torch.split(targets, sizes), strict=True)


# Against dense references -------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "loss"), PAIRS)
def test_value_and_gradient_equal_the_dense_ones(model: str, loss: str) -> None:
    problem = make(model, loss)
    objective = _objective(problem)
    value, gradient = dense.value(problem), dense.gradient(problem)
    assert objective.value(problem.data) == pytest.approx(value, rel=1e-12)
    found = objective.value_and_gradient(problem.data)
    assert found.value == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(found.gradient, gradient, rtol=1e-10, atol=1e-13)
    assert found.squares.numel() == 0
    assert found.samples == 5
    assert found.normaliser == pytest.approx(problem.case.normaliser, rel=1e-14)


@pytest.mark.parametrize(("model", "loss"), PAIRS)
def test_losses_equal_the_numerators(model: str, loss: str) -> None:
    problem = make(model, loss)
    found = _objective(problem, micro_batch=2).losses(problem.data)
    expected = problem.case.numerators(dense.outputs_at(problem, dense.point(problem)))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_physics_informed_net() -> None:
    problem = physics_informed()
    objective = _objective(problem, micro_batch=2)
    assert objective.value(problem.data) == pytest.approx(dense.value(problem), rel=1e-12)
    assert objective.findings.forward_differentiates
    found = objective.value_and_gradient(problem.data)
    torch.testing.assert_close(found.gradient, dense.gradient(problem), rtol=1e-10, atol=1e-13)


def test_a_physics_informed_net_by_its_forward() -> None:
    problem = physics_informed()
    residuals, net = problem.model.forward, problem.model.net
    objective = Objective(net, problem.loss, forward=lambda _, x: residuals(x))  # type: ignore[arg-type]
    found = objective.value_and_gradient(problem.data)
    assert found.value == pytest.approx(dense.value(problem), rel=1e-12)
    torch.testing.assert_close(found.gradient, dense.gradient(problem), rtol=1e-10, atol=1e-13)


# Micro-batches and forms of data ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ("mlp", "weighted-cross-entropy"),
        ("mlp", "mean"),
        ("conv", "logistic"),
        ("sequence", "weighted-cross-entropy"),
        ("nested", "per-sample"),
    ],
)
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5, 100])
def test_micro_batches_change_nothing(model: str, loss: str, micro_batch: int) -> None:
    problem = make(model, loss)
    whole = _objective(problem).value_gradient_and_squares(problem.data)
    parts = _objective(problem, micro_batch=micro_batch)
    assert all(batch.size <= micro_batch for batch in parts.micro_batches(problem.data))
    _close(parts.value_gradient_and_squares(problem.data), whole)
    assert parts.value(problem.data) == pytest.approx(whole.value, rel=1e-13)
    gradient = parts.value_and_gradient(problem.data).gradient
    torch.testing.assert_close(gradient, whole.gradient, rtol=1e-12, atol=1e-14)


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=5).map(lambda sizes: [*sizes, 5 - sum(sizes)]),
    st.none() | st.integers(1, 4),
    st.sampled_from(["mse", "weighted-cross-entropy", "mean"]),
)
def test_unequal_batches_change_nothing(
    sizes: list[int], micro_batch: int | None, loss: str
) -> None:
    if sizes[-1] < 0:
        sizes = [2, 0, 3]
    problem = make("mlp", loss)
    whole = _objective(problem).value_gradient_and_squares(problem.data)
    objective = _objective(problem, micro_batch=micro_batch)
    _close(objective.value_gradient_and_squares(list(_cut(problem, sizes))), whole)
    _close(objective.value_gradient_and_squares(_cut(problem, sizes)), whole)


def test_all_forms_of_data_give_the_same() -> None:
    problem = make("mlp", "weighted-cross-entropy")
    objective = _objective(problem)
    whole = objective.value_gradient_and_squares(problem.data)
    dataset = TensorDataset(*problem.data)
    forms = {
        "dataset": dataset,
        "loader": DataLoader(dataset, batch_size=2),
        "shuffled loader": DataLoader(dataset, batch_size=3, shuffle=True),
        "loader with a sampler": DataLoader(
            dataset, batch_size=2, sampler=SubsetRandomSampler(range(5))
        ),
        "list": [tuple(dataset[:3]), tuple(dataset[3:])],
        "generator": _cut(problem, [1, 4]),
    }
    for data in forms.values():
        _close(objective.value_gradient_and_squares(data), whole)


def test_targets_may_be_none() -> None:
    model = nn.Linear(3, 2).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    objective = Objective(model, lambda z, t: z.square().sum(1))
    expected = float(model(x).detach().square().sum(1).mean())
    assert objective.value((x, None)) == pytest.approx(expected, rel=1e-14)
    assert objective.value([(x[:3], None), (x[3:], None)]) == pytest.approx(expected, rel=1e-14)


def test_a_tuple_of_inputs_becomes_arguments() -> None:
    bilinear = nn.Bilinear(2, 3, 1).double()
    left, right = torch.randn(4, 2).double(), torch.randn(4, 3).double()
    objective = Objective(bilinear, lambda z, _: z[:, 0])
    expected = float(bilinear(left, right).detach().mean())
    for inputs in ((left, right), [left, right], {"input1": left, "input2": right}):
        assert objective.value((inputs, None)) == pytest.approx(expected, rel=1e-14)


def test_the_default_micro_batch_fits_the_memory_for_activations() -> None:
    model = nn.Sequential(nn.Linear(10, 1000), nn.Tanh(), nn.Linear(1000, 1))
    data = torch.randn(100, 10), torch.randn(100, 1)
    objective = Objective(model, nn.MSELoss(), activation_memory=100_000)
    objective.value(data)
    # tanh keeps its 1,000 outputs for the backward pass, the first layer its 10 inputs.
    assert 4000 <= objective.findings.bytes_per_sample <= 2 * 4000
    assert objective.micro_batch == int(100_000 // objective.findings.bytes_per_sample)
    assert Objective(model, nn.MSELoss(), micro_batch=7).micro_batch == 7
    assert Objective(model, nn.MSELoss()).activation_memory == 1 << 30


# Precision ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [None, 100])
def test_losses_are_summed_in_float64(micro_batch: int | None) -> None:
    # f = 16384 + mean(xᵢ)θ: a float32 sum of 1,000 such losses is 1.6e7, known to ±1.
    theta = nn.Linear(1, 1, bias=False)
    x = torch.randint(0, 8, (1000, 1)) / 512
    objective = Objective(theta, lambda z, _: 16384 + z[:, 0], micro_batch=micro_batch)
    with torch.no_grad():
        theta.weight.fill_(1.0)
    per_sample = 16384 + x[:, 0]  # exact in float32: multiples of 2⁻⁹ below 2¹⁵
    exact = float(per_sample.double().mean())
    assert objective.value((x, None)) == pytest.approx(exact, abs=1e-11)
    assert objective.value_and_gradient((x, None)).value == pytest.approx(exact, abs=1e-11)
    assert objective.losses((x, None)).mean().item() == pytest.approx(exact, abs=1e-11)
    squares = objective.value_gradient_and_squares((x, None))
    assert squares.value == pytest.approx(exact, abs=1e-11)
    assert float(per_sample.sum()) / 1000 != pytest.approx(exact, abs=1e-6)  # what float32 gives


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_have_the_parameters_dtype(dtype: torch.dtype) -> None:
    problem = make("conv", "cross-entropy")
    model = problem.model.to(dtype)
    objective = Objective(model, problem.loss)
    found = objective.value_gradient_and_squares((problem.inputs.to(dtype), problem.case.targets))
    assert found.gradient.dtype == found.squares.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    model.double()
    torch.testing.assert_close(
        found.gradient.double(), dense.gradient(problem), rtol=tolerance, atol=tolerance
    )


def test_results_keep_no_graph() -> None:
    problem = make("conv", "mse")  # its Linear and Conv layers take different routes
    found = _objective(problem).value_gradient_and_squares(problem.data)
    assert not found.gradient.requires_grad
    assert not found.squares.requires_grad
    assert all(p.grad is None for p in problem.model.parameters())


# Weight decay -------------------------------------------------------------------------------------


def test_weight_decay_of_each_group() -> None:
    problem = make("mlp", "cross-entropy")
    first, last = problem.model[0], problem.model[2]  # type: ignore[index]
    groups = [
        {"params": [first.weight], "weight_decay": 0.3},
        {"params": [first.bias, last.bias]},
        {"params": [last.weight], "weight_decay": 2.0},
    ]
    decayed = _objective(problem, params=groups)
    plain = _objective(problem, params=[first.weight, first.bias, last.bias, last.weight])
    sizes = [first.weight.numel(), first.bias.numel() + last.bias.numel(), last.weight.numel()]
    lam = torch.tensor([0.3, 0.0, 2.0], dtype=torch.float64).repeat_interleave(torch.tensor(sizes))
    theta = decayed.parameters.copy()

    expected = plain.value_gradient_and_squares(problem.data)
    found = decayed.value_gradient_and_squares(problem.data)
    penalty = float((lam * theta**2).sum() / 2)
    assert found.value == pytest.approx(expected.value + penalty, rel=1e-13)
    assert decayed.value(problem.data) == pytest.approx(found.value, rel=1e-13)
    torch.testing.assert_close(found.gradient, expected.gradient + lam * theta)
    # The squares are those of the data; the preconditioner adds λ.
    torch.testing.assert_close(found.squares, expected.squares)
    torch.testing.assert_close(decayed.losses(problem.data), plain.losses(problem.data))


def test_the_gradient_is_that_of_the_value() -> None:
    problem = make("layernorm", "logistic")
    objective = _objective(
        problem, params=[{"params": list(problem.model.parameters()), "weight_decay": 0.1}]
    )
    theta, found = objective.parameters.copy(), objective.value_and_gradient(problem.data)
    direction = torch.randn_like(theta)

    def along(step: float) -> float:
        objective.parameters.assign(theta + step * direction)
        return objective.value(problem.data)

    slope = (along(1e-5) - along(-1e-5)) / 2e-5
    assert float(found.gradient @ direction) == pytest.approx(slope, rel=1e-8)


# Looking again ------------------------------------------------------------------------------------


def test_refresh_sees_what_requires_a_gradient_now() -> None:
    problem = make("mlp", "mse")
    groups = [{"params": list(problem.model.parameters()), "weight_decay": 0.0}]
    objective = _objective(problem, params=groups)
    objective.value(problem.data)
    problem.model[0].requires_grad_(False)  # type: ignore[index]
    objective.refresh(groups)
    found = objective.value_gradient_and_squares(problem.data)
    torch.testing.assert_close(found.gradient, dense.gradient(problem))
    torch.testing.assert_close(found.squares, dense.squares(problem))

    groups[0]["weight_decay"] = 1.0
    objective.refresh(groups)
    decayed = objective.value(problem.data)
    assert decayed == pytest.approx(found.value + float(dense.point(problem).square().sum() / 2))


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["micro_batch", "activation_memory"])
def test_limits_below_one_are_refused(name: str) -> None:
    limits: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, found 0"):
        Objective(nn.Linear(1, 1), nn.MSELoss(), **limits)


@pytest.mark.parametrize("data", [[], [(torch.zeros(0, 2), torch.zeros(0, 1))]])
def test_a_stream_without_samples_is_refused(data: list[Any]) -> None:
    objective = Objective(nn.Linear(2, 1), nn.MSELoss())
    for method in (
        objective.value,
        objective.losses,
        objective.value_and_gradient,
        objective.value_gradient_and_squares,
    ):
        with pytest.raises(ValueError, match="`data` is empty"):
            method(data)


def test_targets_that_are_all_ignored_are_refused() -> None:
    objective = Objective(nn.Linear(2, 3), nn.CrossEntropyLoss(ignore_index=0))
    data = torch.randn(4, 2), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="every target is ignored or has weight zero"):
        objective.value_and_gradient(data)


def test_a_loss_without_influence_of_the_parameters_is_refused() -> None:
    objective = Objective(nn.Linear(2, 1), lambda z, _: z.detach()[:, 0])
    for method in (objective.value_and_gradient, objective.value_gradient_and_squares):
        with pytest.raises(ValueError, match=r"not depend on any trainable parameter.*`params`"):
            method((torch.randn(3, 2), None))


def test_findings_before_the_first_batch_are_refused() -> None:
    with pytest.raises(RuntimeError, match="has not seen a batch"):
        _ = Objective(nn.Linear(2, 1), nn.MSELoss()).findings


def test_numbers_that_are_not_finite_are_passed_on() -> None:
    model = nn.Linear(2, 1)
    x = torch.tensor([[1.0, torch.inf], [1.0, 2.0]])
    found = Objective(model, nn.MSELoss()).value_and_gradient((x, torch.zeros(2, 1)))
    assert not torch.tensor(found.value).isfinite()
    assert not found.gradient.isfinite().all()


# Autocast -----------------------------------------------------------------------------------------


def test_autocast_reaches_the_forward_pass_alone() -> None:
    seen = list[torch.dtype]()

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            seen.append(out.dtype)
            return out

    model = Watched(4, 3)
    data = torch.randn(6, 4), torch.randn(6, 3)
    objective = Objective(model, nn.MSELoss())
    exact = objective.value_and_gradient(data)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16), objective.network.algebra():
        assert not torch.is_autocast_enabled("cpu")
        found = objective.value_gradient_and_squares(data)
    assert set(seen) == {torch.bfloat16}
    assert found.gradient.dtype == torch.float32
    assert 0 < abs(found.value - exact.value) < 2e-2 * exact.value
    torch.testing.assert_close(found.gradient, exact.gradient, rtol=5e-2, atol=2e-2)
    assert objective.value(data) == pytest.approx(exact.value, rel=1e-6)  # and is gone afterwards


def test_nothing_warns_on_the_usual_way() -> None:
    problem = make("transformer", "cross-entropy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _objective(problem).value_gradient_and_squares(problem.data)

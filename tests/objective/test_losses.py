"""The loss contract: how outputs and targets become one number per sample."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from krylov_descent import KSD
from krylov_descent.objective.losses import (
    CLASSWISE,
    ELEMENTWISE,
    MODULE_OF_FUNCTION,
    PAIRWISE,
    Loss,
    LossContractError,
    SampleLoss,
)
from tests import dense
from tests.loss_cases import LOSSES
from tests.problems import make
from tests.torch_losses import BY_NAME, WEIGHT, C, N, T, classes, normal, uniform


def _mean(loss: SampleLoss, outputs: Any, targets: Any) -> Tensor:
    """Σ nᵢ / Σ wᵢ."""
    return loss.per_sample(outputs, targets, N).sum() / loss.normaliser(targets, N)


def _differentiated(function: Callable[[Tensor], Tensor], outputs: Tensor) -> tuple[Tensor, Tensor]:
    outputs = outputs.clone().requires_grad_()
    value = function(outputs)
    (gradient,) = torch.autograd.grad(value, outputs)
    return value.detach(), gradient


def test_every_loss_of_the_contract_is_tested() -> None:
    assert {type(maker()) for maker, _, _ in BY_NAME.values()} == {*ELEMENTWISE, *CLASSWISE}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@pytest.mark.parametrize("name", BY_NAME)
def test_reduction_mean_is_torchs_own(name: str) -> None:
    maker, make_outputs, make_targets = BY_NAME[name]
    outputs, targets = make_outputs(), make_targets()
    loss = maker(reduction="mean")
    expected = _differentiated(lambda z: loss(z, targets), outputs)
    found = _differentiated(lambda z: _mean(SampleLoss(loss), z, targets), outputs)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", BY_NAME)
def test_reduction_sum_is_torchs_own_over_the_samples(name: str) -> None:
    maker, make_outputs, make_targets = BY_NAME[name]
    outputs, targets = make_outputs(), make_targets()
    loss = maker(reduction="sum")
    expected = _differentiated(lambda z: loss(z, targets) / N, outputs)
    found = _differentiated(lambda z: _mean(SampleLoss(loss), z, targets), outputs)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", BY_NAME)
def test_parts_add_up_to_the_whole(name: str) -> None:
    maker, make_outputs, make_targets = BY_NAME[name]
    outputs, targets = make_outputs(), make_targets()
    loss = SampleLoss(maker())
    whole = loss.per_sample(outputs, targets, N)
    assert whole.shape == (N,)
    halves = slice(0, 2), slice(2, N)
    parts = [loss.per_sample(outputs[s], targets[s], len(outputs[s])) for s in halves]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-14, atol=0)
    normalisers = [loss.normaliser(targets[s], len(targets[s])) for s in halves]
    assert float(sum(normalisers)) == pytest.approx(float(loss.normaliser(targets, N)), rel=1e-14)


def test_batchmean_of_the_divergence_is_torchs_own() -> None:
    loss = nn.KLDivLoss(reduction="batchmean")
    outputs, targets = normal(N, C).log_softmax(1), normal(N, C).softmax(1)
    found = _mean(SampleLoss(loss), outputs, targets)
    torch.testing.assert_close(found, loss(outputs, targets), rtol=1e-14, atol=0)


def test_a_cross_entropy_has_a_normaliser_of_its_own() -> None:
    loss = SampleLoss(nn.CrossEntropyLoss(WEIGHT, ignore_index=1))
    targets = torch.tensor([0, 1, 2, 1, 0, 2])
    assert float(loss.normaliser(targets, N)) == pytest.approx(0.3 + 2.5 + 0.3 + 2.5)
    sequences = SampleLoss(nn.CrossEntropyLoss(ignore_index=0))
    assert float(sequences.normaliser(torch.arange(N * T).reshape(N, T) % C, N)) == N * T * 2 / 3
    assert float(SampleLoss(nn.MSELoss()).normaliser(normal(N, C), N)) == N


@pytest.mark.parametrize("function", MODULE_OF_FUNCTION)
def test_functions_of_torch_are_known(function: Loss) -> None:
    _, make_outputs, make_targets = next(
        case for case in BY_NAME.values() if type(case[0]()) is MODULE_OF_FUNCTION[function]
    )
    outputs, targets = make_outputs(), make_targets()
    loss = SampleLoss(function)
    assert loss.known
    torch.testing.assert_close(
        _mean(loss, outputs, targets), function(outputs, targets), rtol=1e-14, atol=0
    )


def test_the_loss_itself_is_left_as_it_is() -> None:
    loss = nn.CrossEntropyLoss(WEIGHT)
    before = dict(vars(loss))
    SampleLoss(loss).per_sample(normal(N, C), classes(N), N)
    assert vars(loss) == before
    assert loss.reduction == "mean"


# Callables ----------------------------------------------------------------------------------------


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).sum(1)


def test_one_number_per_sample() -> None:
    outputs, targets = normal(N, C), normal(N, C)
    expected = _squared_errors(outputs, targets)
    column: Loss = lambda z, t: _squared_errors(z, t).unsqueeze(1)  # noqa: E731
    for loss in (_squared_errors, column):
        assert torch.equal(SampleLoss(loss).per_sample(outputs, targets, N), expected)
    assert SampleLoss(_squared_errors).normaliser(targets, N) == N
    bare = SampleLoss(nn.MSELoss(reduction="none"))
    assert torch.equal(bare.per_sample(outputs[:, 0], targets[:, 0], N), _squared(outputs, targets))


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets[:, 0]) ** 2


def test_a_mean_is_taken_apart_by_vmap() -> None:
    calls = list[int]()

    def loss(outputs: dict[str, Tensor], targets: tuple[Tensor]) -> Tensor:
        calls.append(1)
        return _squared_errors(outputs["z"], targets[0]).mean()

    outputs, targets = normal(N, C), normal(N, C)
    sample_loss = SampleLoss(loss)
    for _ in range(2):
        found, gradient = _differentiated(
            lambda z: sample_loss.per_sample({"z": z}, (targets,), N).sum(), outputs
        )
        assert float(found) == pytest.approx(float(_squared_errors(outputs, targets).sum()))
        torch.testing.assert_close(gradient, 2 * (outputs - targets))
    assert len(calls) == 3  # whole and vectorised, then vectorised alone: no loop
    per_sample = sample_loss.per_sample({"z": outputs}, (targets,), N)
    torch.testing.assert_close(per_sample, _squared_errors(outputs, targets))


def test_a_mean_that_cannot_be_vectorised_is_looped_over_with_one_warning() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if float(outputs.detach().sum()) > 1e9:  # no vmap over a decision by value
            return outputs.sum() * 0
        return _squared_errors(outputs, targets).mean()

    outputs, targets = normal(N, C), normal(N, C)
    sample_loss = SampleLoss(loss)
    with pytest.warns(UserWarning, match=r"loss returns a mean and cannot be vectorised.*slow"):
        found = sample_loss.per_sample(outputs, targets, N)
    torch.testing.assert_close(found, _squared_errors(outputs, targets))
    again = sample_loss.per_sample(outputs, targets, N)  # a second warning would be an error
    torch.testing.assert_close(again, found)


def test_a_mean_over_a_single_sample() -> None:
    loss = SampleLoss(lambda z, t: _squared_errors(z, t).mean())
    outputs, targets = normal(N, C), normal(N, C)
    torch.testing.assert_close(
        loss.per_sample(outputs[:1], targets[:1], 1), _squared_errors(outputs[:1], targets[:1])
    )
    torch.testing.assert_close(
        loss.per_sample(outputs, targets, N), _squared_errors(outputs, targets)
    )


def test_a_callable_without_a_hash_is_a_loss_too() -> None:
    @dataclass
    class Scaled:
        factor: float

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return self.factor * _squared_errors(outputs, targets)

    outputs, targets = normal(N, C), normal(N, C)
    found = SampleLoss(Scaled(3.0)).per_sample(outputs, targets, N)
    torch.testing.assert_close(found, 3 * _squared_errors(outputs, targets))


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        nn.CTCLoss(),
        nn.GaussianNLLLoss(),
        nn.TripletMarginLoss(),
        nn.CosineEmbeddingLoss(),
        nn.MarginRankingLoss(),
    ],
)
def test_losses_of_another_form_are_refused_by_name(loss: nn.Module) -> None:
    with pytest.raises(LossContractError, match=rf"`loss`: {type(loss).__name__} is not supported"):
        SampleLoss(loss)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`loss` must be callable.*'mse'"):
        SampleLoss("mse")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, t: ((z - t) ** 2).mean().sqrt(),
        lambda z, t: ((z - t) ** 2).sum(),
        lambda z, t: (z - t).mean() ** 2,
        lambda z, t: (z - z.mean(0)).square().mean(),
        lambda z, t: F.cross_entropy(z, t.argmax(1), WEIGHT),
        lambda z, t: F.cross_entropy(z, t.argmax(1), ignore_index=0),
    ],
    ids=["root", "sum", "square of the mean", "variance", "class weights", "ignored classes"],
)
def test_a_number_that_is_no_mean_over_samples_is_refused(loss: Loss) -> None:
    outputs, targets = normal(N, C), torch.eye(C, dtype=torch.float64).repeat(2, 1)
    with pytest.raises(LossContractError, match=r"`loss` returned .* not a mean over samples"):
        SampleLoss(loss).per_sample(outputs, targets, N)


def test_a_mean_that_is_not_finite_is_not_the_contracts_business() -> None:
    outputs = normal(N, C)
    outputs[2] = torch.nan
    loss = SampleLoss(lambda z, t: _squared_errors(z, t).mean())
    found = loss.per_sample(outputs, torch.zeros_like(outputs), N)
    assert found.isnan().tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (nn.MSELoss(reduction="none"), r"\(6, 3\)"),
        (lambda z, t: (z - t).sum(0), r"\(3,\)"),
        (lambda z, t: (z - t).reshape(-1), r"\(18,\)"),
        (lambda z, t: _squared_errors(z, t).unsqueeze(0), r"\(1, 6\)"),
    ],
)
def test_a_wrong_shape_is_refused(loss: Loss, shape: str) -> None:
    with pytest.raises(LossContractError, match=rf"`loss` returned shape {shape} for 6 samples"):
        SampleLoss(loss).per_sample(normal(N, C), normal(N, C), N)


@pytest.mark.parametrize("kind", PAIRWISE)
def test_shapes_that_torch_would_pair_each_with_every_one_are_refused(kind: Any) -> None:
    with pytest.raises(LossContractError, match=r"outputs have shape \(5, 1\) .*targets \(5,\)"):
        SampleLoss(kind()).per_sample(torch.rand(5, 1), torch.rand(5), 5)
    assert SampleLoss(kind()).per_sample(torch.rand(5, 1), torch.rand(5, 1), 5).shape == (5,)


def test_a_class_in_place_of_an_instance_is_named() -> None:
    forgotten: Any = nn.MSELoss
    with pytest.raises(TypeError, match=r"`loss` is a class: .*MSELoss\(\)"):
        SampleLoss(forgotten)


def test_a_result_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(LossContractError, match="`loss` must return a tensor, found float"):
        SampleLoss(lambda z, t: 1.0).per_sample(normal(N, C), normal(N, C), N)  # type: ignore[arg-type, return-value]


def test_outputs_without_a_batch_dimension_are_refused() -> None:
    with pytest.raises(LossContractError, match=r"`loss`: MSELoss gave shape \(3, 6\) for 6 sampl"):
        SampleLoss(nn.MSELoss()).per_sample(normal(C, N), normal(C, N), N)


@pytest.mark.parametrize(
    ("loss", "argument"),
    [
        (nn.BCELoss(uniform(N, C)), "weight"),
        (nn.BCEWithLogitsLoss(uniform(N, C)), "weight"),
        (nn.BCEWithLogitsLoss(uniform(N, 1)), "weight"),
        (nn.BCEWithLogitsLoss(pos_weight=uniform(N, C)), "pos_weight"),
    ],
)
@pytest.mark.parametrize("samples", [N, N - 1], ids=["all samples", "a part of them"])
def test_a_weight_per_sample_is_refused(loss: nn.Module, argument: str, samples: int) -> None:
    message = rf"`loss`: {type(loss).__name__} has a `{argument}` per sample"
    with pytest.raises(LossContractError, match=message):
        SampleLoss(loss).per_sample(uniform(samples, C), uniform(samples, C), samples)


def test_a_weight_per_sample_is_refused_by_a_step() -> None:
    optimizer = KSD(nn.Linear(3, 2), nn.BCEWithLogitsLoss(torch.rand(20, 2)))
    with pytest.raises(LossContractError, match="has a `weight` per sample"):
        optimizer.step((torch.rand(20, 3), torch.rand(20, 2)))


@pytest.mark.parametrize(
    "loss", [nn.BCEWithLogitsLoss(uniform(C)), nn.BCEWithLogitsLoss(pos_weight=uniform(C))]
)
def test_a_weight_per_output_is_torchs_own(loss: nn.Module) -> None:
    outputs, targets = normal(N, C), uniform(N, C)
    torch.testing.assert_close(_mean(SampleLoss(loss), outputs, targets), loss(outputs, targets))


# Curvature in the outputs -------------------------------------------------------------------------


def _dense_hessian(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    def total(flat: Tensor) -> Tensor:
        return function(flat.reshape(at.shape)).sum()

    found: Tensor = torch.func.jacrev(torch.func.grad(total))(at.reshape(-1))
    return found


def _product_as_matrix(loss: SampleLoss, outputs: Tensor, targets: Any) -> Tensor:
    product = loss.output_hessian(outputs, targets, N)
    rows = torch.eye(outputs.numel(), dtype=outputs.dtype).reshape(-1, *outputs.shape)
    return torch.stack([product([row])[0].reshape(-1) for row in rows])


# Torch has no second derivative of these two.
TWICE = [name for name in BY_NAME if name not in ("many classes", "many labels")]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", TWICE)
def test_output_hessian_equals_the_dense_one(name: str, reduction: str) -> None:
    maker, make_outputs, make_targets = BY_NAME[name]
    outputs, targets = make_outputs(), make_targets()
    loss = SampleLoss(maker(reduction=reduction))
    found = _product_as_matrix(loss, outputs, targets)
    expected = _dense_hessian(lambda z: loss.per_sample(z, targets, N), outputs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["mse", "mse-sum", "logistic", "cross-entropy"])
def test_closed_forms_are_found_without_autograd(name: str) -> None:
    problem = make("mlp", name)
    outputs = problem.model(problem.inputs).detach()
    with torch.inference_mode():  # autodiff would fail here
        found = SampleLoss(problem.loss).output_hessian(outputs, problem.case.targets, len(outputs))
        (image,) = found([torch.ones_like(outputs)])
    expected = dense.output_hessian(problem).sum(1) * problem.case.normaliser
    torch.testing.assert_close(image.clone().reshape(-1), expected, rtol=1e-12, atol=1e-14)


def test_output_hessian_of_nested_outputs_has_its_mixed_part() -> None:
    loss = SampleLoss(lambda z, _: (z[0] * z[1]["b"] ** 2).sum(1))
    a, b = normal(N, 2), normal(N, 2)
    product = loss.output_hessian((a, {"b": b}), None, N)
    u, v = normal(N, 2), normal(N, 2)
    found = product([u, v])
    torch.testing.assert_close(found, [2 * b * v, 2 * b * u + 2 * a * v])


def test_output_hessian_of_a_linear_loss_is_zero() -> None:
    product = SampleLoss(lambda z, _: z.sum(1)).output_hessian(normal(N, C), None, N)
    assert not product([normal(N, C)])[0].any()


def test_output_hessian_leaves_integer_outputs_alone() -> None:
    loss = SampleLoss(lambda z, _: (z[0] ** 2).sum(1) * z[1])
    outputs = (normal(N, C), torch.arange(N))
    (found,) = loss.output_hessian(outputs, None, N)([torch.ones(N, C, dtype=torch.float64)])
    assert torch.equal(found, 2.0 * torch.arange(N).double().unsqueeze(1).expand(N, C))


# The references themselves ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in ("mse-sum", "per-sample")])
@pytest.mark.parametrize("model", ["mlp", "sequence"])
def test_losses_by_hand_are_torchs_own(model: str, name: str) -> None:
    problem = make(model, name)
    own = problem.loss(problem.model(problem.inputs), problem.case.targets)
    assert dense.value(problem) == pytest.approx(float(own.detach()), rel=1e-13)

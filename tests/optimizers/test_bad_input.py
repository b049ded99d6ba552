"""Bad input: a clear error that names the argument, and parameters bit for bit as before."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from krylov_descent import KSD, Status
from krylov_descent.objective.losses import LossContractError
from tests.optimizers.unchanged import network, samples, unchanged

# Bad data -----------------------------------------------------------------------------------------


def rejects(data: Any, error: type[Exception], message: str, **sets: Any) -> None:
    optimizer = KSD(network(), nn.MSELoss(), dimension=3)
    optimizer.step(samples())
    with unchanged(optimizer), pytest.raises(error, match=message):
        optimizer.step(data, **sets)
    assert optimizer.step(samples()).status is Status.MOVED


def test_empty_data() -> None:
    x, y = samples()
    nobody = x[:0], y[:0]
    empties: tuple[Any, ...] = (nobody, [], iter([]), [nobody], TensorDataset(*nobody))
    for data in (*empties, DataLoader(TensorDataset(*nobody), batch_size=3)):
        rejects(data, ValueError, "`data` is empty")
    rejects((x, y), ValueError, "`curvature_data` is empty", curvature_data=nobody)
    rejects((x, y), ValueError, "`objective_data` is empty", objective_data=nobody)
    rejects((x, y), ValueError, "is empty", curvature_data=[nobody], objective_data=(x, y))
    rejects((x, y), ValueError, "is empty", curvature_data=(x, y), objective_data=[])


def test_an_empty_batch_among_others_is_passed_over() -> None:
    x, y = samples()
    optimizer = KSD(network(), nn.MSELoss(), dimension=3)
    assert optimizer.step([(x[:0], y[:0]), (x, y), (x[:0], y[:0])]).samples == 20


def test_inputs_and_targets_of_different_length() -> None:
    x, y = samples()
    message = "disagree on the number of samples .*: found 19 and 20"
    rejects((x, y[:19]), ValueError, message)
    rejects([(x, y), (x, y[:19])], ValueError, message)
    rejects((x, y), ValueError, message, objective_data=(x, y[:19]))


def test_data_of_a_wrong_kind() -> None:
    x, y = samples()
    rejects(x, TypeError, "`data` must be a tuple")
    rejects({"x": x}, TypeError, "`data` must be a tuple")
    rejects("data.csv", TypeError, "`data` must be a tuple")
    rejects((x, y, y), TypeError, "a batch must be a pair")
    rejects([x, y, y], TypeError, "a batch must be a pair")
    rejects((x, torch.tensor(1.0)), ValueError, "batch dimension")
    rejects((x, y), TypeError, "`curvature_data` must be a tuple", curvature_data=x)


# Bad models ---------------------------------------------------------------------------------------


def test_a_model_without_parameters() -> None:
    with pytest.raises(ValueError, match="`model` has no parameters"):
        KSD(nn.Tanh(), nn.MSELoss())
    frozen = network().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        KSD(frozen, nn.MSELoss())
    optimizer = KSD(network(), nn.MSELoss())
    optimizer.objective.network.model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        optimizer.step(samples())
    with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module"):
        KSD(lambda x: x, nn.MSELoss())  # type: ignore[arg-type]


def test_integer_parameters_are_left_alone() -> None:
    model = network()
    table = torch.arange(3)
    model.register_parameter("table", nn.Parameter(table.clone(), requires_grad=False))
    assert KSD(model, nn.MSELoss(), dimension=3).step(samples()).status is Status.MOVED
    assert torch.equal(model.get_parameter("table"), table)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_of_another_kind_of_number(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"must be float32 or float64, found .*torch.autocast"):
        KSD(network().to(dtype), nn.MSELoss())


def test_parameters_of_mixed_dtype() -> None:
    model = network()
    model[2].double()
    with pytest.raises(ValueError, match=r"must share one dtype, found .*model.to"):
        KSD(model, nn.MSELoss())


@pytest.mark.parametrize("part", ["all of it", "a frozen layer", "a buffer"])
def test_a_model_on_the_meta_device(part: str) -> None:
    model = network()
    if part == "all of it":
        model.to("meta")
    elif part == "a frozen layer":
        model[2].requires_grad_(False).to("meta")
    else:
        model.register_buffer("scale", torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match=r"`model` has tensors on the meta device.*to_empty"):
        KSD(model, nn.MSELoss())


def test_data_on_the_meta_device() -> None:
    x, y = samples()
    for data in ((x.to("meta"), y), (x, y.to("meta")), [(x, y), (x, y.to("meta"))]):
        rejects(data, ValueError, "on the meta device")


def test_a_tensor_given_twice() -> None:
    model = network()
    weight = next(model.parameters())
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(ValueError, match="the same tensor more than once"),
    ):
        KSD(model, nn.MSELoss(), [weight, weight])


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(3)])
def test_models_in_training_mode_are_refused(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 3), layer, nn.Linear(3, 2))
    optimizer, name = KSD(model, nn.MSELoss(), dimension=3), type(layer).__name__
    with unchanged(optimizer), pytest.raises(LossContractError, match=rf"{name}.*model.eval\(\)"):
        optimizer.step(samples())
    model.eval()
    assert optimizer.step(samples()).status is Status.MOVED
    model.train()
    with unchanged(optimizer), pytest.raises(LossContractError, match=name):
        optimizer.step(samples())


# Bad losses and options ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda z, t: (z - t) ** 2, r"returned shape \(8, 2\) for 8 samples"),
        (lambda z, t: ((z - t) ** 2).sum(), "not a mean over samples"),
        (lambda z, t: (z - t).square().mean(1) / (z - t).square().sum(), "samples are mixed"),
        (lambda z, t: (z - t).square().mean(1) * torch.rand(len(z)), "the objective is random"),
        (lambda z, t: 1.0, "must return a tensor, found float"),
    ],
)
def test_losses_outside_the_contract(loss: Callable[..., Any], message: str) -> None:
    optimizer = KSD(network(), loss, dimension=3)
    with unchanged(optimizer), pytest.raises(LossContractError, match=message):
        optimizer.step(samples())


def test_losses_that_are_none() -> None:
    with pytest.raises(TypeError, match="`loss` must be callable"):
        KSD(network(), "mse")  # type: ignore[arg-type]
    with pytest.raises(LossContractError, match="CTCLoss is not supported by name"):
        KSD(network(), nn.CTCLoss())
    detached = KSD(network(), lambda z, t: (z.detach() - t).square().mean(1))
    with unchanged(detached), pytest.raises(ValueError, match="does not depend on any trainable"):
        detached.step(samples())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dimension", 0),
        ("previous_steps", 0),
        ("curvature", "newton"),
        ("curvature", None),
        ("preconditioner", "jacobi"),
        ("preconditioner", object()),
        ("subset_size", 0),
        ("bfgs_iterations", 0),
        ("epsilon", 0.0),
        ("epsilon", 1.0),
        ("weight_decay", -0.1),
        ("weight_decay", math.nan),
        ("lr", -1.0),
        ("micro_batch", 0),
        ("activation_memory", 0),
    ],
)
def test_options_out_of_range_are_named(option: str, value: Any) -> None:
    choices = {option: value}
    with pytest.raises(ValueError, match=f"`{option}` must"):
        KSD(network(), nn.MSELoss(), **choices)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dimension", 2.5),
        ("dimension", True),
        ("previous_steps", 1.5),
        ("bfgs_iterations", 3.0),
        ("micro_batch", 1.5),
        ("seed", None),
        ("tf32", "yes"),
        ("cuda_graphs", "no"),
        ("forward", 3),
    ],
)
def test_options_of_another_kind_are_named(option: str, value: Any) -> None:
    choices = {option: value}
    with pytest.raises(TypeError, match=f"`{option}` must"):
        KSD(network(), nn.MSELoss(), **choices)


def test_texts_in_place_of_numbers_and_devices_are_named() -> None:
    for option, value in (
        ("weight_decay", "x"),
        ("lr", "fast"),
        ("basis_device", "nowhere"),
        ("dimension", "20"),
        ("bfgs_iterations", "many"),
    ):
        choices: Any = {option: value}
        with pytest.raises(ValueError, match=f"`{option}` must.*{value}"):
            KSD(network(), nn.MSELoss(), **choices)


def test_a_forward_pass_that_returns_nothing() -> None:
    optimizer = KSD(network(), nn.MSELoss(), forward=lambda model, x: None)
    with unchanged(optimizer), pytest.raises(TypeError, match="returned None"):
        optimizer.step(samples())


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    optimizer = KSD(model, nn.MSELoss())
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step((torch.randint(5, (20, 2)), torch.randn(20, 2)))


def test_a_set_for_the_curvature_that_the_model_cannot_take() -> None:
    x, y = samples()
    # Told as the model tells it, and not as a missing derivative.
    rejects((x, y), RuntimeError, "shapes cannot be multiplied", curvature_data=(x[:, :2], y))


@pytest.mark.parametrize("epsilon", ["1e-4", None, 0, 1.0])
def test_an_epsilon_that_is_none(epsilon: Any) -> None:
    with pytest.raises(ValueError, match="`epsilon` must"):
        KSD(network(), nn.MSELoss(), epsilon=epsilon)

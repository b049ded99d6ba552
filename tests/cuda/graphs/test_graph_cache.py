"""What recordings are known by, where they are kept, and what becomes of parts that fail."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent.cuda.engine import RecordingEngine
from krylov_descent.cuda.graphs.staleness import PULSE
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network
from krylov_descent.runtime.ops import operations
from tests.engines import RECORDING, device_of, objective_on


class Scaled(nn.Module):
    """A net with a buffer, whose first weight is used twice."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(torch.tanh(self.first(x))))
        result: Tensor = self.scale * self.last(hidden)
        return result


def case(engine: str, loss: Any = None) -> tuple[Scaled, RecordingEngine, Batch]:
    device = device_of(engine)
    model = Scaled().to(device)
    batch = Batch(torch.randn(12, 5).to(device), torch.rand(12, 3).to(device), 12)
    found = objective_on(engine, model, loss or nn.CrossEntropyLoss()).engine
    assert isinstance(found, RecordingEngine)
    return model, found, batch


def losses_of(network: Network, batch: Batch, *given: Tensor) -> Tensor:
    losses = network.sample_losses(batch, eager=True).detach()
    return sum(given, start=losses)


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("in_step", [True, False])
def test_tensors_that_move_are_seen_within_a_step_too(in_step: bool, engine: str) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(3).to(device_of(engine)))
    model, recorder, batch = case(engine, loss)
    held = []  # so that the places of old tensors are not given away again

    def parameter() -> None:
        held.append(model.first.weight.data)
        model.first.weight.data = model.first.weight.data * 2

    def buffer() -> None:
        held.append(model.scale)
        model.scale = model.scale * 2

    def class_weights() -> None:
        assert loss.weight is not None
        held.append(loss.weight)
        loss.weight = loss.weight * torch.tensor([1.0, 2.0, 3.0]).to(batch.inputs)

    with recorder.step() if in_step else nullcontext():
        changes: list[Callable[[], None]] = [parameter, buffer, class_weights]
        for change in (None, *changes):
            if change is not None:
                change()
            for is_new in (True, False):
                recording = recorder.graphs.load("part", losses_of, batch)
                assert recording is not None
                assert recorder.graphs.loaded_is_new == is_new
                expected = recorder.objective.network.sample_losses(batch).detach()
                torch.testing.assert_close(recording(), expected)


@pytest.mark.parametrize("engine", RECORDING)
def test_what_is_given_is_copied_and_numbers_are_known(engine: str) -> None:
    _, recorder, batch = case(engine)
    graphs, one = recorder.graphs, torch.ones(12).to(batch.inputs)
    plain = recorder.objective.network.sample_losses(batch).detach()
    new = []
    for given, numbers in ((one, (1.0,)), (2 * one, (1.0,)), (3 * one, (2.0,))):
        recording = graphs.load("part", losses_of, batch, given, numbers=numbers)
        assert recording is not None
        new.append(graphs.loaded_is_new)
        torch.testing.assert_close(recording(), plain + given)
        beside = graphs.beside(recording, "beside", losses_of)
        assert beside is not None
        torch.testing.assert_close(beside(), plain + given)
    assert new == [True, False, True]


@pytest.mark.parametrize("engine", RECORDING)
def test_a_batch_is_read_where_it_is_while_it_stays_there(engine: str) -> None:
    _, recorder, batch = case(engine)
    other = batch.map(lambda tensor: 2 * tensor)
    in_place = []
    for given in (batch, batch, other, batch, other):
        recording = recorder.graphs.load("part", losses_of, given, where_it_is=True)
        assert recording is not None
        in_place.append(recording.batch.inputs is given.inputs)
        expected = recorder.objective.network.sample_losses(given).detach()
        torch.testing.assert_close(recording(), expected)
    assert in_place == [True, True, False, False, False]


@pytest.mark.parametrize("engine", RECORDING)
def test_room_is_the_same_until_something_else_is_asked_for(engine: str) -> None:
    _, recorder, batch = case(engine)
    graphs, like = recorder.graphs, torch.empty(7).to(batch.inputs)
    room = graphs.room(2, 3, like)
    assert room.slots.shape == (3, 7)
    assert not room.slots.any()
    assert graphs.room(2, 3, torch.ones_like(like)) is room
    graphs.forget()
    assert graphs.room(3, 12, like) is room  # they fit
    assert graphs.room(1, 1, like) is room  # hardly any memory is wasted
    assert copy.deepcopy(graphs).room(2, 3, like) is not room
    double = graphs.room(2, 3, like.double())
    assert (double.slots.shape, double.slots.dtype) == ((3, 7), torch.float64)
    larger = graphs.room(4, 2, like.double())
    assert len(larger.slots) == 4
    graphs.room(40, 0, like)
    assert len(graphs.room(2, 3, like).slots) == 3
    graphs.clear()
    assert graphs.room(2, 3, like) is not room


@pytest.mark.parametrize("engine", RECORDING)
def test_rows_of_a_room_are_counted(engine: str) -> None:
    _, recorder, batch = case(engine)
    room = recorder.graphs.room(2, 3, torch.empty(7).to(batch.inputs))
    room.slots.fill_(1)
    for rows in (2, 3, 1):
        room.fill(rows)
        found = operations().project(room.slots, room.slots[0], room.filled)
        assert found.tolist() == [7] * rows + [0] * (3 - rows)


@pytest.mark.parametrize("engine", RECORDING)
def test_another_preconditioner_leaves_the_search_and_its_witnesses(engine: str) -> None:
    _, recorder, batch = case(engine)
    names = ["gradient", "basis of hessian", "evaluation", "noise", "step", f"{PULSE} in tf32"]
    for name in names:
        recorder.graphs.load(name, losses_of, batch)
    assert recorder.graphs.names == names
    recorder.change_basis()
    assert recorder.graphs.names == names[2:]
    recorder.clear()
    assert recorder.graphs.names == []


@pytest.mark.parametrize("engine", RECORDING)
def test_what_cannot_be_recorded_is_said_once_and_not_tried_again(engine: str) -> None:
    _, recorder, batch = case(engine)
    graphs, tries = recorder.graphs, list[int]()

    def reading(network: Network, batch: Batch) -> Tensor:
        tries.append(1)
        losses = losses_of(network, batch)
        return losses * float(losses.sum())

    with pytest.warns(UserWarning, match="cannot be recorded as a CUDA graph"):
        assert graphs.load("part", reading, batch) is None
    tried = len(tries)
    assert graphs.load("part", reading, batch) is None
    assert len(tries) == tried
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert graphs.load("another", reading, batch) is None
        assert graphs.load("possible", losses_of, batch) is not None
    assert len(tries) > tried
    assert graphs.names == ["possible"]


@pytest.mark.parametrize("engine", RECORDING)
def test_want_of_memory_is_not_taken_for_a_model_that_cannot_be_recorded(engine: str) -> None:
    _, recorder, batch = case(engine)

    def too_large(network: Network, batch: Batch) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        recorder.graphs.load("part", too_large, batch)
    assert recorder.graphs.load("part", losses_of, batch) is not None


@pytest.mark.parametrize("engine", RECORDING)
def test_a_weight_that_is_held_outside_of_the_modules_is_not_recorded(engine: str) -> None:
    """Its alias would be another tensor for autograd: the gradient would lack a part."""
    model = Scaled().to(device_of(engine))
    held = [model.first.weight]

    def penalised(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean(1) + held[0].square().sum()

    objective = objective_on(engine, model, penalised)
    _, _, batch = case(engine)
    data = batch.inputs, batch.targets
    first = objective.value_and_gradient(data)
    with pytest.warns(UserWarning, match="holds 'first.weight' itself"):
        second = objective.value_and_gradient(data)
    torch.testing.assert_close(second.gradient, first.gradient)

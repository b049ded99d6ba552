"""What a recording is known by, and losses at a point that the parameters are not moved to."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from krylov_descent import Objective
from krylov_descent.cuda.graphs.capture import Part
from krylov_descent.cuda.graphs.staleness import Recordings
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network


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


def twelve() -> Batch:
    torch.manual_seed(1)
    return Batch(torch.randn(12, 5), torch.randn(12, 3), 12)


@pytest.mark.parametrize("in_step", [True, False])
def test_tensors_that_move_are_seen_within_a_step_too(in_step: bool) -> None:
    model, batch = Scaled(), twelve()
    recordings = Objective(model, nn.MSELoss()).recordings

    with recordings.step() if in_step else nullcontext():
        keys = [recordings._key(batch, (), ())]
        old = model.first.weight.data
        model.first.weight.data = old.clone()
        keys.append(recordings._key(batch, (), ()))
        before, model.scale = model.scale, model.scale.clone()
        keys.append(recordings._key(batch, (), ()))
        assert keys[-1] == recordings._key(batch, (), ())
    assert len(set(keys)) == 3
    del old, before  # held so far, so that their places were not given away again


def test_the_tensors_of_a_loss_are_seen_too() -> None:
    loss, batch = nn.CrossEntropyLoss(weight=torch.ones(3)), twelve()
    recordings = Objective(Scaled(), loss).recordings
    before = recordings._key(batch, (), ())
    old, loss.weight = loss.weight, torch.full((3,), 2.0)
    assert recordings._key(batch, (), ()) != before
    del old


def test_room_is_the_same_until_something_else_is_asked_for() -> None:
    recordings = Objective(Scaled(), nn.MSELoss()).recordings
    room = recordings.room(3, torch.empty(7))
    assert room.shape == (3, 7)
    assert recordings.room(3, torch.ones(7)) is room
    assert copy.deepcopy(recordings).room(3, torch.empty(7)) is not room
    double = recordings.room(3, torch.empty(7).double())
    assert (double.shape, double.dtype) == ((3, 7), torch.float64)
    recordings.clear()
    assert recordings.room(3, torch.empty(7).double()) is not double


def test_pulses_stay_with_what_they_tell_of() -> None:
    recordings = Objective(Scaled(), nn.MSELoss()).recordings
    names = ("gradient", "evaluation", "noise", "pulse in ('none', 'none')")
    recordings._held = {name: ((), name) for name in names}
    recordings.release(but=("evaluation",))
    assert recordings._held.keys() == {"evaluation", "pulse in ('none', 'none')"}


def test_a_job_for_the_meanwhile_is_there_for_a_while() -> None:
    recordings = Objective(Scaled(), nn.MSELoss()).recordings
    done: list[str] = []

    def job() -> None:
        done.append("job")
        raise KeyError

    recordings.work_meanwhile()
    with recordings.meanwhile(job):
        copy.deepcopy(recordings).work_meanwhile()  # which has no share in it
    assert not done
    with pytest.raises(KeyError), recordings.meanwhile(job):
        recordings.work_meanwhile()
    recordings.work_meanwhile()
    assert done == ["job"]


def test_losses_at_a_point_are_those_of_parameters_moved_there() -> None:
    model, batch = Scaled(), twelve()
    network = Objective(model, nn.MSELoss()).network
    parameters = network.parameters
    start = parameters.copy()
    point = start + 0.1 * torch.randn_like(start)
    found = network.losses_at(point, batch)
    assert torch.equal(parameters.copy(), start)
    here = network.sample_losses(batch)
    parameters.assign(point)
    torch.testing.assert_close(found, network.sample_losses(batch))
    assert not torch.allclose(found, here)


def test_a_forward_pass_may_differentiate_towards_parameters_at_a_point() -> None:
    class TowardsItself(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(self.last.bias.square().sum(), self.last.bias)
            return super().forward(x) - slope

    network = Objective(TowardsItself(), nn.MSELoss()).network
    point = network.parameters.copy()
    torch.testing.assert_close(network.losses_at(point, twelve()), network.sample_losses(twelve()))


def test_a_batch_is_read_where_it_is_while_it_stays_there() -> None:
    recordings = Objective(Scaled(), nn.MSELoss()).recordings
    first, second = twelve(), twelve()
    found = [recordings._stays("gradient", batch) for batch in (first, first, second, first)]
    assert found == [True, True, False, False]
    assert recordings._stays("other", second)


class Remembered:
    """In place of a recording: what the part returned when it was made."""

    def __init__(self, network: Network, part: Part, batch: Batch, *_: Any) -> None:
        self.result: Tensor = part(network, batch)

    def load(self, *_: Any) -> None:
        """It reads nothing."""

    def __call__(self) -> Tensor:
        return self.result


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("krylov_descent.cuda.graphs.graph_cache.Recording", Remembered)
    monkeypatch.setattr(Recordings, "possible", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


@pytest.mark.usefixtures("remembering")
def test_a_new_recording_is_no_witness_for_older_ones() -> None:
    model, batch = nn.Sequential(nn.Linear(5, 3), nn.Tanh()), twelve()
    recordings = Objective(model, nn.MSELoss()).recordings

    def gradient(network: Network, batch: Batch) -> Tensor:
        return network.sample_losses(batch).detach()

    def holds(batch: Batch) -> bool:
        recording = recordings.load("gradient", gradient, batch, where_it_is=True)
        assert recording is not None
        return recordings.hold(batch, recording()[:8])

    assert recordings.hold(batch)  # with the first one
    assert holds(batch)
    model[1] = nn.ReLU()
    assert not holds(twelve())  # which is elsewhere, and recorded anew
    assert recordings.refuted == 1
    assert not recordings._held
    assert holds(batch)
    model[1] = nn.Sigmoid()
    assert not holds(batch)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler
def test_a_stack_is_plain_where_nothing_but_torchs_own_is_called() -> None:
    def plain(model: nn.Module, loss: nn.Module | None = None) -> bool:
        return Objective(model, loss or nn.MSELoss()).network.is_plain

    def stack() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 3)))

    assert plain(stack())
    assert plain(nn.Linear(5, 3), nn.CrossEntropyLoss(label_smoothing=0.1))
    assert not plain(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)))
    assert not plain(Scaled())

    forward, before, back, replaced, compiled = (stack() for _ in range(5))
    forward[0].register_forward_hook(lambda module, given, found: found - found.mean(0))
    before[1].register_forward_pre_hook(lambda module, given: None)
    back[0].register_full_backward_hook(lambda module, towards, given: None)
    replaced[0].forward = replaced[0].forward
    compiled.compile(backend="eager")
    for other in (forward, before, back, replaced, compiled, torch.compile(stack())):
        assert isinstance(other, nn.Module)
        assert not plain(other)

    loss = nn.MSELoss()
    loss.register_forward_hook(lambda module, given, found: None)
    assert not plain(stack(), loss)
    everywhere = register_module_forward_hook(lambda module, given, found: None)
    try:
        assert not plain(stack())
    finally:
        everywhere.remove()

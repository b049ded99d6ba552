"""Whether recordings are what a model computes is found out from a few samples of each step."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent.cuda.engine import RecordingEngine
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network
from krylov_descent.runtime.engine import StaleError
from krylov_descent.runtime.precision import derivatives_in_tf32
from tests.engines import RECORDING, device_of, objective_on
from tests.optimizers.nets import net


class Scaled(nn.Module):
    """A net with a number that no recording knows of, and a use of a weight that adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale, self.reused = net(torch.float64), 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.scale * self.net(x)
        if self.reused:
            outputs = outputs + 0 * next(self.net.parameters()).sum()
        return outputs


def case(engine: str, loss: Any = None) -> tuple[Scaled, RecordingEngine, Batch]:
    """A model, its engine, and a batch that the engine has made a recording for."""
    model, device = Scaled().to(device_of(engine)), device_of(engine)
    objective = objective_on(engine, model, loss or nn.MSELoss())
    inputs = torch.randn(12, 4, dtype=torch.float64).to(device)
    batch = Batch(inputs, inputs[:, :3].sin(), 12)
    found = objective.engine
    assert isinstance(found, RecordingEngine)
    record(found, batch)
    assert found.are_fresh(batch)
    return model, found, batch


def record(engine: RecordingEngine, batch: Batch) -> Tensor:
    """Losses of a batch by a recording."""

    def losses(network: Network, batch: Batch) -> Tensor:
        return network.sample_losses(batch, eager=True).detach()

    recording = engine.graphs.load("part", losses, batch)
    assert recording is not None
    found: Tensor = recording()
    return found


CHANGES: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing": ({}, True),
    "a number by little": ({"scale": 1 + 1e-5}, True),
    "a number": ({"scale": 1.1}, False),
    "the graph alone": ({"reused": True}, False),
}


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("in_step", [False, True])
def test_a_change_makes_recordings_stale(in_step: bool, change: str, engine: str) -> None:
    model, recorder, batch = case(engine)
    attributes, fresh = CHANGES[change]
    vars(model).update(attributes)
    with recorder.step() if in_step else nullcontext():
        assert recorder.are_fresh(batch) == fresh
        assert recorder.graphs.has("part") == fresh  # what is stale is let go
        record(recorder, batch)
        assert recorder.are_fresh(batch)
    assert recorder.staleness.times_stale == (not fresh)


@pytest.mark.parametrize("engine", RECORDING)
def test_the_model_is_looked_at_once_in_a_step_for_each_precision(engine: str) -> None:
    """Outside of steps at each use."""
    model, recorder, batch = case(engine)
    with derivatives_in_tf32(True):
        recorder.are_fresh(batch)  # has recorded what it compares with by now
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        calls.clear()
        with recorder.step():
            assert all(recorder.are_fresh(batch) for _ in range(3))
            with derivatives_in_tf32(True):
                assert all(recorder.are_fresh(batch) for _ in range(3))
        assert len(calls) == 2
    assert all(recorder.are_fresh(batch) for _ in range(3))
    assert len(calls) == 5


@pytest.mark.parametrize("engine", RECORDING)
def test_a_step_that_can_be_made_again_is_trusted_until_it_is_verified(engine: str) -> None:
    model, recorder, batch = case(engine)
    model.scale = 2.0
    for repeatable in (True, False):
        with recorder.step():
            recorder.repeatable = repeatable
            assert recorder.are_fresh(batch) == repeatable
            assert recorder.graphs.has("part") == repeatable
            with pytest.raises(StaleError) if repeatable else nullcontext():
                recorder.verify()
            assert not recorder.repeatable
        assert not recorder.open_search
    assert recorder.staleness.times_stale == 2
    assert not recorder.graphs.has("part")


def counted(outputs: Tensor, targets: Tensor) -> Tensor:
    """Zero for negative targets."""
    return (outputs - targets).square().mean(1) * (targets[:, 0] >= 0)


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("bad", [-1.0, torch.nan, torch.inf])
def test_losses_that_tell_nothing_leave_the_question_to_other_samples(
    bad: float, engine: str
) -> None:
    model, recorder, batch = case(engine, counted)
    silent = Batch(batch.inputs, torch.full_like(batch.targets, bad), 12)
    telling = Batch(batch.inputs, torch.ones_like(batch.targets), 12)
    model.scale = 2.0
    with recorder.step():
        recorder.repeatable = True
        assert recorder.are_fresh(silent)
        recorder.verify()
        with pytest.raises(StaleError):  # what the first batch was taken for may be wrong
            recorder.are_fresh(telling)
    with recorder.step():
        recorder.repeatable = True
        assert recorder.are_fresh(silent)
        assert recorder.are_fresh(telling)
        with pytest.raises(StaleError):
            recorder.verify()
    with recorder.step():
        assert recorder.are_fresh(silent)
        assert not recorder.are_fresh(telling)
    assert recorder.are_fresh(telling)  # nothing is left of the steps


@pytest.mark.parametrize("engine", RECORDING)
def test_a_new_recording_is_no_witness_for_older_ones(engine: str) -> None:
    model, recorder, batch = case(engine)
    elsewhere = batch.rows(0, 10)  # of another size, and so recorded anew
    model.scale = 2.0
    losses = record(recorder, elsewhere)
    assert recorder.graphs.loaded_is_new
    assert not recorder.are_fresh(elsewhere, losses[:8])
    assert recorder.staleness.times_stale == 1
    # One that was there before is.
    record(recorder, batch)
    losses = record(recorder, batch)
    assert recorder.are_fresh(batch, losses[:8])
    model.scale = 3.0
    assert not recorder.are_fresh(batch, record(recorder, batch)[:8])

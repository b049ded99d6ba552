"""What is run once before it is recorded as a CUDA graph, and what is left of a failure."""

import gc

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, FisherDiagonal, Objective
from krylov_descent.cuda.engine import CudaEngine
from krylov_descent.cuda.graphs.capture import is_on_tensor_cores
from krylov_descent.cuda.triton import launching
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network
from tests.engines import engine_of
from tests.optimizers.nets import classes, net

pytestmark = pytest.mark.gpu

MEBIBYTE = 1 << 20


def small_batch() -> Batch:
    inputs, targets = classes(60)
    return Batch(inputs.cuda(), targets.cuda(), 60)


def wide_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 400)).cuda()


@pytest.fixture
def tensor_cores() -> None:
    if not is_on_tensor_cores(Objective(wide_net(), nn.MSELoss()).network):
        pytest.skip("needs tensor cores")


def test_where_a_rehearsal_is_not_enough_the_part_itself_is_run_first() -> None:
    """As if a library had to set itself up for a size that the rehearsal does not have."""
    objective, ran = Objective(net().cuda(), nn.CrossEntropyLoss()), list[str]()

    def part(network: Network, batch: Batch) -> Tensor:
        losses = network.sample_losses(batch, eager=True).detach()
        recording = torch.cuda.is_current_stream_capturing()
        if recording and "before" not in ran:
            raise RuntimeError("not set up")
        ran.append("recorded" if recording else "before")
        return losses

    batch = small_batch()
    recording = CudaEngine(objective).graphs.load(
        "part", part, batch, rehearsal=lambda network, batch: ran.append("rehearsal")
    )
    assert ran == ["rehearsal", "before", "recorded"]
    assert recording is not None
    torch.testing.assert_close(recording(), objective.network.sample_losses(batch).detach())


@pytest.mark.usefixtures("tensor_cores")
def test_what_is_known_as_a_whole_is_recorded_without_a_rehearsal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where tensor cores are; but for kernels that are still to be loaded."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = wide_net()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.net(x)
            return result

    inputs = torch.rand(300, 400, device="cuda")
    batch = Batch(inputs, inputs, len(inputs))

    def recorded(model: nn.Module) -> list[bool]:
        objective, ran = Objective(model, nn.MSELoss()), list[bool]()

        def part(network: Network, batch: Batch) -> Tensor:
            ran.append(torch.cuda.is_current_stream_capturing())
            return network.sample_losses(batch, eager=True).detach()

        recording = CudaEngine(objective).graphs.load("part", part, batch)
        assert recording is not None
        expected = objective.network.sample_losses(batch).detach()
        torch.testing.assert_close(recording(), expected, rtol=1e-4, atol=1e-6)
        torch.rand(3, device="cuda")  # which a recording that has not ended would not allow
        return ran

    recorded(wide_net())
    assert recorded(wide_net()) == [True]
    assert recorded(Other()) == [False, True]
    monkeypatch.setattr(launching, "_compiled", {})
    assert recorded(wide_net()) == [False, True]  # after one that ended before it began


@pytest.mark.usefixtures("tensor_cores")
def test_what_is_not_the_librarys_own_is_rehearsed() -> None:
    """A preconditioner may make something when it is first used."""

    class Counted(FisherDiagonal):
        def __init__(self) -> None:
            super().__init__(1e-4)
            self.solved: list[bool] = []

        def solve(self, vector: Tensor) -> Tensor:
            self.solved.append(torch.cuda.is_current_stream_capturing())
            return super().solve(vector)

    D = Counted()
    optimizer = KSD(wide_net(), nn.MSELoss(), dimension=4, previous_steps=1, preconditioner=D)
    inputs = torch.rand(300, 400, device="cuda")
    optimizer.step((inputs, inputs))
    assert engine_of(optimizer).graphs.has("basis of gauss-newton")
    assert not D.solved[0]
    assert D.solved[-1]


def fail_to_record(engine: CudaEngine, batch: Batch) -> None:
    def part(network: Network, batch: Batch) -> Tensor:
        losses = network.sample_losses(batch, eager=True).detach()
        return losses * float(losses.sum())

    with pytest.warns(UserWarning, match="cannot be recorded"):
        assert engine.graphs.load("part", part, batch) is None


def some_engine() -> CudaEngine:
    return CudaEngine(Objective(net().cuda(), nn.CrossEntropyLoss()))


def test_what_cannot_be_recorded_leaves_memory_as_it_was() -> None:
    fail_to_record(some_engine(), small_batch())
    spare = torch.empty(1 << 26, device="cuda")
    before = torch.cuda.memory_reserved()
    del spare
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before - (1 << 28)


def test_what_cannot_be_recorded_leaves_random_numbers_as_they_were() -> None:
    engine, batch = some_engine(), small_batch()
    torch.manual_seed(3)
    expected = torch.rand(4, device="cuda")
    torch.manual_seed(3)
    fail_to_record(engine, batch)
    torch.testing.assert_close(torch.rand(4, device="cuda"), expected)


def test_a_recording_that_runs_out_of_memory_is_ended() -> None:
    """CUDA ends it without torch's knowledge, and there may be no memory for anything else."""

    def part(network: Network, batch: Batch) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 50, device="cuda")
        return network.sample_losses(batch, eager=True).detach()

    engine, batch = some_engine(), small_batch()
    with pytest.raises(torch.OutOfMemoryError):
        engine.graphs.load("part", part, batch)
    torch.testing.assert_close(torch.ones(3, device="cuda").sum().item(), 3.0)
    torch.rand(3, device="cuda")


def test_an_optimizer_gives_its_memory_back_when_nobody_uses_it() -> None:
    """At once: the garbage collector does not know how much memory a recording has."""

    def train() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 20)).cuda()
        inputs = torch.rand(3000, 20, device="cuda")
        optimizer = KSD(model, nn.MSELoss())
        for _ in range(3):
            optimizer.step((inputs, inputs))

    train()  # libraries take memory at first
    gc.collect()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        train()
        assert torch.cuda.memory_allocated() <= before + MEBIBYTE  # recordings have several
    finally:
        gc.enable()

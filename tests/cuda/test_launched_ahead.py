"""What a GPU is told to do before it is known what came of the last thing changes nothing else."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Objective
from krylov_descent.algorithms.subspace import LaunchedSubspace
from krylov_descent.cuda.graphs.capture import Recording
from krylov_descent.cuda.graphs.host_transfer import OnTheWay
from krylov_descent.cuda.graphs.staleness import Recordings
from krylov_descent.objective.subsets import draw
from krylov_descent.optimizers.base import DataOptimizer
from krylov_descent.optimizers.result import Status
from tests.cuda.test_recordings import Scaled, samples, small_net, towards_numbers, with_factors

pytestmark = pytest.mark.gpu


def test_sets_are_drawn_while_the_gpu_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    launch = Recording.__call__

    def noted_launch(recording: Recording) -> Any:
        order.append("launched")
        return launch(recording)

    def noted_draw(*args: Any) -> Any:
        order.append("draw")
        return draw(*args)

    monkeypatch.setattr(Recording, "__call__", noted_launch)
    monkeypatch.setattr("krylov_descent.optimizers.ksd.ksd.draw", noted_draw)
    optimizer, data = KSD(small_net(), nn.CrossEntropyLoss()), samples(200)
    for _ in range(3):
        order.clear()
        optimizer.step(data)
    # Gradient and pulse; the sets; the basis.
    assert order[:4] == ["launched", "launched", "draw", "launched"]


AHEAD = [KSD, partial(KSD, preconditioner="identity"), with_factors(after=0)]


def third_step(
    monkeypatch: pytest.MonkeyPatch, noted: dict[str, tuple[type, str]]
) -> tuple[KSD, list[str]]:
    """In which order the methods of these classes are called, each by a word of its own."""
    order: list[str] = []

    def noting(word: str, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def called(of: Any) -> Any:
            order.append(word)
            return method(of)

        return called

    for word, (kind, name) in noted.items():
        monkeypatch.setattr(kind, name, noting(word, getattr(kind, name)))
    optimizer, data = KSD(small_net(torch.float64), nn.MSELoss()), towards_numbers()
    for _ in range(3):
        order.clear()
        optimizer.step(data)
    return optimizer, order


def test_the_basis_is_launched_before_the_gradient_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = {
        "launched": (Recording, "__call__"),
        "asked": (Recordings, "answer"),
        "read": (OnTheWay, "read"),
    }
    _, order = third_step(monkeypatch, noted)
    # Gradient, pulse, basis; whether they hold, f with ‖g‖. What follows is the search.
    assert order[:6] == ["launched"] * 3 + ["asked", "read", "read"]


def test_the_search_begins_before_the_basis_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = {"launched": (Recording, "__call__"), "there": (LaunchedSubspace, "there")}
    optimizer, order = third_step(monkeypatch, noted)
    # Gradient, pulse, basis, the evaluation at θ and the noise there; further evaluations.
    assert order[:6] == ["launched"] * 5 + ["there"]
    assert set(order[6:]) == {"launched"}
    held = optimizer.objective.recordings._held
    assert held["noise"][1].batch is held["evaluation"][1].batch


def test_each_evaluation_is_launched_once_on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the first trial ahead, and not again when the search asks for it."""
    torch.manual_seed(1)
    layers = [nn.Linear(400, 200), nn.Sigmoid(), nn.Linear(200, 30), nn.Sigmoid()]
    net = nn.Sequential(*layers, nn.Linear(30, 200), nn.Sigmoid(), nn.Linear(200, 400)).cuda()
    images = torch.rand(1000, 400, generator=torch.Generator().manual_seed(2)).cuda()
    optimizer = KSD(net, nn.BCEWithLogitsLoss(), dimension=8)
    optimizer.step((images, images))
    launches: list[Recording] = []
    replay = Recording.__call__

    def noted(recording: Recording) -> Any:
        launches.append(recording)
        return replay(recording)

    monkeypatch.setattr(Recording, "__call__", noted)
    steps = [optimizer.step((images, images)) for _ in range(6)]
    assert all(step.status.moved for step in steps)
    evaluation = optimizer.objective.recordings._held["evaluation"][1]
    assert launches.count(evaluation) == sum(step.evaluations for step in steps)


@pytest.mark.parametrize("options", [{}, {"lr": 0.5}])
def test_the_step_that_is_kept_is_the_one_that_was_taken(options: dict[str, Any]) -> None:
    """By a recording, or around it."""
    net = small_net(torch.float64)
    optimizer = KSD(net, nn.CrossEntropyLoss(), **options)
    for _ in range(4):
        before = [p.detach().clone() for p in net.parameters()]
        result = optimizer.step(samples(200, torch.float64))
        kept = [optimizer.state[p]["previous_step"] for p in net.parameters()]
        for p, old, step in zip(net.parameters(), before, kept, strict=True):
            torch.testing.assert_close(p.detach(), old + step, rtol=0, atol=1e-15)
        norm = float(torch.cat([step.reshape(-1) for step in kept]).norm())
        assert result.step_norm == pytest.approx(norm, rel=1e-12)


def test_a_search_that_noise_ends_leaves_the_parameters_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though an evaluation was launched that nobody asked for, and may be under way still."""
    net = small_net(torch.float64)
    optimizer = KSD(net, nn.CrossEntropyLoss())
    for _ in range(2):
        optimizer.step(samples(200, torch.float64))
    before = [p.detach().clone() for p in net.parameters()]
    with monkeypatch.context() as patched:
        patched.setattr(
            "krylov_descent.optimizers.ksd.search_objective.noise_from", lambda sums: 1e30
        )
        for _ in range(3):
            result = optimizer.step(samples(200, torch.float64))
            assert (result.status, result.evaluations) == (Status.NO_DECREASE, 1)
            for p, old in zip(net.parameters(), before, strict=True):
                assert torch.equal(p, old)
    assert optimizer.step(samples(200, torch.float64)).status.moved


@pytest.mark.parametrize("options", [{}, {"lr": 0.5}, {"weight_decay": 0.1}])
def test_a_search_that_begins_before_directions_are_known_to_vanish(options: Any) -> None:
    """The curvature is the identity, and the Krylov space the gradient: four rows of one."""
    inputs, generator = 2 * torch.eye(4, device="cuda").double(), torch.Generator().manual_seed(0)
    targets = [torch.randn(4, 1, generator=generator).to(inputs) for _ in range(6)]
    runs = []
    for recorded in (True, False):
        torch.manual_seed(3)
        model = nn.Linear(4, 1, bias=False, device="cuda", dtype=torch.float64)
        optimizer = KSD(
            model, nn.MSELoss(), preconditioner="identity", cuda_graphs=recorded, **options
        )
        runs.append([optimizer.step((inputs, aims)) for aims in targets])
    assert [step.rank for step in runs[0][:4]] == [1, 2, 3, 4]
    for ours, theirs in zip(*runs, strict=True):
        assert ours.status is theirs.status is Status.MOVED
        assert ours.rank == theirs.rank
        assert ours.loss_before == pytest.approx(theirs.loss_before, rel=1e-9)
        assert ours.loss_after == pytest.approx(theirs.loss_after, rel=1e-6, abs=1e-12)
        assert ours.step_norm == pytest.approx(theirs.step_norm, rel=1e-6)


class Powers(nn.Module):
    """A sum of p and p^1.5, of which the second derivative at 0 is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor([-0.0, 0.0, 0.5], device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x * (self.p + self.p.pow(1.5))
        return result


def test_a_search_that_begins_in_vain_leaves_the_parameters_bit_for_bit() -> None:
    model = Powers()
    before = model.p.detach().clone()
    optimizer = KSD(model, lambda outputs, _: outputs.sum(1), curvature="hessian")
    for _ in range(3):
        result = optimizer.step((torch.ones(4, 3, device="cuda"), None))
        assert "a curvature product on B is not finite" in result.reason
        assert result.evaluations == 0
        assert torch.equal(model.p.view(torch.int32), before.view(torch.int32))
    assert "evaluation" in optimizer.objective.recordings._held


class Absolute(nn.Module):
    """A net with |wx| of the first input, whose derivative at 0 is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net(torch.float64)
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x) + (self.weight * x[:, :1]).square().sqrt()
        return result


@pytest.mark.parametrize("method", AHEAD)
@pytest.mark.parametrize("which", ["loss", "gradient"])
def test_a_basis_that_was_launched_in_vain_leaves_all_as_it_was(
    method: Callable[..., DataOptimizer], which: str
) -> None:
    inputs, targets = towards_numbers()
    bad_inputs, bad_targets = inputs.clone(), targets.clone()
    if which == "loss":
        bad_targets[7] = torch.nan
    else:
        bad_inputs[7, 0] = 0.0
    found = []
    for recorded in (True, False):
        model = Absolute()
        optimizer = method(model, nn.MSELoss(), subset_size=1.0, cuda_graphs=recorded)
        for _ in range(4):
            optimizer.step((inputs, targets))
        before = [p.clone() for p in model.parameters()]
        found.append(optimizer.step((bad_inputs, bad_targets)))
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        plain = Objective(model, nn.MSELoss(), cuda_graphs=False)
        expected = plain.value((inputs, targets))
        assert optimizer.step((inputs, targets)).loss == pytest.approx(expected, rel=1e-12)
    ours, theirs = found
    assert ours.status is theirs.status is Status.NOT_FINITE
    assert ours.reason == theirs.reason
    assert ("the loss on A" if which == "loss" else "the gradient on A") in ours.reason
    assert (ours.rank, ours.products, ours.passes) == (0, 0, theirs.passes)


@pytest.mark.parametrize("method", AHEAD)
def test_a_number_that_changes_before_a_basis_is_launched_is_seen(
    method: Callable[..., DataOptimizer],
) -> None:
    data, runs = towards_numbers(), []
    for recorded in (True, False):
        model = Scaled()
        optimizer = method(model, nn.MSELoss(), subset_size=1.0, cuda_graphs=recorded)
        steps = []
        for scale in (1.0, 1.0, 1.0, 0.8, 0.8):
            model.scale = scale
            steps.append(optimizer.step(data))
            assert steps[-1].loss_before == pytest.approx(steps[-1].loss, rel=1e-9)  # C is A
        runs.append(steps)
    for ours, theirs in zip(*runs, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.rank == theirs.rank


def test_sets_that_cannot_be_drawn_while_the_gpu_is_busy_leave_all_as_it_was() -> None:
    net = small_net()
    optimizer = KSD(net, nn.CrossEntropyLoss(), subset_size=90)
    for _ in range(2):
        optimizer.step(samples(200))
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match="`subset_size` asks for 90 samples"):
        optimizer.step(samples(80))
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
    assert optimizer.step(samples(200)).status.moved

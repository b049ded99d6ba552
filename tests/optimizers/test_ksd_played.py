"""Steps by recordings are those without, and what is launched early changes nothing else.

Here recordings are played on a CPU: each part is run as it is, on copies of its own, when it is
launched. `test_recordings` has them on a GPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD
from krylov_descent.algorithms.noise import error_sums, noise_steps
from krylov_descent.algorithms.subspace import LaunchedSubspace, Subspace, cut
from krylov_descent.cuda.graphs.capture import Part
from krylov_descent.cuda.graphs.host_transfer import Arriving
from krylov_descent.cuda.graphs.record_search import RecordedObjective, launched_objective
from krylov_descent.cuda.graphs.staleness import Recordings
from krylov_descent.objective.batches import Batch, as_samples
from krylov_descent.objective.network import Network
from krylov_descent.objective.objective import Objective
from krylov_descent.optimizers.result import Status
from tests.matrices import numbers
from tests.optimizers.nets import classes, net, noisy_classes, parameters_of


class Played:
    """What a `Recording` does, without one."""

    def __init__(
        self,
        network: Network,
        part: Part,
        batch: Batch,
        given: tuple[Tensor, ...],
        held: Part | None,
    ):
        self.batch, self.given = batch, given
        own = {} if held is None else {"held": held(network, batch, *given)}
        self.play: Callable[[], Any] = partial(part, network, batch, *given, **own)
        self.result = self.play()

    def __call__(self) -> Any:
        self.result = self.play()
        return self.result


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have recordings; what was launched and waited for, in which order."""
    order: list[str] = []

    def noted(name: str, recording: Played) -> Played:
        replay = recording.play

        def play() -> Any:
            order.append(name)
            return replay()

        recording.play = play
        return recording

    def load(
        self: Recordings,
        name: str,
        part: Part,
        batch: Batch,
        *given: Tensor,
        held: Part | None = None,
        **_: Any,
    ) -> Played:
        self._held[name] = ((), None)
        own = tuple(tensor.clone() for tensor in given)
        return noted(name, Played(self._network, part, batch.map(torch.clone), own, held))

    def beside(
        self: Recordings,
        other: Played,
        name: str,
        part: Part,
        *,
        held: Part | None = None,
        **_: Any,
    ) -> Played:
        return noted(name, Played(self._network, part, other.batch, other.given, held))

    def room(self: Recordings, rows: int, like: Tensor) -> Tensor:
        # On a CPU the rows that follow one that vanished are not written to.
        return like.new_zeros(rows, len(like))

    there, tensor = LaunchedSubspace.there, Arriving.tensor

    def noted_there(subspace: LaunchedSubspace) -> Any:
        order.append("there")
        return there(subspace)

    def noted_tensor(numbers: Arriving) -> Tensor:
        order.append("read")
        return tensor(numbers)

    monkeypatch.setattr(Recordings, "possible", property(lambda self: True))
    monkeypatch.setattr(Recordings, "hold", lambda self, batch, losses=None: True)
    monkeypatch.setattr(Recordings, "product", lambda self, *_: None)
    monkeypatch.setattr(Recordings, "room", room)
    monkeypatch.setattr(Recordings, "load", load)
    monkeypatch.setattr(Recordings, "beside", beside)
    monkeypatch.setattr(Recordings, "finish", lambda self: order.append("finish"))
    monkeypatch.setattr(LaunchedSubspace, "there", noted_there)
    monkeypatch.setattr(Arriving, "tensor", noted_tensor)
    return order


def test_the_search_begins_before_the_basis_is_there(played: list[str]) -> None:
    optimizer = KSD(net(), nn.CrossEntropyLoss())
    for _ in range(3):
        played.clear()
        optimizer.step(classes())
        launched = [name for name in played if name != "read"]
        there = launched.index("there")
        assert launched[there - 3 : there] == ["basis of gauss-newton", "evaluation", "noise"]
        assert launched[there + 1] == "evaluation"


def test_each_point_is_launched_once_and_behind_the_noise(played: list[str]) -> None:
    optimizer = KSD(net(), nn.CrossEntropyLoss())
    for _ in range(3):
        played.clear()
        result = optimizer.step(classes())
        # The basis, the normaliser, and evaluation and noise at θ, which were launched before.
        search = played[played.index("there") + 1 :]
        assert search[:4] == ["read"] * 4
        one_by_one = ["evaluation", "read"] * (result.evaluations - 1)
        assert search[4:] == [*one_by_one, "step", "read"]


def recorded(
    played: list[str], slots: Tensor, data: tuple[Tensor, Tensor]
) -> tuple[RecordedObjective, Objective, Tensor]:
    """f_C of a linear model over a basis [r, n], with one of the rows as previous step; and θ."""
    objective = Objective(linear(), nn.MSELoss())
    theta = objective.parameters.copy()
    found = launched_objective(objective, as_samples(data), theta, slots, slots[-1].clone)
    assert found is not None
    assert played == ["evaluation", "noise"]
    return found, objective, theta


def test_an_evaluation_that_is_under_way_is_not_launched_again(played: list[str]) -> None:
    slots, data = numbers(3, 4), other_targets_each_time()[0]
    function, objective, theta = recorded(played, slots, data)

    def expected(c: Tensor) -> tuple[float, Tensor]:
        objective.parameters.assign(theta + c @ slots)
        found = objective.value_and_gradient(data)
        return found.value, slots @ found.gradient

    first, second = numbers(2, seed=5), numbers(2, seed=6)
    for ahead, asked, launches in [(first, first, 1), (first, second, 2), (first, first, 1)]:
        played.clear()
        function.launch_ahead(ahead.numpy())
        value, projected = function(asked.numpy().copy())
        assert played.count("evaluation") == launches
        right, gradient = expected(torch.cat([asked, asked.new_zeros(1)]))
        assert value == pytest.approx(right, rel=1e-12)
        torch.testing.assert_close(torch.from_numpy(projected), gradient)
    # The newest is still there; the one before it was overwritten.
    for asked, order in [(first, ["read"]), (second, ["evaluation", "read"])]:
        played.clear()
        function(asked.numpy())
        assert played == order


def test_a_point_beside_the_one_that_is_under_way_is_evaluated(played: list[str]) -> None:
    """However close it is: with a float64 model a search at a kink tells such points apart."""
    slots, data = numbers(3, 4), other_targets_each_time()[0]
    function, *_ = recorded(played, slots, data)
    there = numbers(3, seed=5).numpy()
    for beside in (np.nextafter(there, np.inf), there[:2], np.full(3, np.inf), np.full(3, np.nan)):
        played.clear()
        function.launch_ahead(there)
        value, _ = function(beside)
        assert played == ["evaluation", "evaluation", "read"]
        assert np.isfinite(value) == np.isfinite(beside).all()


def test_numbers_at_theta_are_not_read_from_another_evaluation(played: list[str]) -> None:
    slots, data = numbers(3, 4), other_targets_each_time()[0]
    function, objective, _ = recorded(played, slots, data)
    value, projected = function.at_theta()
    expected = objective.value_and_gradient(data)
    assert value == pytest.approx(expected.value, rel=1e-12)
    torch.testing.assert_close(torch.from_numpy(projected), slots @ expected.gradient)
    function.launch_ahead(numbers(2, seed=5).numpy())
    with pytest.raises(AssertionError, match="the numbers at θ may be overwritten"):
        function.at_theta()


def test_what_nobody_asked_for_is_overwritten_by_the_step(played: list[str]) -> None:
    slots = numbers(3, 4)
    function, objective, theta = recorded(played, slots, other_targets_each_time()[0])
    c = numbers(2, seed=5)
    function.launch_ahead(numbers(2, seed=6).numpy())
    taken = function.take(c.numpy())
    assert taken is not None
    step = c @ slots[:2]
    torch.testing.assert_close(objective.parameters.flatten(taken.pieces), step)
    torch.testing.assert_close(objective.parameters.copy(), theta + step)
    assert taken.norm.read() == pytest.approx(float(step.norm()), rel=1e-12)


def test_noise_is_told_from_points_along_the_previous_step(played: list[str]) -> None:
    slots, data = numbers(3, 4), other_targets_each_time()[0]
    function, objective, theta = recorded(played, slots, data)
    losses = []
    for part in noise_steps(torch.finfo(torch.float64).eps):
        objective.parameters.assign(theta + part * slots[-1])
        losses.append(objective.comparable_losses(as_samples(data)))
    assert function.noise is not None
    found, expected = function.noise.tensor(), error_sums(torch.stack(losses))
    # Of nothing but rounding, which is another one if a product is added in another way.
    assert float(expected[0]) / 10 < float(found[0]) < 10 * float(expected[0])


def test_noise_is_told_again_where_there_is_no_previous_step(played: list[str]) -> None:
    optimizer = KSD(net(), nn.CrossEntropyLoss())
    for steps in (1, 2):
        assert optimizer.step(classes()).noise > 0
        assert played.count("noise") == steps  # and not by a recording


@pytest.mark.usefixtures("played")
def test_a_state_that_was_handed_out_stays_as_it_was() -> None:
    optimizer = KSD(net(), nn.CrossEntropyLoss())
    handed_out: list[list[Tensor]] = []
    copies: list[list[Tensor]] = []
    for _ in range(4):
        optimizer.step(classes())
        kept = [t for state in optimizer.state_dict()["state"].values() for t in state.values()]
        handed_out.append(kept)
        copies.append([t.clone() for t in kept])
    for kept, copied in zip(handed_out, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept, copied, strict=True))


def test_with_a_learning_rate_a_step_is_not_taken_by_a_recording(played: list[str]) -> None:
    optimizer = KSD(net(), nn.CrossEntropyLoss(), lr=0.5)
    before = parameters_of(optimizer.objective.network.model)
    result = optimizer.step(classes())
    assert result.status is Status.MOVED
    assert "step" not in played
    moved = parameters_of(optimizer.objective.network.model) - before
    assert float(moved.norm()) == pytest.approx(result.step_norm, rel=1e-4)


def linear() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 1, bias=False, dtype=torch.float64)


def other_targets_each_time() -> list[tuple[Tensor, Tensor]]:
    """Samples that make a linear model's curvature the identity: its Krylov space is the gradient.

    So previous steps follow on rows that vanished.
    """
    inputs, generator = 2 * torch.eye(4, dtype=torch.float64), torch.Generator().manual_seed(0)
    return [(inputs, torch.randn(4, 1, generator=generator).double()) for _ in range(4)]


CASES: list[tuple[Callable[[], nn.Module], nn.Module, list[Any], list[int]]] = [
    (
        partial(net, torch.float64),
        nn.CrossEntropyLoss(),
        [noisy_classes(300, 4, 3)] * 4,
        list(range(23)),
    ),
    (linear, nn.MSELoss(), other_targets_each_time(), [0, 4, 5, 6]),
]


@pytest.mark.parametrize(("model", "loss", "sets", "rows"), CASES)
@pytest.mark.parametrize("options", [{}, {"lr": 0.5}])
def test_steps_are_the_same(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    model: Callable[[], nn.Module],
    loss: nn.Module,
    sets: list[Any],
    rows: list[int],
    options: dict[str, Any],
) -> None:
    made: list[list[int]] = []

    def noted_cut(*args: Any) -> Subspace:
        subspace = cut(*args)
        made.append(subspace.rows)
        return subspace

    runs = []
    for _ in range(2):  # without recordings, and with them
        optimizer = KSD(model(), loss, weight_decay=1e-2, preconditioner="identity", **options)
        runs.append([optimizer.step(data) for data in sets])
        request.getfixturevalue("played")
        monkeypatch.setattr("krylov_descent.algorithms.subspace.cut", noted_cut)
    for plain, found in zip(*runs, strict=True):
        assert found.status is plain.status is Status.MOVED
        assert (found.rank, found.objective_samples) == (plain.rank, plain.objective_samples)
        assert found.loss_before == pytest.approx(plain.loss_before, rel=1e-6)
        assert found.loss_after == pytest.approx(plain.loss_after, rel=1e-6)
        assert found.step_norm == pytest.approx(plain.step_norm, rel=1e-2)
    assert made[-1] == rows


class Powers(nn.Module):
    """A sum of p and p^1.5, of which the second derivative at 0 is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor([-0.0, 0.0, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x * (self.p + self.p.pow(1.5))
        return result


def row_sums(outputs: Tensor, targets: None) -> Tensor:
    return outputs.sum(1)


def test_a_basis_that_is_refused_leaves_the_parameters_bit_for_bit(played: list[str]) -> None:
    model = Powers()
    before = model.p.detach().clone()
    result = KSD(model, row_sums, curvature="hessian").step((torch.ones(4, 3), None))
    assert "a curvature product on B is not finite" in result.reason
    assert played[-5:] == ["evaluation", "noise", "there", "read", "finish"]
    assert torch.equal(model.p.view(torch.int32), before.view(torch.int32))


def test_a_search_that_noise_ends_leaves_the_parameters_bit_for_bit(
    played: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though an evaluation was launched that nobody asked for."""
    model = net()
    before = parameters_of(model)
    monkeypatch.setattr(
        "krylov_descent.optimizers.ksd.search_objective.noise_from", lambda sums: 1e30
    )
    result = KSD(model, nn.CrossEntropyLoss()).step(classes())
    assert (result.status, result.evaluations) == (Status.NO_DECREASE, 1)
    search = played[played.index("there") + 1 :]
    assert search[:6] == [*["read"] * 4, "evaluation", "finish"]
    assert torch.equal(parameters_of(model), before)


@pytest.mark.parametrize("where", ["objective_in", "minimize"])
def test_a_step_that_is_interrupted_waits_for_what_it_launched(
    played: list[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It writes to memory of the host, which may be let go with the optimiser."""

    def interrupt(*_: Any, **__: Any) -> None:
        played.append("interrupted")
        raise KeyboardInterrupt

    monkeypatch.setattr(f"krylov_descent.optimizers.ksd.ksd.{where}", interrupt)
    model = net()
    before = parameters_of(model)
    with pytest.raises(KeyboardInterrupt):
        KSD(model, nn.CrossEntropyLoss()).step(classes())
    assert played[-2:] == ["interrupted", "finish"]
    assert torch.equal(parameters_of(model), before)


def test_an_error_in_the_search_leaves_the_parameters_bit_for_bit(
    played: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    before = parameters_of(model)

    def fail(sums: Tensor) -> float:
        raise RuntimeError("in the midst of it")

    monkeypatch.setattr("krylov_descent.optimizers.ksd.search_objective.noise_from", fail)
    with pytest.raises(RuntimeError, match="in the midst of it"):
        KSD(model, nn.CrossEntropyLoss()).step(classes())
    assert played[played.index("there") :] == ["there", *["read"] * 4, "finish"]
    assert torch.equal(parameters_of(model), before)


@pytest.mark.usefixtures("played")
def test_samples_of_which_none_counts_are_refused() -> None:
    model, (inputs, labels) = net(), classes()
    optimizer = KSD(model, nn.CrossEntropyLoss(ignore_index=7))
    optimizer.step((inputs, labels))
    before = parameters_of(model)
    with pytest.raises(ValueError, match="every target is ignored"):
        optimizer.step((inputs, labels), objective_data=(inputs, torch.full_like(labels, 7)))
    assert torch.equal(parameters_of(model), before)

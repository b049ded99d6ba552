"""What a step does on trust, before recordings were seen to hold, is done again if they do not.

Here recordings are played on a CPU as they were made: with the numbers that the model had then.
`test_recordings` has them on a GPU.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, KroneckerFactors, Objective
from krylov_descent.cuda.graphs.aliased_network import Aliased
from krylov_descent.cuda.graphs.capture import Part
from krylov_descent.cuda.graphs.staleness import Recordings
from krylov_descent.curvature.preconditioners.preconditioner import FisherDiagonal, Identity
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network
from krylov_descent.optimizers.result import Status, StepResult
from tests.optimizers.nets import parameters_of
from tests.optimizers.test_ksd_played import Played, played

__all__ = ["played"]  # a fixture

PRECONDITIONERS = ["fisher-diagonal", "identity", "kronecker"]


class Tempered(nn.Module):
    """A net with a number that no recording knows of; a root that is finite for its sign alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.number = 1.0

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x)
        return outputs + (self.number * x[:, :1]).sqrt()


def data(count: int = 60, sign: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(count, 4, generator=generator, dtype=torch.float64) + 0.1
    targets = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return inputs * torch.tensor([sign, 1.0, 1.0, 1.0], dtype=torch.float64), targets


class AsRecorded(Played):
    """A part with the model's number as it was at first, on copies that are loaded."""

    def __init__(self, note: Callable[[], None], network: Network, *rest: Any):
        self._note, self._model = note, network.eager
        self._number = self._model.number
        super().__init__(network, *rest)

    def load(self, batch: Batch, given: tuple[Tensor, ...]) -> None:
        sources = (batch.inputs, batch.targets, *given)
        targets = (self.batch.inputs, self.batch.targets, *self.given)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def __call__(self) -> Any:
        self._note()
        now, self._model.number = self._model.number, self._number
        try:
            return super().__call__()
        finally:
            self._model.number = now


HOLD, COMPARE, ROOM = Recordings.hold, Recordings._compare, Recordings.room


@pytest.fixture
def order(played: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the same recordings at every step, until they do not hold; what is done, in order."""

    def load(
        self: Recordings,
        name: str,
        part: Part,
        batch: Batch,
        *given: Tensor,
        fixed: tuple[Tensor, ...] = (),
        held: Part | None = None,
        **_: Any,
    ) -> AsRecorded | None:
        shapes = [t.shape for t in (batch.inputs, batch.targets, *given)]
        key: Any = (shapes, [t.data_ptr() for t in fixed])
        if name not in self._held or self._held[name][0] != key:
            own = tuple(tensor.clone() for tensor in given)
            note = partial(played.append, name.split(maxsplit=1)[0])
            try:
                made = AsRecorded(
                    note, Aliased(self._network), part, batch.map(torch.clone), own, held
                )
            except RuntimeError:  # a part that cannot be recorded
                return None
            self._held[name] = (key, made)
        recording: AsRecorded = self._held[name][1]
        recording.load(batch, given)
        return recording

    def compare(self: Recordings, pulse: Any) -> Any:
        played.append("look")
        return COMPARE(self, pulse)

    def room(self: Recordings, rows: int, like: Tensor) -> Tensor:
        # On a CPU the rows that follow one that vanished are not written to.
        return ROOM(self, rows, like).zero_()

    monkeypatch.setattr(Recordings, "load", load)
    monkeypatch.setattr(Recordings, "hold", HOLD)
    monkeypatch.setattr(Recordings, "_compare", compare)
    monkeypatch.setattr(Recordings, "room", room)
    return played


def ksd(model: nn.Module, preconditioner: str, loss: Any = None, **options: Any) -> KSD:
    chosen = KroneckerFactors(after=0) if preconditioner == "kronecker" else preconditioner
    given = {"dimension": 4, "weight_decay": 1e-3, "subset_size": 1.0} | options
    return KSD(model, loss or nn.MSELoss(), preconditioner=chosen, **given)


LAUNCHED = {
    "fisher-diagonal": ["gradient", "pulse", "basis"],
    "identity": ["gradient", "pulse", "basis"],
    "kronecker": ["gradient", "pulse", "factors,", "basis"],
}


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_recordings_are_looked_at_behind_the_launch_of_the_basis(
    order: list[str], preconditioner: str
) -> None:
    optimizer = ksd(Tempered(), preconditioner)
    for _ in range(4):
        order.clear()
        optimizer.step(data())
    expected = [*LAUNCHED[preconditioner], "look", "evaluation", "noise", "there"]
    assert [word for word in order if word != "read"][: len(expected)] == expected
    assert order.index("look") < order.index("read")
    assert order.count("look") == 1


def test_where_a_forward_pass_may_write_to_buffers_nothing_else_is_under_way(
    order: list[str],
) -> None:
    model = Tempered()
    model.register_buffer("anything", torch.zeros(1))
    optimizer = ksd(model, "fisher-diagonal")
    for _ in range(4):
        order.clear()
        optimizer.step(data())
    assert order[:4] == ["gradient", "pulse", "look", "basis"]


def runs(
    request: pytest.FixtureRequest, step_each: Callable[[], list[Any]]
) -> tuple[list[Any], list[Any]]:
    """Without recordings, and with them."""
    plain = step_each()
    request.getfixturevalue("order")
    return plain, step_each()


def check_alike(found: list[StepResult], plain: list[StepResult]) -> None:
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.status is theirs.status
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6, nan_ok=True)
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-4, nan_ok=True)
        assert ours.loss_after == pytest.approx(theirs.loss_after, rel=1e-4, nan_ok=True)
        assert ours.passes == pytest.approx(theirs.passes, rel=0.5)


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
@pytest.mark.parametrize("buffers", [False, True])
def test_what_was_done_with_recordings_that_do_not_hold_is_done_again(
    request: pytest.FixtureRequest, preconditioner: str, buffers: bool
) -> None:
    def step_each() -> list[StepResult]:
        model = Tempered()
        if buffers:
            model.register_buffer("anything", torch.zeros(1))
        optimizer, results = ksd(model, preconditioner), []
        for number in (1.0, 1.0, 1.0, 0.2, 0.2):
            model.number = number
            results.append(optimizer.step(data()))
            assert results[-1].loss_before == pytest.approx(results[-1].loss, rel=1e-9)  # C is A
        return results

    plain, found = runs(request, step_each)
    check_alike(found, plain)


class Penalised(Tempered):
    """With another number than 1 a weight has a use that hardly changes the loss."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        if self.number != 1:
            outputs = outputs + 1e-6 * next(self.parameters()).square().sum()
        return outputs


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_recordings_without_a_small_new_use_of_a_weight_do_not_hold(preconditioner: str) -> None:
    model = Penalised()
    optimizer, refuted = ksd(model, preconditioner), []
    for number in (1.0, 1.0, 1.0, 1 + 1e-6, 1 + 1e-6, 1.0, 1.0):
        model.number = number
        optimizer.step(data())
        refuted.append(optimizer.objective.recordings.refuted)
    assert refuted == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_a_recorded_gradient_has_the_penalty_of_the_loss(preconditioner: str) -> None:
    model, (inputs, targets) = Tempered(), data()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        found = (outputs - targets).square().mean(1)
        if model.number == 1:
            return found
        return found + model.number * next(model.parameters()).square().sum()

    optimizer = ksd(model, preconditioner, loss, weight_decay=0.0)
    for number in (0.2, 0.2, 1.0, 1.0, 0.1, 0.1):
        model.number = number
        mean = loss(model(inputs), targets).mean()
        gradient = torch.autograd.grad(mean, list(model.parameters()))
        norm = float(torch.cat([part.reshape(-1) for part in gradient]).norm())
        assert optimizer.step((inputs, targets)).gradient_norm == pytest.approx(norm, rel=1e-9)


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_so_it_is_where_the_gradient_is_not_recorded(
    order: list[str], monkeypatch: pytest.MonkeyPatch, preconditioner: str
) -> None:
    """Then it is the factors, or the basis, that ask first whether recordings hold."""
    monkeypatch.setattr(Objective, "_recordable", lambda self, data: None)
    model = Tempered()
    optimizer = ksd(model, preconditioner)
    for number in (1.0, 1.0, 1.0, 0.2):
        order.clear()
        model.number = number
        optimizer.step(data())
    again = ["factors,", "basis"] if preconditioner == "kronecker" else ["basis"]
    before_search = order[: order.index("evaluation")]
    for part in again:
        assert part in before_search[before_search.index("look") :]


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_no_step_is_refused_for_what_recordings_say_that_do_not_hold(
    request: pytest.FixtureRequest, preconditioner: str
) -> None:
    """As recorded, the root of numbers of the other sign is not a number."""

    def step_each() -> list[StepResult]:
        model = Tempered()
        optimizer, results = ksd(model, preconditioner), []
        for sign in (1.0, 1.0, 1.0, -1.0, -1.0):
            model.number = sign
            results.append(optimizer.step(data(sign=sign)))
        return results

    plain, found = runs(request, step_each)
    assert all(result.status is Status.MOVED for result in found)
    check_alike(found, plain)


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_a_refusal_leaves_parameters_bit_for_bit(order: list[str], preconditioner: str) -> None:
    model = Tempered()
    optimizer = ksd(model, preconditioner)
    for _ in range(3):
        optimizer.step(data())
    before = parameters_of(model)
    order.clear()
    result = optimizer.step(data(sign=-1.0))
    assert (result.status, result.rank, result.products) == (Status.NOT_FINITE, 0, 0)
    assert "basis" in order
    assert "evaluation" not in order
    assert torch.equal(parameters_of(model), before)
    assert optimizer.step(data()).status is Status.MOVED


IGNORED = 99.0


def squares_that_count(outputs: Tensor, targets: Tensor) -> Tensor:
    """Zero for targets to ignore."""
    return (outputs - targets).square().mean(1) * (targets[:, 0] != IGNORED)


def test_where_samples_of_a_tell_nothing_those_of_b_are_looked_at(
    request: pytest.FixtureRequest,
) -> None:
    inputs, targets = data(200)
    targets[:8] = IGNORED

    def step_each() -> list[StepResult]:
        model = Tempered()
        optimizer, results = ksd(model, "identity", squares_that_count, subset_size=0.5), []
        for number in (1.0, 1.0, 1.0, 9.0, 9.0):
            model.number = number
            results.append(optimizer.step((inputs, targets)))
        return results

    plain, found = runs(request, step_each)
    check_alike(found, plain)


def on_both_ways(
    request: pytest.FixtureRequest, preconditioner: Any, decay: list[float], loss: nn.Module
) -> list[Any]:
    """Evaluation and D without a recording, and twice with one."""
    inputs, targets = data()
    if isinstance(loss, nn.CrossEntropyLoss):
        targets = targets.argmax(1)
    model = Tempered()
    layers = [list(model.net[i].parameters()) for i in (0, 2)]
    groups = [{"params": p, "weight_decay": d} for p, d in zip(layers, decay, strict=True)]
    objective, found = Objective(model, loss, params=groups), []
    for _ in range(3):
        evaluation = preconditioner.update(objective, (inputs, targets))
        found.append((evaluation, [t.clone() for t in preconditioner.tensors]))
        if len(found) == 1:
            request.getfixturevalue("order")
    return found


@pytest.mark.parametrize("preconditioner", [FisherDiagonal, Identity])
@pytest.mark.parametrize("decay", [[0.0, 0.0], [0.1, 0.1], [0.1, 0.0], [0.1, 0.2]])
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss(ignore_index=1)])
def test_recorded_means_are_those_of_sums(
    request: pytest.FixtureRequest, preconditioner: Any, decay: list[float], loss: nn.Module
) -> None:
    found = on_both_ways(request, preconditioner(), decay, loss)
    plain, D = found[0]
    for ours, ours_D in found[1:]:
        assert ours.value == pytest.approx(plain.value, rel=1e-14)
        assert ours.norm == pytest.approx(float(plain.gradient.norm()), rel=1e-14)
        assert (ours.samples, ours.normaliser) == (plain.samples, plain.normaliser)
        assert ours.squares.numel() == 0
        torch.testing.assert_close(ours.gradient, plain.gradient, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(ours_D, D, rtol=1e-12, atol=1e-15)
    assert found[1][0].gradient.data_ptr() != found[2][0].gradient.data_ptr()


def test_recorded_squares_are_those_of_sums(request: pytest.FixtureRequest) -> None:
    objective = Objective(Tempered(), nn.MSELoss())
    plain = objective.value_gradient_and_squares(data())
    order = request.getfixturevalue("order")
    found = objective.value_gradient_and_squares(data())
    assert "gradient" in order
    torch.testing.assert_close(found.squares, plain.squares, rtol=1e-12, atol=1e-15)


@pytest.mark.usefixtures("order")
def test_a_mean_over_nothing_is_refused() -> None:
    inputs, _ = data()
    objective = Objective(Tempered(), nn.CrossEntropyLoss(ignore_index=7))
    for method in (objective.value_and_gradient, objective.value_gradient_and_squares):
        for targets in (torch.zeros(60).long(), torch.full((60,), 7)):
            with (
                pytest.raises(ValueError, match="every target is ignored")
                if targets.any()
                else nullcontext()
            ):
                method((inputs, targets))

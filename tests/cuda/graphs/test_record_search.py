"""The search by recordings: c → f_C(θ + Vc), its noise, and the step that is taken."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Objective, Status
from krylov_descent.algorithms.basis_storage import Alone, StoredBasis
from krylov_descent.algorithms.coordinates import Coordinates
from krylov_descent.algorithms.krylov import Found
from krylov_descent.algorithms.noise import error_sums, noise_from, noise_steps
from krylov_descent.algorithms.subspace import Subspace
from krylov_descent.cuda.engine import RecordingEngine
from krylov_descent.cuda.graphs import record_search
from krylov_descent.cuda.graphs.basis_room import BasisRoom
from krylov_descent.cuda.graphs.record_search import RecordedSearch
from krylov_descent.objective.batches import as_samples
from krylov_descent.objective.search_objective import Search, SearchObjective
from tests.engines import ENGINES, RECORDING, device_of, engine_of, objective_on, use
from tests.optimizers.nets import classes, net, parameters_of

ROWS, KEPT = 4, [0, 2, 3]  # of the rows that are made, one vanishes
SPARE = 3  # places that no row has


def on(engine: str, count: int = 60) -> tuple[Tensor, Tensor]:
    inputs, targets = classes(count, torch.float64)
    return inputs.to(device_of(engine)), targets.to(device_of(engine))


def subspace_of(slots: Tensor) -> tuple[Subspace, Coordinates]:
    """As `cut` leaves it: rows that are kept come first."""
    kept = slots[KEPT].clone()
    slots[: len(KEPT)] = kept
    rows = StoredBasis.at(slots)
    rows.cut(len(KEPT))
    gram = (kept @ kept.t()).cpu()
    curvature = gram @ gram + torch.eye(len(KEPT), dtype=torch.float64)
    subspace = Subspace(rows, Alone(slots.shape[1]), Found(KEPT, curvature, gram, 1.0))
    return subspace, Coordinates(curvature, gram, 1e-6)


class Case:
    """Both searches on the same samples and the same basis."""

    def __init__(self, engine: str, decay: float = 0.1) -> None:
        self.model, self.data = net(torch.float64).to(device_of(engine)), on(engine)
        groups = [{"params": list(self.model.parameters()), "weight_decay": decay}]
        loss = nn.CrossEntropyLoss(ignore_index=1)
        self.objective = objective_on(engine, self.model, loss, params=groups)
        self.plain = Objective(self.model, loss, params=groups)
        self.theta = self.objective.parameters.copy()
        self.previous = 0.1 * torch.randn_like(self.theta)
        self.room = BasisRoom.empty(ROWS + SPARE, self.theta)
        self.room.fill(ROWS)
        self.slots = self.room.slots[:ROWS]
        self.slots.copy_(torch.randn(ROWS, len(self.theta), dtype=torch.float64))

    def searches(self) -> tuple[RecordedSearch, SearchObjective]:
        """By recordings, launched before the subspace is known, and as it is."""
        engine, samples = self.objective.engine, as_samples(self.data)
        assert isinstance(engine, RecordingEngine)
        engine.basis_room = self.room
        found = engine.launch(Search(self.objective, samples, self.previous.clone)).result()
        assert isinstance(found, RecordedSearch)
        plain = SearchObjective(self.plain, samples, self.previous.clone, self.theta)
        subspace, coordinates = subspace_of(self.slots)
        found.over(subspace, coordinates)
        return found, plain.over(subspace, coordinates)


@pytest.mark.parametrize("engine", RECORDING)
def test_evaluations_are_the_plain_ones(engine: str) -> None:
    case = Case(engine)
    for _ in range(2):  # recorded, and replayed
        found, plain = case.searches()
        points = [np.zeros(3), *np.random.default_rng(0).normal(size=(3, 3)), np.zeros(3)]
        for call, point in enumerate(points):
            value, gradient = found.start() if call == 0 else found(point)
            at = parameters_of(case.model)
            expected, slope = plain(point)
            assert value == pytest.approx(expected, rel=1e-12)
            np.testing.assert_allclose(gradient, slope, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(at, parameters_of(case.model), rtol=1e-12, atol=1e-14)
        assert (found.samples, found.samples_seen) == (plain.samples, plain.samples_seen)
        found.restore()
        assert torch.equal(case.objective.parameters.copy(), case.theta)
        case.slots.copy_(torch.randn_like(case.slots))


@pytest.mark.parametrize("engine", RECORDING)
def test_points_side_by_side_are_told_apart(engine: str) -> None:
    """However close: a search at a kink wants that. And what is not finite is said so."""
    case = Case(engine)
    found, plain = case.searches()
    found.start()
    point, places = np.random.default_rng(0).normal(size=3), []
    for beside in (point, np.nextafter(point, np.inf)):
        value, _ = found(beside)
        places.append(parameters_of(case.model))
        assert value == pytest.approx(plain(beside)[0], rel=1e-13)
    assert not torch.equal(*places)
    for bad in (np.full(3, np.inf), np.full(3, np.nan)):
        assert not np.isfinite(found(bad)[0])
    assert found(point)[0] == pytest.approx(plain(point)[0], rel=1e-13)


@pytest.mark.parametrize("engine", RECORDING)
def test_the_step_is_the_plain_one(engine: str) -> None:
    case, a = Case(engine), np.array([0.3, -0.2, 0.1])
    found, plain = case.searches()
    found.start()
    taken, there = found.take(a), parameters_of(case.model)
    expected = plain.take(a)
    torch.testing.assert_close(there, parameters_of(case.model), rtol=1e-13, atol=1e-14)
    assert taken.norm == pytest.approx(expected.norm, rel=1e-12)
    kept = [piece.clone() for piece in taken.pieces]
    torch.testing.assert_close(kept, expected.pieces, rtol=1e-12, atol=1e-14)
    plain.restore()
    case.searches()[0].take(-a)
    assert all(map(torch.equal, taken.pieces, kept))  # another step has tensors of its own


@pytest.mark.parametrize("engine", RECORDING)
def test_noise_is_told_from_points_along_the_previous_step(engine: str) -> None:
    case = Case(engine, decay=0.0)
    found, plain = case.searches()
    value, gradient = found.start()
    losses = []
    for part in noise_steps(torch.finfo(torch.float64).eps):
        case.plain.parameters.assign(case.theta + part * case.previous)
        losses.append(case.plain.comparable_losses(as_samples(case.data)))
    expected = noise_from(error_sums(torch.stack(losses))) / 40
    case.plain.parameters.assign(case.theta)
    plain.start()
    for noise in (found.noise(value, gradient), plain.noise(value, gradient)):
        # Of nothing but rounding, which is another one if a product is added in another way.
        assert expected / 10 < noise < 10 * expected
    assert found.samples_seen == plain.samples_seen


class Noted(nn.Module):
    """Writes to a buffer and reads it again: side by side, passes would read each other's."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = net(torch.float64)
        self.register_buffer("last", torch.zeros(60, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x)
        self.last[: len(x)].copy_(outputs.detach())
        return outputs + 0.5 * self.last[: len(x)]


class TowardsItself(nn.Module):
    """A forward pass that differentiates towards its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        *_, bias = self.net.parameters()
        (slope,) = torch.autograd.grad(bias.square().sum(), bias, create_graph=True)
        outputs: Tensor = self.net(x) - 0.1 * slope
        return outputs


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("model", [partial(net, torch.float64), Noted, TowardsItself])
def test_the_noise_is_recorded_whatever_the_forward_pass_does(
    model: Callable[[], nn.Module], engine: str
) -> None:
    noise = []
    for one in ("eager", engine):
        made = KSD(model().to(device_of(engine)), nn.CrossEntropyLoss(), dimension=3)
        optimizer = use(one, made)
        noise.append([optimizer.step(on(engine)).noise for _ in range(3)])
    assert engine_of(optimizer).graphs.has("noise")
    for found, expected in zip(noise[1][1:], noise[0][1:], strict=True):
        assert expected / 5 < found < 5 * expected


@pytest.mark.parametrize("engine", ENGINES)
def test_samples_of_which_none_counts_are_refused(engine: str) -> None:
    model, (inputs, labels) = net(torch.float64).to(device_of(engine)), on(engine)
    optimizer = use(engine, KSD(model, nn.CrossEntropyLoss(ignore_index=7), dimension=3))
    for _ in range(2):
        optimizer.step((inputs, labels), objective_data=(inputs, labels))
    before = parameters_of(model)
    with pytest.raises(ValueError, match="every target is ignored"):
        optimizer.step((inputs, labels), objective_data=(inputs, torch.full_like(labels, 7)))
    assert torch.equal(parameters_of(model), before)
    assert optimizer.step((inputs, labels)).status.moved


@pytest.mark.parametrize("engine", RECORDING)
def test_a_search_that_noise_ends_leaves_the_parameters_bit_for_bit(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(torch.float64).to(device_of(engine))
    optimizer = use(engine, KSD(model, nn.CrossEntropyLoss(), dimension=3, subset_size=30))
    for _ in range(2):
        assert optimizer.step(on(engine)).status.moved
    before = parameters_of(model)
    with monkeypatch.context() as patched:
        patched.setattr(SearchObjective, "noise", lambda *_: 1e30)
        result = optimizer.step(on(engine))
    assert (result.status, result.evaluations) == (Status.NO_DECREASE, 1)
    assert torch.equal(parameters_of(model), before)
    assert optimizer.step(on(engine)).status.moved


@pytest.mark.parametrize("engine", RECORDING)
def test_an_evaluation_that_cannot_be_recorded_leaves_parameters_bit_for_bit(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rehearsal may have written to them, here past the tape."""
    case = Case(engine)
    weight = next(case.model.parameters()).detach()
    wipe = weight.zero_ if weight.is_cuda else partial(weight.numpy().fill, 0)

    def unrecordable(*_: object, **__: object) -> None:
        wipe()
        raise RuntimeError("not to be recorded")

    engine_used, samples = case.objective.engine, as_samples(case.data)
    assert isinstance(engine_used, RecordingEngine)
    monkeypatch.setattr(record_search, "_evaluate", unrecordable)
    engine_used.basis_room = case.room
    work = Search(case.objective, samples, case.previous.clone)
    with pytest.warns(UserWarning, match="cannot be recorded"):
        found = engine_used.launch(work).result()
    assert not isinstance(found, RecordedSearch)
    assert torch.equal(found.theta, case.theta)
    assert torch.equal(case.objective.parameters.copy(), case.theta)

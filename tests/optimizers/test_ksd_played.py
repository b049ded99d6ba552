"""Steps by recordings are those without, and what is launched early changes nothing else.

Here recordings are played on a CPU: each part is run as it is, on copies of its own, when it is
launched. `test_recordings` has them on a GPU.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, recorded_objective
from krylov_descent.batches import Batch
from krylov_descent.cuda_graphs import Part
from krylov_descent.network import Network
from krylov_descent.optimizers.result import Status
from krylov_descent.recorded_objective import RecordedObjective
from krylov_descent.recordings import Recordings
from krylov_descent.subspace import LaunchedSubspace, Subspace, cut
from tests.optimizers.nets import classes, net, noisy_classes, parameters_of


class Played:
    """What a `Recording` does, without one."""

    def __init__(self, network: Network, part: Part, batch: Batch, given: tuple[Tensor, ...]):
        self.batch, self.given = batch, given
        self.play: Callable[[], Any] = partial(part, network, batch, *given)
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
        self: Recordings, name: str, part: Part, batch: Batch, *given: Tensor, **_: Any
    ) -> Played:
        self._held[name] = ((), None)
        own = tuple(tensor.clone() for tensor in given)
        return noted(name, Played(self._network, part, batch.map(torch.clone), own))

    def beside(self: Recordings, other: Played, name: str, part: Part, **_: Any) -> Played:
        return noted(name, Played(self._network, part, other.batch, other.given))

    def on_host(coming: int, going: int, dtype: torch.dtype) -> Callable[[], Any]:
        return cache(lambda: (torch.zeros(coming, dtype=dtype), torch.zeros(going).double()))

    def room(self: Recordings, rows: int, like: Tensor) -> Tensor:
        # On a CPU the rows that follow one that vanished are not written to.
        return like.new_zeros(rows, len(like))

    there = LaunchedSubspace.there

    def noted_there(subspace: LaunchedSubspace) -> Any:
        order.append("there")
        return there(subspace)

    monkeypatch.setattr(Recordings, "possible", property(lambda self: True))
    monkeypatch.setattr(Recordings, "hold", lambda self, batch: True)
    monkeypatch.setattr(Recordings, "product", lambda self, *_: None)
    monkeypatch.setattr(Recordings, "room", room)
    monkeypatch.setattr(Recordings, "load", load)
    monkeypatch.setattr(Recordings, "beside", beside)
    monkeypatch.setattr(recorded_objective, "_on_host", on_host)
    monkeypatch.setattr(RecordedObjective, "_wait", lambda self: None)
    monkeypatch.setattr(LaunchedSubspace, "there", noted_there)
    return order


def test_the_search_begins_before_the_basis_is_there(played: list[str]) -> None:
    optimizer = KSD(net(), nn.CrossEntropyLoss())
    for _ in range(3):
        played.clear()
        optimizer.step(classes())
        there = played.index("there")
        assert played[there - 2 : there] == ["basis of gauss-newton", "evaluation"]
        assert played[there + 1 : there + 3] == ["noise", "evaluation"]


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
        monkeypatch.setattr("krylov_descent.subspace.cut", noted_cut)
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
    assert played[-2:] == ["evaluation", "there"]
    assert torch.equal(model.p.view(torch.int32), before.view(torch.int32))


@pytest.mark.usefixtures("played")
def test_samples_of_which_none_counts_are_refused() -> None:
    model, (inputs, labels) = net(), classes()
    optimizer = KSD(model, nn.CrossEntropyLoss(ignore_index=7))
    optimizer.step((inputs, labels))
    before = parameters_of(model)
    with pytest.raises(ValueError, match="every target is ignored"):
        optimizer.step((inputs, labels), objective_data=(inputs, torch.full_like(labels, 7)))
    assert torch.equal(parameters_of(model), before)

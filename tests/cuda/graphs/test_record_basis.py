"""A basis by recordings: launched before its gradient is read, in the same place at every step."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Status, StepResult
from krylov_descent.cuda.graphs.capture import Recorded
from krylov_descent.cuda.graphs.record_basis import RecordedSpace
from krylov_descent.objective.contract_probe import PROBE_SAMPLES
from tests.engines import RECORDING, check_alike, device_of, engine_of, record_on_tape, use
from tests.optimizers.nets import classes, net
from tests.preconditioners import at_once
from tests.terms import laplace, points, small_net, two_at_once

Data = tuple[Tensor, Tensor]
BASIS = "basis of gauss-newton"
SMALL: dict[str, Any] = {"dimension": 3, "bfgs_iterations": 4, "previous_steps": 1}


class Noting:
    """Records on tapes, and notes which recording is replayed when."""

    def __init__(self) -> None:
        self.order: list[Any] = []

    def __call__(self, *args: Any, **options: Any) -> Recorded[Any]:
        recorded = record_on_tape(*args, **options)
        return Recorded(_Noted(self.order, recorded.graph), recorded.result)


class _Noted:
    def __init__(self, order: list[Any], graph: Any) -> None:
        self._order, self._graph = order, graph

    def replay(self) -> None:
        self._order.append(self)
        self._graph.replay()


def launches(preconditioner: str, buffer: bool = False, **options: Any) -> list[str]:
    """What the fourth step launches, and when it verifies, by name."""
    model, capture = net(torch.float64), Noting()
    if buffer:
        model.register_buffer("anything", torch.zeros(1))
    made = KSD(model, nn.CrossEntropyLoss(), preconditioner=at_once(preconditioner), **SMALL)
    optimizer = use("tape", made, capture)
    for _ in range(3):
        optimizer.step(classes(60, torch.float64), **options)
    engine, verify = engine_of(optimizer), engine_of(optimizer).verify
    names = {
        id(graph): name
        for name, (_, held) in engine.graphs._held.items()
        for graph in graphs_in(held)
    }
    capture.order.clear()

    def noted() -> None:
        capture.order.append("verify")
        verify()

    engine.verify = noted  # type: ignore[method-assign]
    result = optimizer.step(classes(60, torch.float64), **options)
    found = [one if one == "verify" else names[id(one)].split(",")[0] for one in capture.order]
    # Each point that the search asks for is launched once.
    assert found.count("evaluation") == result.evaluations
    # The linearisation, a row for each direction and previous step, its curvature, all numbers.
    assert found.count(BASIS) == 1 + SMALL["dimension"] + 1 + 2 + 1
    return [name for name, before in zip(found, [None, *found], strict=False) if name != before]


def graphs_in(held: Any) -> list[Any]:
    """The graphs of a recording, or of something that is made of several."""
    if isinstance(held, _Noted):
        return [held]
    if isinstance(held, Recorded):
        return graphs_in(held.graph)
    if isinstance(held, dict):
        return [graph for one in held.values() for graph in graphs_in(one)]
    of_library = type(held).__module__.startswith("krylov_descent.cuda")
    return graphs_in(vars(held)) if of_library and hasattr(held, "__dict__") else []


AHEAD = {
    "fisher-diagonal": ["gradient and squares", "pulse in (none", BASIS],
    "identity": ["gradient", "pulse in (none", BASIS],
}


@pytest.mark.parametrize("preconditioner", AHEAD)
@pytest.mark.parametrize("buffer", [False, True])
def test_gradient_and_basis_are_launched_before_either_is_read(
    preconditioner: str, buffer: bool
) -> None:
    """And the search begins before the basis is read."""
    order = [name.replace("'", "") for name in launches(preconditioner, buffer)]
    expected = [*AHEAD[preconditioner], "verify", "evaluation", "noise", "evaluation"]
    assert order[: len(expected)] == expected
    assert order[-1] == "step"


def test_factors_and_a_basis_with_them_are_launched_before_the_gradient_is_read() -> None:
    order = launches("kronecker")
    before = order[: order.index("verify")]
    assert before.index("gradient") < before.index("factors") < before.index(BASIS)


def test_samples_that_may_not_come_again_are_not_gone_ahead_with() -> None:
    order = launches("fisher-diagonal", curvature_data=classes(30, torch.float64))
    assert order.index("verify") < order.index(BASIS)


@pytest.mark.parametrize("engine", RECORDING)
def test_a_basis_is_recorded_once(engine: str) -> None:
    """The first steps have fewer previous steps, and use the same recordings."""
    model = net(torch.float64).to(device_of(engine))
    options = SMALL | {"previous_steps": 3}
    optimizer, held = use(engine, KSD(model, nn.CrossEntropyLoss(), **options)), []
    data = tuple(tensor.to(device_of(engine)) for tensor in classes(60, torch.float64))
    for _ in range(6):
        optimizer.step(data)
        held.append(engine_of(optimizer).graphs._held[BASIS])
    assert all(one is held[0] for one in held[1:])


@pytest.mark.parametrize("engine", RECORDING)
def test_recordings_that_are_dropped_are_gone_at_once(engine: str) -> None:
    """A GPU's memory would wait for the garbage collector otherwise."""
    optimizer = use(engine, KSD(net().to(device_of(engine)), nn.CrossEntropyLoss(), **SMALL))
    data = tuple(tensor.to(device_of(engine)) for tensor in classes(60))
    for _ in range(2):
        optimizer.step(data)
    graphs = engine_of(optimizer).graphs
    (gone,) = (weakref.ref(held) for held in graphs._held[BASIS] if isinstance(held, RecordedSpace))
    gc.disable()
    try:
        graphs.clear()
        assert gone() is None
    finally:
        gc.enable()


def linear() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 1, bias=False, dtype=torch.float64)


def other_targets_each_time() -> list[Data]:
    """Samples that make a linear model's curvature the identity: its Krylov space is the gradient.

    So previous steps follow on rows that vanished.
    """
    inputs, generator = 2 * torch.eye(4, dtype=torch.float64), torch.Generator().manual_seed(0)
    return [(inputs, torch.randn(4, 1, generator=generator).double()) for _ in range(6)]


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("options", [{}, {"lr": 0.5}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("preconditioner", ["identity", "kronecker"])
def test_rows_that_vanish_are_left_out(
    preconditioner: str, options: dict[str, Any], engine: str
) -> None:
    """The search is launched before that is known."""

    def steps(one: str) -> list[StepResult]:
        model = linear().to(device_of(engine))
        optimizer = use(
            one, KSD(model, nn.MSELoss(), preconditioner=at_once(preconditioner), **options)
        )
        return [
            optimizer.step((inputs.to(device_of(engine)), targets.to(device_of(engine))))
            for inputs, targets in other_targets_each_time()
        ]

    found, expected = steps(engine), steps("eager")
    if preconditioner == "identity":
        assert [step.rank for step in expected[:4]] == [1, 2, 3, 4]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.status is theirs.status is Status.MOVED
        assert (ours.rank, ours.products) == (theirs.rank, theirs.products)
        assert ours.loss_before == pytest.approx(theirs.loss_before, rel=1e-9)
        assert ours.loss_after == pytest.approx(theirs.loss_after, rel=1e-6, abs=1e-12)
        assert ours.step_norm == pytest.approx(theirs.step_norm, rel=1e-6)


@pytest.mark.parametrize("engine", RECORDING)
def test_a_number_of_the_preconditioner_may_change(engine: str) -> None:
    """D is made in a recording, with the floor of that time."""

    def steps(one: str, name: str) -> list[StepResult]:
        model, D = net(torch.float64).to(device_of(engine)), at_once(name)
        optimizer = use(one, KSD(model, nn.CrossEntropyLoss(), preconditioner=D, **SMALL))
        data = tuple(tensor.to(device_of(engine)) for tensor in classes(60, torch.float64))
        results = [optimizer.step(data) for _ in range(3)]
        optimizer.preconditioner.epsilon = 0.3  # type: ignore[attr-defined]
        return results + [optimizer.step(data) for _ in range(2)]

    for name in ("fisher-diagonal", "kronecker"):
        check_alike(steps(engine, name), steps("eager", name), rel=1e-6)


@pytest.mark.parametrize("engine", RECORDING)
def test_a_step_goes_on_by_autograd_where_the_rows_of_a_jacobian_cannot_be_had(engine: str) -> None:
    """That shows with many points only, so in the first recording."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        few = len(x) <= PROBE_SAMPLES
        return laplace(net, x.detach().requires_grad_()) if few else two_at_once(net, x)

    def steps(one: str) -> list[StepResult]:
        model, data = small_net().to(device_of(engine)), points(40).to(device_of(engine))
        loss, D = nn.MSELoss(reduction="none"), at_once("fisher-diagonal")
        made = KSD(model, loss, forward=forward, preconditioner=D, **SMALL)
        optimizer = use(one, made)
        results = [optimizer.step((data, data.new_zeros(40))) for _ in range(4)]
        assert one == "eager" or BASIS in engine_of(optimizer).graphs.names
        return results

    check_alike(steps(engine), steps("eager"), rel=1e-6)

"""Steps by an engine that records are those of the eager engine, whatever happens between them."""

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from krylov_descent import (
    KSD,
    LBFGS,
    FirstOrder,
    HessianFree,
    KroneckerFactors,
    NonlinearCG,
    Objective,
    Status,
    StepResult,
)
from krylov_descent.cuda.engine import RecordingEngine
from krylov_descent.cuda.graphs.capture import Recorded
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.optimizers.base import DataOptimizer
from krylov_descent.optimizers.ksd.iteration import Iteration
from tests.engines import (
    ENGINES,
    RECORDING,
    check_alike,
    device_of,
    engine_of,
    record_on_tape,
    use,
)
from tests.optimizers.nets import (
    Reversed,
    beginning_small,
    classes,
    net,
    noisy_classes,
    parameters_of,
)

Data = tuple[Tensor, Tensor]
Make = Callable[..., DataOptimizer]

# Small, and with so short a search that it does not end by noise, which rounding decides. With one
# previous step the whole basis is recorded at the second step, and launched early at the third.
SMALL: dict[str, Any] = {
    "dimension": 3,
    "previous_steps": 1,
    "bfgs_iterations": 4,
    "subset_size": (30, 24),
    "preconditioner": "fisher-diagonal",
}


def ksd(*args: Any, after: int | None = None, **options: Any) -> KSD:
    """KSD, with Kronecker factors of its own after so many steps."""
    if after is not None:
        options["preconditioner"] = KroneckerFactors(after=after)
    return KSD(*args, **(SMALL | options))


METHODS: dict[str, Make] = {
    "ksd": ksd,
    "ksd, identity": partial(ksd, preconditioner="identity"),
    "ksd, kronecker": partial(ksd, after=0),
    "ksd, kronecker later": partial(ksd, after=2),
    "ksd, hessian": partial(ksd, curvature="hessian"),
    "ksd, fisher": partial(ksd, curvature="fisher", weight_decay=0.1),
    "ksd, lr": partial(ksd, lr=0.5, weight_decay=0.01),
    "ksd, three previous steps": partial(ksd, previous_steps=3),
    "ksd, stored elsewhere": partial(ksd, basis_dtype=torch.bfloat16),
    "ksd, micro-batches": partial(ksd, micro_batch=11),
    "hf": partial(HessianFree, cg_iterations=12, chunk_size=25),
    "ncg": partial(NonlinearCG, iterations=3),
    "lbfgs": partial(LBFGS, iterations=3),
    "first order": partial(FirstOrder, lr=0.01, batch_size=16, clip_norm=0.1, cuda_graphs=True),
}
SEARCHED = {"evaluation", "noise", "step"}
RECORDED = {
    "ksd": SEARCHED | {"gradient and squares", "basis of gauss-newton"},
    "ksd, identity": SEARCHED | {"gradient", "basis of gauss-newton"},
    "ksd, kronecker": SEARCHED | {"gradient", "factors, 1", "basis of gauss-newton"},
    "ksd, kronecker later": SEARCHED | {"gradient", "factors, 1", "basis of gauss-newton"},
    "ksd, hessian": SEARCHED | {"gradient and squares", "basis of hessian"},
    "ksd, fisher": SEARCHED | {"gradient and squares", "basis of fisher"},
    "ksd, lr": SEARCHED | {"gradient and squares", "basis of gauss-newton"},
    "ksd, three previous steps": SEARCHED | {"gradient and squares", "basis of gauss-newton"},
    "ksd, stored elsewhere": {"gradient and squares", "product gauss-newton"},
    "ksd, micro-batches": set[str](),
    "hf": {"gradient and squares", "product gauss-newton"},
    "ncg": {"gradient"},
    "lbfgs": {"gradient"},
    "first order": {"mini-batch"},
}


def on(engine: str, count: int = 60, dtype: torch.dtype = torch.float64) -> Data:
    inputs, targets = classes(count, dtype)
    return inputs.to(device_of(engine)), targets.to(device_of(engine))


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("name", RECORDED)
def test_a_run_is_that_of_the_eager_engine(name: str, engine: str) -> None:
    runs, ends = [], []
    for one in ("eager", engine):
        model, data = net(torch.float64).to(device_of(engine)), on(engine)
        optimizer = use(one, METHODS[name](model, nn.CrossEntropyLoss()))
        runs.append([optimizer.step(data) for _ in range(4)])
        ends.append(parameters_of(model))
    check_alike(runs[1], runs[0])
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-7, atol=1e-9)
    held = set(engine_of(optimizer).graphs.names)
    assert RECORDED[name] <= held
    # Products are recorded until the whole basis is.
    others = {one for one in held - RECORDED[name] if not one.startswith(("pulse", "product"))}
    assert not others


# A model that changes ----------------------------------------------------------------------------


class Changing(nn.Module):
    """A net with a number, a buffer, and uses of its first weight that may be switched on."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = net(torch.float64)
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))
        self.number, self.reused, self.penalty, self.held_penalty = 1.0, 0.0, 0.0, 0.0
        self.weights: Tensor | None = torch.ones(3, dtype=torch.float64)
        self.held = [self.weight]

    @property
    def weight(self) -> Tensor:
        return next(self.net.parameters())

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.number * self.scale * self.net(x)
        if self.reused:
            outputs = outputs + self.reused * x.mm(self.weight.t()).sin()[:, :3]
        return outputs

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        if self.penalty:
            losses = losses + self.penalty * self.weight.square().sum()
        if self.held_penalty:
            losses = losses + self.held_penalty * self.held[0].square().sum()
        return losses


class Training:
    """A model, its data and an optimiser on an engine; what is changed between steps."""

    def __init__(self, engine: str, device: torch.device, method: str, *, penalised: bool) -> None:
        self.model = Changing().to(device)
        self.torchs = nn.CrossEntropyLoss(torch.ones(3).double().to(device))
        loss = self.model.loss if penalised else self.torchs
        self.optimizer = use(engine, METHODS[method](self.model, loss))
        inputs, targets = classes(60, torch.float64)
        self.data = inputs.to(device), targets.to(device)
        self.sets: dict[str, Any] = {}
        self.kept: Any = None

    def step(self) -> StepResult:
        result: StepResult = self.optimizer.step(self.data, **self.sets)
        return result

    # Stale: a recording knows nothing of them.

    def number(self) -> None:
        self.model.number = 0.3

    def label_smoothing(self) -> None:
        self.torchs.label_smoothing = 0.3

    def penalty(self) -> None:
        self.model.penalty = 1e-5

    def reused(self) -> None:
        self.model.reused = 1e-5

    # Seen by what a recording is known by.

    def held_penalty(self) -> None:
        self.model.held_penalty = 1e-5

    def buffer(self) -> None:
        self.model.scale = self.model.scale * torch.tensor([1.0, 2.0, 0.5]).to(self.model.scale)

    def buffer_in_place(self) -> None:
        self.model.scale.mul_(2.0)

    def class_weights(self) -> None:
        self.torchs.weight = torch.tensor([1.0, 2.0, 0.5]).to(self.model.scale)

    def weight_decay(self) -> None:
        self.optimizer.param_groups[0]["weight_decay"] = 0.1

    def learning_rate(self) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.5

    def elsewhere(self) -> None:
        for p in self.model.parameters():
            p.data = p.data * 1.1

    def rounded(self) -> None:
        self.model.float().double()
        self.model.scale = self.model.scale.double()

    def frozen(self) -> None:
        self.model.net[0].bias.requires_grad_(False)

    def other_data(self) -> None:
        self.data = self.data[0] / 3, self.data[1]

    def data_in_place(self) -> None:
        self.data[0].mul_(2)

    def fewer_data(self) -> None:
        self.data = self.data[0][:47], self.data[1][:47]

    def sets_by_hand(self) -> None:
        inputs, targets = self.data
        self.sets["curvature_data"] = inputs[5:35], targets[5:35]
        self.sets["objective_data"] = inputs[30:54], targets[30:54]

    def stream(self) -> None:
        inputs, targets = self.data
        self.data = [(inputs[:40], targets[:40]), (inputs[40:], targets[40:])]  # type: ignore[assignment]

    def no_state(self) -> None:
        self.optimizer.load_state_dict(
            use("eager", METHODS["ksd"](Changing(), F.mse_loss)).state_dict()
        )

    def previous_forgotten(self) -> None:
        self.optimizer.state.clear()


STALE = ["number", "penalty", "reused", "held_penalty"]
SEEN = [
    name
    for name, change in vars(Training).items()
    if callable(change) and not name.startswith("_") and name not in ("step", *STALE)
]
PENALISED = ("penalty", "held_penalty")
# Of a weight that is used outside of its layer, or is held outside of the modules.
EXPECTED_WARNING = ".*cannot be recorded"


def trained(
    engine: str, device: torch.device, method: str, change: str
) -> tuple[list[StepResult], Training]:
    training = Training(engine, device, method, penalised=change in PENALISED)
    results = []
    with warnings.catch_warnings():
        if change in ("held_penalty", "reused"):
            warnings.filterwarnings("ignore", message=EXPECTED_WARNING)
        for step in range(4):
            if step == 2:
                getattr(training, change)()
            results.append(training.step())
    return results, training


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize(
    ("method", "change"),
    [
        *(("ksd", change) for change in (*STALE, *SEEN)),
        *(("ksd, kronecker", change) for change in ("number", "reused", "frozen", "stream")),
        *(("ksd, identity", change) for change in ("number", "penalty", "data_in_place")),
        *(("hf", change) for change in ("number", "held_penalty", "buffer")),
        *(("ncg", change) for change in ("number", "reused", "elsewhere")),
        *(("lbfgs", change) for change in ("number", "penalty", "weight_decay")),
    ],
)
def test_a_change_between_steps_is_seen(method: str, change: str, engine: str) -> None:
    """Where recordings are stale, steps of KSD with data in memory are made again."""
    device = device_of(engine)
    expected, _ = trained("eager", device, method, change)
    found, training = trained(engine, device, method, change)
    check_alike(found, expected, rel=1e-6)
    assert engine_of(training.optimizer).staleness.times_stale == (change in STALE)


class Averaged:
    """A preconditioner of the user's, with memory: a step cannot be made again with it."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def update(self, objective: Objective, data: Any) -> Evaluation:
        found = objective.value_gradient_and_squares(data)
        squares = found.squares + 1e-3
        self.mean = squares if self.mean is None else (self.mean + squares) / 2
        return found

    def solve(self, vector: Tensor) -> Tensor:
        assert self.mean is not None
        return vector / self.mean

    def multiply(self, vector: Tensor) -> Tensor:
        assert self.mean is not None
        return vector * self.mean


AVERAGED = "ksd, averaged"
METHODS[AVERAGED] = lambda *args: ksd(*args, preconditioner=Averaged())


def no_change(training: Training) -> None:
    """Steps are the same as they are."""


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("change", ["number", "penalty"])
@pytest.mark.parametrize(
    ("method", "also"),
    [
        (AVERAGED, no_change),
        ("ksd", Training.stream),
        ("ksd, kronecker", Training.sets_by_hand),
    ],
)
def test_a_step_that_cannot_be_made_again_uses_no_stale_recording(
    method: str, also: Callable[[Training], None], change: str, engine: str
) -> None:
    device, runs = device_of(engine), []
    for one in ("eager", engine):
        training = Training(one, device, method, penalised=change in PENALISED)
        also(training)
        runs.append([training.step() for _ in range(2)])
        getattr(training, change)()
        runs[-1] += [training.step() for _ in range(2)]
    check_alike(runs[1], runs[0], rel=1e-6)
    recording = engine_of(training.optimizer)
    assert recording.staleness.times_stale == 1
    assert recording.graphs.names


IGNORED = 99.0


def squares_that_count(outputs: Tensor, targets: Tensor) -> Tensor:
    """Zero for targets to ignore."""
    return (outputs - targets).square().mean(1) * (targets[:, 0] != IGNORED)


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("method", ["ksd, identity", "ksd, kronecker", "ksd"])
def test_where_samples_of_a_tell_nothing_those_of_b_are_looked_at(method: str, engine: str) -> None:
    device, runs = device_of(engine), []
    targets = torch.randn(60, 3, dtype=torch.float64)
    targets[:8] = IGNORED
    data = classes(60, torch.float64)[0].to(device), targets.to(device)
    for one in ("eager", engine):
        model = Changing().to(device)
        optimizer = use(one, METHODS[method](model, squares_that_count, subset_size=(51, 40)))
        results = []
        for number in (1.0, 1.0, 0.3, 0.3, 1.0):
            model.number = number
            results.append(optimizer.step(data))
        runs.append(results)
    check_alike(runs[1], runs[0], rel=1e-6)


# Steps that are not taken ------------------------------------------------------------------------


class Fragile(nn.Module):
    """A net with |wx| of the first input, whose derivative at x = 0 is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(torch.float64)
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x) + (self.weight * x[:, :1]).square().sqrt()
        return outputs


class Powers(nn.Module):
    """Sums of (p - 1)² and |p|^1.5, of which the second derivative at 0 is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor([5.0, -3.0, 2.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x[:, :3] * ((self.p - 1).square() + self.p.abs().pow(1.5))
        return outputs

    @torch.no_grad()
    def reach_zero(self) -> None:
        """In two numbers, of which one has a sign that a sum loses."""
        self.p.copy_(torch.tensor([-0.0, 0.0, 0.5]))


def row_sums(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.sum(1)


def bad_sets(data: Data) -> dict[str, dict[str, Any]]:
    """Sets of which a step must be refused, by what is not finite or vanishes there."""
    (inputs, targets), nan = data, data[1] * torch.nan
    flat = inputs.clone()
    flat[7, 0] = 0.0
    return {
        "loss on A": {"data": (inputs, nan)},
        "gradient on A": {"data": (flat, targets)},
        "curvature": {"data": data, "curvature_data": (inputs * torch.nan, targets)},
        "loss on C": {"data": data, "objective_data": (inputs, nan)},
    }


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["ksd", "ksd, identity", "ksd, kronecker", "ksd, lr"])
def test_a_refused_step_leaves_all_as_it_was(method: str, engine: str) -> None:
    """The steps behind it are those of a training without it, of which the sets are all samples."""
    device = device_of(engine)
    inputs = classes(60, torch.float64)[0].to(device)
    data = inputs, torch.randn(60, 3, dtype=torch.float64).to(device)
    plain, model = Fragile().to(device), Fragile().to(device)
    expected = use("eager", METHODS[method](plain, nn.MSELoss(), subset_size=1.0))
    optimizer = use(engine, METHODS[method](model, nn.MSELoss(), subset_size=1.0))
    for name, sets in [("none", {}), ("none", {}), *bad_sets(data).items()]:
        theirs = expected.step(data)
        if sets:
            before, state = parameters_of(model), repr(optimizer.state_dict()["state"])
            refused = optimizer.step(**sets)
            assert (refused.status, refused.step_norm) == (Status.NOT_FINITE, 0), name
            assert torch.equal(parameters_of(model), before)
            assert repr(optimizer.state_dict()["state"]) == state
        check_alike([optimizer.step(data)], [theirs], rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_basis_that_is_not_finite_leaves_parameters_bit_for_bit(engine: str) -> None:
    """Though the search was launched behind it: 0 · NaN is in the parameters, and -0 + 0."""
    model, (inputs, targets) = Powers().to(device_of(engine)), on(engine)
    optimizer = use(engine, ksd(model, row_sums, curvature="hessian", bfgs_iterations=1))
    for _ in range(3):
        assert optimizer.step((inputs.abs(), targets)).status.moved
    model.reach_zero()
    before = model.p.detach().clone()
    for _ in range(2):
        result = optimizer.step((inputs.abs(), targets))
        assert "a curvature product on B is not finite" in result.reason
        assert result.evaluations == 0
        assert torch.equal(model.p.view(torch.int64), before.view(torch.int64))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("after", [None, 0])
def test_a_state_without_previous_steps_may_follow_a_basis_that_is_not_finite(
    after: int | None, engine: str
) -> None:
    """The rows of the basis for previous steps, which the next step lacks, are NaN by then."""
    (inputs, targets), model = on(engine), net(torch.float64).to(device_of(engine))
    optimizer = use(engine, ksd(model, nn.CrossEntropyLoss(), after=after))
    begin = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        assert optimizer.step((inputs, targets)).status.moved
    nowhere = optimizer.step((inputs, targets), curvature_data=(inputs * torch.nan, targets))
    assert nowhere.status is Status.NOT_FINITE
    optimizer.load_state_dict(begin)
    assert optimizer.step((inputs, targets)).status.moved


@pytest.mark.parametrize("engine", ENGINES)
def test_no_decrease_and_no_gradient_leave_parameters_bit_for_bit(engine: str) -> None:
    """Also once a step has so long a basis that it is not the usual one."""

    class Uphill(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.reversed = net(torch.float64), False

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.net(x)
            if self.reversed:
                outputs = Reversed.apply(outputs)  # type: ignore[no-untyped-call]
            return outputs

    model, data = Uphill().to(device_of(engine)), on(engine)
    optimizer = use(engine, ksd(model, nn.CrossEntropyLoss(), subset_size=1.0))
    for _ in range(3):
        assert optimizer.step(data).status.moved
    before, ranks = parameters_of(model), []
    model.reversed = True
    for _ in range(3):
        result = optimizer.step(data)
        assert result.status is Status.NO_DECREASE
        assert torch.equal(parameters_of(model), before)
        ranks.append(result.rank)
    assert ranks[0] < ranks[-1]
    model.reversed = False
    assert optimizer.step(data).status.moved
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    flat = use(engine, ksd(model, lambda outputs, _: outputs.square().sum(1)))
    assert flat.step(data).status is Status.STATIONARY
    assert not parameters_of(model).any()


class Interrupting:
    """Records on tapes, of which the replay that is `left` = 0 is the last before Ctrl+C."""

    def __init__(self) -> None:
        self.left = -1

    def __call__(self, *args: Any, **options: Any) -> Recorded[Any]:
        recorded = record_on_tape(*args, **options)
        return Recorded(_Interrupted(self, recorded.graph), recorded.result)


class _Interrupted:
    def __init__(self, owner: Interrupting, graph: Any) -> None:
        self._owner, self._graph = owner, graph

    def replay(self) -> None:
        self._graph.replay()
        self._owner.left -= 1
        if self._owner.left == -1:
            raise KeyboardInterrupt


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "moves": (partial(net, torch.float64), nn.CrossEntropyLoss(), {}),
    "moves, kronecker": (partial(net, torch.float64), nn.CrossEntropyLoss(), {"after": 0}),
    "is refused": (Powers, row_sums, {"curvature": "hessian", "bfgs_iterations": 1}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_undone_wherever_it_is_interrupted(name: str) -> None:
    make, loss, options = MODELS[name]
    inputs, targets = classes(60, torch.float64)
    data = inputs.abs(), targets
    plain, model, capture = make(), make(), Interrupting()
    expected = use("eager", ksd(plain, loss, **options))
    optimizer = use("tape", ksd(model, loss, **options), capture)
    for _ in range(3):
        expected.step(data)
        optimizer.step(data)
    for one in (model, plain):
        if isinstance(one, Powers):
            one.reach_zero()
    before, state = parameters_of(model), repr(optimizer.state_dict())
    for replays in range(100):
        capture.left = replays
        try:
            found = optimizer.step(data)
            break
        except KeyboardInterrupt:
            bits = parameters_of(model).view(torch.int64)
            assert torch.equal(bits, before.view(torch.int64)), replays
            assert repr(optimizer.state_dict()) == state
    assert replays > 3
    check_alike([found], [expected.step(data)], rel=1e-6)


PHASES = ["gradient", "basis", "refusal", "search", "refusal_of", "coordinates", "minimize", "take"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_is_undone_in_whichever_phase_an_error_comes(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = net(torch.float64).to(device_of(engine)), on(engine)
    twin = net(torch.float64).to(device_of(engine))
    expected = use("eager", ksd(twin, nn.CrossEntropyLoss()))
    optimizer = use(engine, ksd(model, nn.CrossEntropyLoss()))
    for _ in range(3):
        expected.step(data)
        optimizer.step(data)
    for phase in PHASES:
        before, state = parameters_of(model), repr(optimizer.state_dict())
        whole: Callable[..., Any] = getattr(Iteration, phase)

        def fails(*args: Any, whole: Callable[..., Any] = whole) -> None:
            whole(*args)
            raise RuntimeError("in the midst of it")

        with monkeypatch.context() as patched:
            patched.setattr(Iteration, phase, fails)
            with pytest.raises(RuntimeError, match="in the midst of it"):
                optimizer.step(data)
        assert torch.equal(parameters_of(model), before), phase
        assert repr(optimizer.state_dict()) == state
        check_alike([optimizer.step(data)], [expected.step(data)], rel=1e-4)


# Trainings of other kinds ------------------------------------------------------------------------


def both(engine: str, steps: Callable[[str], list[StepResult]], rel: float = 1e-6) -> None:
    """Steps by the eager engine on the device of another engine, and by that one, are alike."""
    check_alike(steps(engine), steps("eager"), rel)


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
def test_a_copy_goes_on_by_itself(copied: Callable[[Any], Any], engine: str) -> None:
    model, data = net(torch.float64).to(device_of(engine)), on(engine)
    optimizer = use(engine, ksd(model, nn.CrossEntropyLoss()))
    for _ in range(3):
        optimizer.step(data)
    before, twin = parameters_of(model), copied(optimizer)
    names = engine_of(optimizer).graphs.names
    assert not engine_of(twin).graphs.names
    found = [twin.step(data) for _ in range(2)]
    assert torch.equal(parameters_of(model), before)
    assert engine_of(optimizer).graphs.names == names
    check_alike(found, [optimizer.step(data) for _ in range(2)], rel=1e-6)


@pytest.mark.parametrize("engine", RECORDING)
def test_two_optimisers_take_turns_with_one_model(engine: str) -> None:
    def steps(one: str) -> list[StepResult]:
        model, data = net(torch.float64).to(device_of(engine)), on(engine)
        first = use(one, ksd(model, nn.CrossEntropyLoss()))
        second = use(one, METHODS["ncg"](model, nn.CrossEntropyLoss(), weight_decay=0.1))
        return [optimizer.step(data) for _ in range(3) for optimizer in (first, second)]

    both(engine, steps)


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("method", ["ksd, identity", "ksd, kronecker", "hf", "first order"])
def test_a_model_that_reads_numbers_on_the_host_runs_as_it_is(method: str, engine: str) -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.net(x) * (1.0 + 0.01 * float(x.detach().mean()))
            return outputs

    def steps(one: str) -> list[StepResult]:
        optimizer = use(
            one, METHODS[method](Reading().to(device_of(engine)), nn.CrossEntropyLoss())
        )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            results = [optimizer.step(on(engine)) for _ in range(3)]
        assert ["cannot be recorded" in str(w.message) for w in told] == [True] * (one != "eager")
        return results

    both(engine, steps)


@pytest.mark.parametrize("engine", RECORDING)
def test_autocast_is_of_the_step_that_it_is_around(engine: str) -> None:
    device, dtypes = device_of(engine), set[torch.dtype]()

    def steps(one: str) -> list[StepResult]:
        model = net().to(device)
        model.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
        optimizer = use(one, ksd(model, nn.CrossEntropyLoss(), bfgs_iterations=1))
        results = []
        for enabled in (False, False, True, True, False):
            with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
                results.append(optimizer.step(on(engine, dtype=torch.float32)))
        return results

    # In float32 the sums of a recorded gradient round in another way.
    found, expected = steps(engine), steps("eager")
    assert dtypes == {torch.float32, torch.bfloat16}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.status is theirs.status
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-2)
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=5e-2)


@pytest.mark.parametrize("engine", RECORDING)
def test_a_model_may_be_given_another_precision(engine: str) -> None:
    def steps(one: str) -> list[StepResult]:
        model = net().to(device_of(engine))
        optimizer = use(one, ksd(model, nn.CrossEntropyLoss(), bfgs_iterations=2))
        results = [optimizer.step(on(engine, dtype=torch.float32)) for _ in range(3)]
        model.double()
        return results + [optimizer.step(on(engine)) for _ in range(3)]

    both(engine, steps, rel=2e-2)  # of float32, after three steps


@pytest.mark.parametrize("engine", RECORDING)
def test_a_loss_out_of_range_is_scaled(engine: str) -> None:
    """The scale is found in a step, and is that of the steps that follow."""

    def steps(one: str) -> list[StepResult]:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return factor * F.cross_entropy(outputs, targets, reduction="none")

        model, data, results = net().to(device_of(engine)), on(engine, dtype=torch.float32), []
        optimizer = use(one, ksd(model, loss, bfgs_iterations=2))
        for factor in (1.0, 1.0, 1.0, 1e25, 1e25, 1e25):
            results.append(optimizer.step(data))
            assert (optimizer.objective.scale == 1) == (factor == 1)
        return results

    found, expected = steps(engine), steps("eager")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.status is theirs.status
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-3)


@pytest.mark.parametrize("engine", RECORDING)
def test_sets_grow_alike(engine: str) -> None:
    """Each step has B and C of other sizes, which are recorded anew."""
    sizes: list[list[tuple[int, int]]] = []

    def steps(one: str) -> list[StepResult]:
        device = device_of(engine)
        inputs, targets = (tensor.to(device) for tensor in noisy_classes(1200, 4, 3))
        torch.manual_seed(0)
        model = nn.Linear(4, 3, dtype=torch.float64).to(device)
        made = ksd(model, nn.CrossEntropyLoss(), dimension=6, subset_size="auto")
        optimizer = use(one, beginning_small(made))
        results = [optimizer.step((inputs, targets)) for _ in range(8)]
        sizes.append([(step.curvature_samples, step.objective_samples) for step in results])
        return results

    both(engine, steps)
    assert sizes[0] == sizes[1]
    assert len(set(sizes[0])) > 1


@pytest.mark.parametrize("engine", RECORDING)
def test_what_every_preconditioner_needs_stays_when_factors_come(engine: str) -> None:
    optimizer = use(engine, ksd(net(torch.float64).to(device_of(engine)), nn.MSELoss(), after=3))
    inputs, _ = on(engine)
    data, held = (inputs, inputs[:, :3].sin()), []
    for _ in range(5):
        optimizer.step(data)
        held.append(dict(engine_of(optimizer).graphs._held))
    for name in ("evaluation", "noise", "step"):
        assert all(recordings[name] is held[0][name] for recordings in held)
    squares, factors = "gradient and squares", "factors, diagonal"
    for recordings in held[1:3]:
        assert squares in recordings
        assert factors not in recordings
    for recordings in held[3:]:
        assert squares not in recordings
        assert factors in recordings


@pytest.mark.parametrize("engine", RECORDING)
def test_a_number_that_changes_when_factors_come_is_seen(engine: str) -> None:
    """The search goes on with what was recorded before, if that is not stale."""

    def steps(one: str) -> list[StepResult]:
        model = Changing().to(device_of(engine))
        optimizer = use(one, ksd(model, nn.CrossEntropyLoss(), after=3))
        results = []
        for number in (1.0, 1.0, 1.0, 0.3, 0.3):
            model.number = number
            results.append(optimizer.step(on(engine)))
        return results

    both(engine, steps)


@pytest.mark.parametrize("engine", RECORDING)
def test_a_stale_step_is_counted_once(engine: str) -> None:
    """So is its closure called once, and hooks of the optimiser; buffers are as before."""
    model, data = Changing().to(device_of(engine)), on(engine)
    optimizer, calls = use(engine, ksd(model, nn.CrossEntropyLoss())), list[str]()
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    for number in (1.0, 1.0, 1.0, 0.3):
        model.number = number
        before = model.scale.clone()
        optimizer.step(data, closure=lambda: calls.append("closure"))
        assert torch.equal(model.scale, before)
    assert engine_of(optimizer).staleness.times_stale == 1
    assert calls == ["closure", "hook"] * 4
    assert optimizer.steps == 4
    # Outside of steps nothing is stale either.
    model.number = 2.0
    expected = Objective(model, nn.CrossEntropyLoss()).value_and_gradient(data)
    for _ in range(3):
        found = optimizer.objective.value_and_gradient(data)
        assert found.value == pytest.approx(expected.value, rel=1e-12)
        torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"lr": 0.5}])
def test_the_step_that_is_kept_is_the_one_that_was_taken(options: Any, engine: str) -> None:
    """A state that was handed out stays as it was."""
    model = net(torch.float64).to(device_of(engine))
    optimizer = use(engine, ksd(model, nn.CrossEntropyLoss(), previous_steps=2, **options))
    handed_out: list[list[Tensor]] = []
    copies: list[list[Tensor]] = []
    for _ in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        result = optimizer.step(on(engine))
        kept = [optimizer.state[p]["previous_step"] for p in model.parameters()]
        for p, old, step in zip(model.parameters(), before, kept, strict=True):
            torch.testing.assert_close(p.detach(), old + step, rtol=0, atol=1e-15)
        norm = float(torch.cat([step.reshape(-1) for step in kept]).norm())
        assert result.step_norm == pytest.approx(norm, rel=1e-12)
        state = optimizer.state_dict()["state"].values()
        handed_out.append([t for of_p in state for t in of_p.values()])
        copies.append([t.clone() for t in handed_out[-1]])
    for now, then in zip(handed_out, copies, strict=True):
        assert all(map(torch.equal, now, then))


def test_small_models_are_recorded_where_that_is_wanted() -> None:
    large = ksd(nn.Linear(2048, 2049), nn.MSELoss())
    assert not RecordingEngine(large.objective, record_on_tape).possible
    assert engine_of(use("tape", ksd(net(), nn.MSELoss()))).possible
    plain = ksd(net(), nn.MSELoss(), cuda_graphs=False)
    assert plain._engine() is plain.objective.engine


def test_the_first_step_of_a_training_waits_for_no_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KSD, "_eager_steps", 1)
    recording = list[RecordingEngine]()

    def of_a_gpu(optimizer: DataOptimizer) -> RecordingEngine:
        if not recording:
            recording.append(RecordingEngine(optimizer.objective, record_on_tape))
        return recording[0]

    monkeypatch.setattr(DataOptimizer, "_engine", of_a_gpu)
    model, data = net(torch.float64), on("tape")
    optimizer = KSD(model, nn.CrossEntropyLoss())
    assert optimizer.step(data).status.moved
    assert not recording[0].graphs.names
    optimizer.step(data)
    assert recording[0].graphs.names
    # A resumed training goes on as the one that was not interrupted.
    resumed = KSD(copy.deepcopy(model), nn.CrossEntropyLoss())
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed._engine() is optimizer._engine()


@pytest.mark.gpu
def test_other_threads_may_use_the_device_meanwhile() -> None:
    """As those of data loaders do, which would break a recording that minds."""
    over = threading.Event()

    def copy_to_device() -> None:
        while not over.is_set():
            torch.ones(100_000).to("cuda")

    thread = threading.Thread(target=copy_to_device)
    thread.start()
    try:
        for _ in range(3):
            optimizer = ksd(net(torch.float64).cuda(), nn.CrossEntropyLoss())
            assert all(optimizer.step(on("cuda")).status.moved for _ in range(3))
    finally:
        over.set()
        thread.join()

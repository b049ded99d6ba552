"""Recorded products and evaluations give the numbers of those that are not recorded."""

import threading
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, LBFGS, HessianFree, KroneckerFactors, NonlinearCG, Objective
from krylov_descent.curvature.preconditioners.preconditioner import FisherDiagonal
from krylov_descent.curvature.products import Curvature, CurvatureKind
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.optimizers.base import DataOptimizer

pytestmark = pytest.mark.gpu


def small_net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    return net.to("cuda", dtype)


def samples(count: int = 64, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(count, 6, generator=generator).to("cuda", dtype)
    targets = torch.randint(0, 3, (count,), generator=generator).cuda()
    return inputs, targets


def towards_numbers(count: int = 200) -> tuple[Tensor, Tensor]:
    """Samples for a loss whose normaliser is known on the host, so that nothing waits for it."""
    inputs, _ = samples(count, torch.float64)
    generator = torch.Generator().manual_seed(3)
    return inputs, torch.randn(count, 3, generator=generator).to(inputs)


@pytest.mark.parametrize("kind", ["gauss-newton", "hessian", "fisher"])
def test_recorded_products_equal_plain_ones_at_every_step(kind: CurvatureKind) -> None:
    net, data = small_net(torch.float64), samples(dtype=torch.float64)
    objectives = [
        Objective(net, nn.CrossEntropyLoss(), cuda_graphs=recorded) for recorded in (True, False)
    ]
    vector = torch.randn(objectives[0].parameters.numel, dtype=torch.float64, device="cuda")
    for _ in range(3):  # recorded at the first, replayed at the others
        found = [Curvature(kind).at(objective, data)(vector) for objective in objectives]
        assert torch.allclose(found[0], found[1], rtol=1e-12, atol=1e-14)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1 * torch.randn_like(p))


def with_factors(after: int) -> Callable[..., DataOptimizer]:
    """KSD with Kronecker factors of its own each time."""
    return lambda *args, **options: KSD(
        *args, preconditioner=KroneckerFactors(after=after), **options
    )


METHODS = [
    KSD,
    partial(KSD, previous_steps=1),
    with_factors(after=0),
    with_factors(after=2),
    partial(KSD, preconditioner="identity"),
    HessianFree,
    partial(NonlinearCG, iterations=3),
    partial(LBFGS, iterations=3),
]


@pytest.mark.parametrize("method", METHODS)
def test_a_recorded_run_is_the_plain_run(method: Callable[..., DataOptimizer]) -> None:
    data = samples(200, torch.float64)
    runs = []
    for recorded in (True, False):
        optimizer = method(small_net(torch.float64), nn.CrossEntropyLoss(), cuda_graphs=recorded)
        runs.append([optimizer.step(data) for _ in range(4)])
        held = optimizer.objective.recordings._held
        assert any(name.startswith("gradient") for name in held) == recorded
        assert ("evaluation" in held) == (recorded and isinstance(optimizer, KSD))
    for recorded_step, plain_step in zip(*runs, strict=True):
        # Sums in another order: 1e-16 at first, and a thousand times as much with every step, as
        # a search that goes down to the rounding of its values may end earlier or later.
        assert recorded_step.loss == pytest.approx(plain_step.loss, rel=1e-6)
        assert recorded_step.rank == plain_step.rank


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss()])
@pytest.mark.parametrize("rest", [nn.Identity, nn.LayerNorm])  # of which one has the diagonal
def test_recorded_factors_are_the_plain_ones(loss: nn.Module, rest: type[nn.Module]) -> None:
    net, (inputs, classes) = small_net(torch.float64), samples(dtype=torch.float64)
    net.insert(1, rest(16).to(inputs))
    squared = isinstance(loss, nn.MSELoss)
    targets = torch.randn(len(inputs), 3).to(inputs) if squared else classes
    objectives = [Objective(net, loss, cuda_graphs=recorded) for recorded in (True, False)]
    made = [KroneckerFactors(), KroneckerFactors()]
    for _ in range(3):
        for objective, factors in zip(objectives, made, strict=True):
            factors.update(objective, (inputs, targets))
            factors.learn(objective, [Batch(inputs, targets, len(inputs))])
        for ours, theirs in zip(made[0].tensors, made[1].tensors, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1 * torch.randn_like(p))
    assert any(name.startswith("factors") for name in objectives[0].recordings._held)


def test_what_the_first_step_records_serves_those_that_follow() -> None:
    """Though they have more previous steps, up to three."""
    optimizer = KSD(small_net(torch.float64), nn.CrossEntropyLoss())
    bases = []
    for _ in range(5):
        optimizer.step(samples(200, torch.float64))
        held = optimizer.objective.recordings._held
        bases.append(next(held[name][1] for name in held if name.startswith("basis")))
    assert all(basis is bases[0] for basis in bases)


def test_a_compiled_model_stays_compiled_where_its_gradient_is_taken() -> None:
    net = torch.compile(small_net(torch.float64), backend="eager")
    assert isinstance(net, nn.Module)
    objective = Objective(net, nn.CrossEntropyLoss())
    for _ in range(3):
        objective.value_and_gradient(samples(dtype=torch.float64))
    assert "gradient" not in objective.recordings._held


def test_a_gradient_is_recorded_when_it_is_asked_for_again() -> None:
    """And not for sets in turn, of which each would take the place of the other."""
    net = small_net(torch.float64)
    recorded = Objective(net, nn.CrossEntropyLoss())
    plain = Objective(net, nn.CrossEntropyLoss(), cuda_graphs=False)
    held = []
    for count in (64, 48, 64, 48, 48, 48):
        data = samples(count, torch.float64)
        ours, theirs = (objective.value_and_gradient(data) for objective in (recorded, plain))
        assert ours.value == pytest.approx(theirs.value, rel=1e-12)
        torch.testing.assert_close(ours.gradient, theirs.gradient, rtol=1e-10, atol=1e-14)
        held.append("gradient" in recorded.recordings._held)
    assert held == [False, False, False, False, True, True]


@pytest.mark.parametrize("decay", [[0.0, 0.0], [0.1, 0.1], [0.1, 0.2]])
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss(ignore_index=1)])
def test_recorded_means_and_diagonals_are_the_plain_ones(
    decay: list[float], loss: nn.Module
) -> None:
    net, (inputs, targets) = small_net(torch.float64), samples(200, torch.float64)
    if isinstance(loss, nn.MSELoss):
        inputs, targets = towards_numbers()
    groups = [
        {"params": list(net[i].parameters()), "weight_decay": own}
        for i, own in zip((0, 2), decay, strict=True)
    ]
    objectives = [
        Objective(net, loss, params=groups, cuda_graphs=recorded) for recorded in (True, False)
    ]
    diagonals = [FisherDiagonal(), FisherDiagonal()]
    for count in (200, 200, 200, 150):
        ours, theirs = (
            diagonal.update(objective, (inputs[:count], targets[:count]))
            for objective, diagonal in zip(objectives, diagonals, strict=True)
        )
        assert ours.value == pytest.approx(theirs.value, rel=1e-12)
        assert (ours.samples, ours.normaliser) == (theirs.samples, theirs.normaliser)
        torch.testing.assert_close(ours.gradient, theirs.gradient, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(
            diagonals[0].diagonal, diagonals[1].diagonal, rtol=1e-10, atol=1e-14
        )
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1 * torch.randn_like(p))
    assert "gradient and squares" in objectives[0].recordings._held


def test_autocast_around_an_objective_is_seen() -> None:
    objective, data = Objective(small_net(), nn.CrossEntropyLoss()), samples()
    exact = objective.value_and_gradient(data)
    with torch.autocast("cuda", torch.bfloat16):
        rounded = [objective.value_and_gradient(data).gradient for _ in range(3)]
    again = [objective.value_and_gradient(data).gradient for _ in range(3)]
    for gradient in rounded:
        assert (gradient - exact.gradient).norm() > 1e-4 * exact.gradient.norm()
    for gradient in again:
        torch.testing.assert_close(gradient, exact.gradient, rtol=1e-5, atol=1e-7)


def test_what_only_the_first_steps_record_is_let_go() -> None:
    """With Kronecker factors there are no squares any more."""
    optimizer = with_factors(after=3)(small_net(), nn.CrossEntropyLoss())
    held = []
    for _ in range(6):
        optimizer.step(samples(200))
        held.append(dict(optimizer.objective.recordings._held))
    assert held[2].keys() & {"gradient", "gradient and squares"} == {"gradient and squares"}
    assert held[5].keys() & {"gradient", "gradient and squares"} == {"gradient"}


def test_the_basis_is_recorded_as_a_whole_where_its_preconditioner_stays() -> None:
    """Until then the product is, and the search goes on with what it has."""
    optimizer = with_factors(after=3)(small_net(), nn.CrossEntropyLoss())
    held = []
    for _ in range(6):
        optimizer.step(samples(200))
        held.append(dict(optimizer.objective.recordings._held))
    basis, product = "basis of gauss-newton", "product gauss-newton"
    assert [sorted(names.keys() & {basis, product}) for names in held] == [[product]] * 3 + [
        [basis]
    ] * 3
    for name in ("evaluation", "noise"):
        assert all(names[name] is held[0][name] for names in held)


def test_a_number_that_changes_when_the_factors_come_is_seen() -> None:
    """The search goes on with what was recorded before, if that still holds."""

    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.beta = small_net(torch.float64), 1.0

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.beta * self.net(x)
            return result

    model, data = Tempered(), samples(200, torch.float64)
    optimizer = with_factors(after=3)(model, nn.CrossEntropyLoss(), subset_size=1.0)
    for step in range(6):
        model.beta = 1.0 if step < 3 else 2.0
        found = optimizer.step(data)
        assert found.loss_before == pytest.approx(found.loss, rel=1e-9)  # C is A


def test_a_preconditioner_of_ones_own_has_recorded_evaluations() -> None:
    class Halved:
        """D = ½, made anew at every step, so that the basis cannot be recorded as a whole."""

        def update(self, objective: Objective, data: object) -> Evaluation:
            self._half = torch.tensor(0.5, device="cuda", dtype=torch.float64)
            return objective.value_and_gradient(data)

        def solve(self, vector: Tensor) -> Tensor:
            return vector / self._half

        def multiply(self, vector: Tensor) -> Tensor:
            return vector * self._half

    data = samples(200, torch.float64)
    runs = []
    for recorded in (True, False):
        net = small_net(torch.float64)
        optimizer = KSD(net, nn.CrossEntropyLoss(), preconditioner=Halved(), cuda_graphs=recorded)
        runs.append([optimizer.step(data).loss for _ in range(3)])
        names = {"evaluation", "product gauss-newton", "basis of gauss-newton"}
        expected = {"evaluation", "product gauss-newton"} if recorded else set()
        assert names & optimizer.objective.recordings._held.keys() == expected
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)


def test_other_threads_may_use_the_device_meanwhile() -> None:
    """As those of data loaders do, which would break a recording that minds."""
    over = threading.Event()

    def copy() -> None:
        while not over.is_set():
            torch.ones(100_000).to("cuda")

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                optimizer = KSD(small_net(), nn.CrossEntropyLoss())
                assert all(optimizer.step(samples(200)).status.moved for _ in range(3))
    finally:
        over.set()
        thread.join()


class Scaled(nn.Module):
    """A net with a number that no recording knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = small_net(torch.float64), 1.0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.scale * self.net(x)
        return result


def test_a_changed_number_in_the_forward_pass_is_seen() -> None:
    model, data = Scaled(), samples(dtype=torch.float64)
    recorded = Objective(model, nn.CrossEntropyLoss())
    plain = Objective(model, nn.CrossEntropyLoss(), cuda_graphs=False)
    vector = torch.ones(plain.parameters.numel, dtype=torch.float64, device="cuda")
    curvature = Curvature()
    curvature.at(recorded, data)(vector)
    model.scale = 2.0
    found = curvature.at(recorded, data)(vector)
    assert torch.allclose(found, Curvature().at(plain, data)(vector), rtol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_a_number_that_changes_between_steps_is_seen(method: Callable[..., DataOptimizer]) -> None:
    data = samples(200, torch.float64)
    runs = []
    for recorded in (True, False):
        model = Scaled()
        optimizer = method(model, nn.CrossEntropyLoss(), cuda_graphs=recorded)
        losses = []
        for scale in (1.0, 1.0, 1.0, 0.8, 0.8):
            model.scale = scale
            losses.append(optimizer.step(data).loss)
        runs.append(losses)
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)


class Noted(nn.Module):
    """Writes to a buffer and reads it again: side by side, passes would read each other's."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net(torch.float64)
        self.register_buffer("last", torch.zeros(200, 3, dtype=torch.float64, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x)
        self.last[: len(x)].copy_(outputs.detach())
        return outputs + 0.5 * self.last[: len(x)]


class TowardsItself(nn.Module):
    """A forward pass that differentiates towards its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.net[2].bias
        assert isinstance(bias, Tensor)
        (slope,) = torch.autograd.grad(bias.square().sum(), bias, create_graph=True)
        result: Tensor = self.net(x) - 0.1 * slope
        return result


@pytest.mark.parametrize("model", [partial(small_net, torch.float64), Noted, TowardsItself])
def test_the_noise_is_recorded_whatever_the_forward_pass_does(
    model: Callable[[], nn.Module],
) -> None:
    data = samples(200, torch.float64)
    found = []
    for recorded in (True, False):
        optimizer = KSD(model(), nn.CrossEntropyLoss(), cuda_graphs=recorded)
        optimizer.step(data)  # the first has no step before it, and measures without a recording
        found.append(optimizer.step(data).noise)
        assert ("noise" in optimizer.objective.recordings._held) == recorded
    # Of rounding, and so as large with other kernels, if not the same.
    assert found[1] / 3 < found[0] < 3 * found[1]


def test_parameters_that_moved_elsewhere_are_seen() -> None:
    net, data = small_net(torch.float64), samples(dtype=torch.float64)
    optimizer = KSD(net, nn.CrossEntropyLoss())
    optimizer.step(data)
    with torch.no_grad():
        for p in net.parameters():
            p.data = p.data.clone()
    plain = Objective(net, nn.CrossEntropyLoss(), cuda_graphs=False)
    expected = plain.value(data)
    assert optimizer.step(data).loss == pytest.approx(expected, rel=1e-12)
    assert optimizer.step(data).status.moved


def test_a_model_that_reads_numbers_on_the_host_runs_without() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net(torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.net(x) * (1.0 + 0.0 * float(x.detach().sum()))
            return result

    optimizer = KSD(Reading(), nn.CrossEntropyLoss(), preconditioner="identity")
    with pytest.warns(UserWarning, match="cannot be recorded"):
        first = optimizer.step(samples(dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = optimizer.step(samples(dtype=torch.float64))
    assert first.status.moved
    assert second.loss < first.loss


def test_other_sizes_are_recorded_anew() -> None:
    optimizer = KSD(small_net(torch.float64), nn.CrossEntropyLoss())
    inputs, targets = samples(dtype=torch.float64)
    losses = [optimizer.step((inputs[:n], targets[:n])).loss for n in (64, 48, 64)]
    assert losses[2] < losses[0]


def test_unused_graphs_are_not_recorded_for_large_models() -> None:
    large = nn.Linear(4096, 4200, device="cuda")
    assert not Objective(large, nn.MSELoss()).recordings.possible
    assert Objective(small_net(), nn.MSELoss()).recordings.possible
    assert not Objective(small_net(), nn.MSELoss(), cuda_graphs=False).recordings.possible


def test_all_samples_may_stay_where_they_are_change_there_and_move() -> None:
    """Recordings read them in place, while they stay."""
    losses = []
    for recorded in (True, False):
        inputs, targets = towards_numbers()
        optimizer = KSD(small_net(torch.float64), nn.MSELoss(), cuda_graphs=recorded)
        losses.append([optimizer.step((inputs, targets)).loss for _ in range(3)])
        inputs.mul_(2)
        losses[-1].append(optimizer.step((inputs, targets)).loss)
        elsewhere = inputs / 3
        losses[-1] += [optimizer.step((x, targets)).loss for x in (elsewhere, inputs, elsewhere)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len({round(loss, 6) for loss in losses[0]}) == 7

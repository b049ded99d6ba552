"""The essentials once more on a GPU: products, steps, resuming, precision and memory.

`make test-gpu` runs them where there is a GPU; elsewhere they are skipped by name.
"""

import copy
import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Objective, Status
from krylov_descent.algorithms.basis_storage import Alone, Storage
from krylov_descent.algorithms.subspace import krylov_basis
from krylov_descent.curvature.preconditioners.preconditioner import Identity
from krylov_descent.curvature.products import Curvature, CurvatureKind
from krylov_descent.optimizers.ksd.ksd_state import PREVIOUS_STEP
from krylov_descent.runtime.precision import derivatives_in_tf32
from tests import dense
from tests.preconditioners import at_once
from tests.problems import Problem, make

# cuBLAS is deterministic only with this, which it reads when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NETWORKS = ["mlp", "conv", "gru", "lstm", "attention", "transformer"]


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
        return nn.Sequential(*layers).to(DEVICE, dtype)


def samples(count: int = 40, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        x, y = torch.randn(count, 5, dtype=dtype), torch.randn(count, 3, dtype=dtype)
        return x.to(DEVICE), y.to(DEVICE)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# Against the CPU in float64 -----------------------------------------------------------------------


def curvature_matrix(problem: Problem, kind: CurvatureKind) -> Tensor:
    if kind == "gauss-newton":
        return dense.gauss_newton(problem)
    if kind == "hessian":
        return dense.hessian(problem)
    rows = dense.per_sample_gradients(problem)
    return rows.T @ rows / len(rows)


@pytest.mark.parametrize("kind", ["gauss-newton", "hessian", "fisher"])
@pytest.mark.parametrize("name", NETWORKS)
def test_products_are_those_of_the_dense_matrix(name: str, kind: CurvatureKind) -> None:
    problem = make(name, "cross-entropy")
    H = curvature_matrix(problem, kind)
    vectors = torch.randn(2, len(H), dtype=torch.float64)
    objective = Objective(problem.model.to(DEVICE), problem.loss)
    product = Curvature(kind).at(objective, problem.data)  # the data come along from the CPU
    for vector in vectors:
        found = product(vector.to(DEVICE))
        assert found.device.type == DEVICE
        torch.testing.assert_close(found.cpu(), H @ vector, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
def test_steps_are_those_of_the_cpu(name: str) -> None:
    here, there = make(name, "cross-entropy"), make(name, "cross-entropy")
    there.model.to(DEVICE)
    expected = KSD(here.model, here.loss, dimension=3, weight_decay=0.01)
    optimizer = KSD(there.model, there.loss, dimension=3, weight_decay=0.01)
    for _ in range(3):
        theirs, ours = expected.step(here.data), optimizer.step(there.data)
        assert ours.status is theirs.status is Status.MOVED
        assert ours.rank == theirs.rank
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.loss_after == pytest.approx(theirs.loss_after, rel=1e-6)
    torch.testing.assert_close(flat(there.model).cpu(), flat(here.model), rtol=1e-3, atol=1e-4)


def test_random_sets_are_those_of_the_cpu() -> None:
    x, y = samples(dtype=torch.float64)
    model = network(dtype=torch.float64)
    twin = copy.deepcopy(model).cpu()
    ours = KSD(model, nn.MSELoss(), dimension=3, subset_size=10).step((x, y))
    theirs = KSD(twin, nn.MSELoss(), dimension=3, subset_size=10).step((x.cpu(), y.cpu()))
    assert ours.loss_before == pytest.approx(theirs.loss_before, rel=1e-10)
    assert ours.loss_after == pytest.approx(theirs.loss_after, rel=1e-8)


@pytest.mark.parametrize("preconditioner", ["fisher-diagonal", "kronecker", "identity"])
def test_one_step_reaches_the_minimum_of_a_quadratic(preconditioner: str) -> None:
    """With K above n, so that the basis breaks down, which no host decision may be needed for."""
    x, y = samples(dtype=torch.float64)
    model = nn.Linear(5, 3).to(DEVICE, torch.float64)
    chosen = at_once(preconditioner)
    result = KSD(model, nn.MSELoss(), dimension=30, preconditioner=chosen).step((x, y))
    X = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    w = torch.linalg.solve(X.T @ X, X.T @ y)
    assert result.rank <= 18
    torch.testing.assert_close(model.weight.detach(), w[:5].T, rtol=0, atol=1e-12)
    torch.testing.assert_close(model.bias.detach(), w[5], rtol=0, atol=1e-12)


# Contracts ----------------------------------------------------------------------------------------


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_resuming_goes_on_bit_for_bit() -> None:
    def start() -> tuple[nn.Module, KSD]:
        model = network()
        return model, KSD(model, nn.MSELoss(), dimension=3, subset_size=12)

    with deterministic():
        model, optimizer = start()
        for _ in range(2):
            assert optimizer.step(samples()).status is Status.MOVED
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        fresh, resumed = start()
        fresh.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        for _ in range(2):
            optimizer.step(samples())
            resumed.step(samples())
            assert torch.equal(flat(model), flat(fresh))


def test_copies_of_model_and_optimizer_go_on_alike() -> None:
    model = network()
    optimizer = KSD(model, nn.MSELoss(), dimension=3)
    optimizer.step(samples())
    twin, copied = copy.deepcopy((model, optimizer))
    for _ in range(2):
        expected, found = optimizer.step(samples()), copied.step(samples())
        assert found.loss_after == pytest.approx(expected.loss_after, rel=1e-5)
    assert copied.objective.network.model is twin


def test_a_refused_step_leaves_the_bits_as_before() -> None:
    x, y = samples()
    model = network()
    optimizer = KSD(model, nn.MSELoss(), dimension=3)
    assert optimizer.step((x, y)).status is Status.MOVED
    before = flat(model)
    refusals: list[dict[str, Any]] = [
        {"data": (x, y * math.nan)},
        {"data": (x, y), "curvature_data": (x * math.nan, y)},
        {"data": (x, y), "objective_data": (x, y * math.inf)},
    ]
    for sets in refusals:
        assert optimizer.step(**sets).status is Status.NOT_FINITE
        assert torch.equal(flat(model), before)
    optimizer.param_groups[0]["lr"] = 0.0
    assert optimizer.step((x, y)).status is Status.NO_DECREASE
    assert torch.equal(flat(model), before)
    assert all(p.grad is None for p in model.parameters())


def test_grad_scaler_is_refused() -> None:
    x, y = samples()
    model = network()
    before, optimizer = flat(model), KSD(model, nn.MSELoss(), dimension=3)
    scaler = torch.amp.GradScaler(DEVICE)
    scaler.scale(nn.MSELoss()(model(x), y)).backward()
    with pytest.raises(RuntimeError, match="does not work with GradScaler"):
        scaler.step(optimizer)
    assert torch.equal(flat(model), before)
    optimizer.zero_grad()
    assert optimizer.step((x, y)).status is Status.MOVED


def test_parameters_on_two_devices_are_refused() -> None:
    model = network()
    model[2].cpu()
    with pytest.raises(ValueError, match="must share one device, found cpu, cuda"):
        KSD(model, nn.MSELoss())


# Precision ----------------------------------------------------------------------------------------


def test_autocast_is_for_the_forward_pass_alone() -> None:
    (x, y), model = samples(), network()
    seen: set[torch.dtype] = set()
    model.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    optimizer = KSD(model, nn.MSELoss(), dimension=3)
    losses = []
    for _ in range(4):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            result = optimizer.step((x, y))
        losses.append(result.loss)
    assert seen == {torch.bfloat16}
    assert losses[-1] < 0.9 * losses[0]
    assert all(s[PREVIOUS_STEP].dtype == torch.float32 for s in optimizer.state.values())


def test_the_noise_of_tf32_is_measured() -> None:
    """A step in tf32 knows that its values are noisier, and still goes down."""
    # Of sizes that cuBLAS has tensor cores for.
    data = torch.randn(512, 64, device=DEVICE), torch.randn(512, 64, device=DEVICE)
    start = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(DEVICE)
    noise = {}
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            optimizer = KSD(copy.deepcopy(start), nn.MSELoss(), dimension=5)
            results = [optimizer.step(data) for _ in range(3)]
            noise[precision] = results[0].noise
            assert all(result.status is Status.MOVED for result in results)
            assert results[-1].loss < results[0].loss
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert noise["tf32"] > 3 * noise["ieee"] > 0


def test_tf32_is_for_derivatives_and_not_for_values() -> None:
    data = torch.randn(512, 64, device=DEVICE), torch.randn(512, 64, device=DEVICE)
    start = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(DEVICE)
    exact, rounded = (
        KSD(copy.deepcopy(start), nn.MSELoss(), dimension=5, tf32=tf32) for tf32 in (False, True)
    )
    first, other = exact.step(data), rounded.step(data)
    assert (first.loss, first.loss_before) == (other.loss, other.loss_before)
    assert first.gradient_norm != other.gradient_norm
    assert other.gradient_norm == pytest.approx(first.gradient_norm, rel=1e-3)
    # The search goes on until float32's noise, not tf32's.
    assert other.noise < 3 * first.noise
    for _ in range(3):  # recorded by now
        value = rounded.objective.value(data)
        assert rounded.step(data).loss == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("told", ["none", "ieee"])
def test_squares_are_rough_unless_torch_was_told_not_to(told: str) -> None:
    data = torch.randn(4096, 64, device=DEVICE), torch.randn(4096, 64, device=DEVICE)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(DEVICE)
    exact = Objective(copy.deepcopy(model).double(), nn.MSELoss())
    expected = exact.value_gradient_and_squares(tuple(t.double() for t in data))
    settings: Any = torch.backends.cuda.matmul  # whose annotations lack the setting
    before = settings.fp32_precision
    try:
        settings.fp32_precision = told
        found = Objective(model, nn.MSELoss()).value_gradient_and_squares(data)
        assert settings.fp32_precision == told
    finally:
        settings.fp32_precision = before
    error = float((found.squares / expected.squares - 1).abs().max())
    assert 1e-5 < error < 2e-3 if told == "none" else error < 1e-5
    torch.testing.assert_close(found.gradient.double(), expected.gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_rounding_to_tf32_is_no_missing_derivative(seed: int) -> None:
    """The check of double backward knows the precision: no warning, and the graphs are kept."""
    torch.manual_seed(seed)
    sizes = 784, 400, 200, 400, 784
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.Sigmoid())]
    x = torch.rand(64, 784, device=DEVICE)
    model = nn.Sequential(*layers[:-1]).to(DEVICE)
    result = KSD(model, nn.BCEWithLogitsLoss(), dimension=3, tf32=True).step((x, x))
    assert result.graphs_kept


def test_a_basis_in_tf32_is_orthonormal_to_float32() -> None:
    data = torch.randn(512, 64, device=DEVICE), torch.randn(512, 64, device=DEVICE)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(DEVICE)
    objective = Objective(model, nn.MSELoss())
    with derivatives_in_tf32(True):
        gradient = objective.value_and_gradient(data).gradient
        product = Curvature("gauss-newton").at(objective, data)
        found = krylov_basis(
            product, Identity(), gradient, [], 20, placement=Alone(len(gradient)), storage=Storage()
        )
    basis = found.rows.stored.double()
    assert found.rank == 20
    torch.testing.assert_close(found.gram.double(), (basis @ basis.t()).cpu(), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        basis @ basis.t(), torch.eye(20, device=DEVICE, dtype=torch.float64), atol=1e-5, rtol=0
    )


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"micro_batch": 3}, {"activation_memory": 1000}, {"previous_steps": 1}],
    ids=str,
)
def test_a_step_takes_at_most_so_many_vectors(settings: dict[str, int]) -> None:
    """On a model too large to be recorded, with activations of less than a tenth of a vector."""
    K, m, width = 10, settings.get("previous_steps", 3), 3000
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(DEVICE)
    data = torch.randn(8, width, device=DEVICE), torch.randn(8, width, device=DEVICE)

    def build() -> KSD:
        return KSD(model, nn.MSELoss(), dimension=K, **settings)  # type: ignore[arg-type]

    build().step(data)  # the libraries take their workspaces
    optimizer = build()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ranks = [optimizer.step(data).rank for _ in range(1 + m)]
    peak = torch.cuda.max_memory_allocated() - before
    assert ranks == list(range(K, K + m + 1))
    assert K + 2 * m + 1 < peak / (4 * flat(model).numel()) <= K + (8 if m == 1 else 3 * m + 3)

"""Optimisers in several threads do not disturb each other, and switches are put back."""

import gc
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, HessianFree, NonlinearCG
from krylov_descent.algorithms.coordinates import Coordinates
from krylov_descent.curvature.forward_mode import unfused_attention
from krylov_descent.optimizers import base
from krylov_descent.runtime.precision import SETTINGS
from krylov_descent.runtime.threads import (
    Shared,
    collector_paused,
    cuda_turn,
    one_thread,
    step_turn,
)
from tests.optimizers.nets import classes, net, parameters_of

THREADS = 3
LONG, SHORT = 30.0, 0.05  # seconds: more than anything takes; enough for a thread to get somewhere
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


class Other:
    """A thread of its own that enters contexts and leaves them when told to."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def call(self, function: Callable[[], Any]) -> Any:
        """What a function gives there."""
        return self._pool.submit(function).result(LONG)

    def begin(self, function: Callable[[], Any]) -> "Future[Any]":
        """The same, later."""
        return self._pool.submit(function)

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def other() -> Iterator[Other]:
    thread = Other()
    yield thread
    thread.close()


def enter(context: AbstractContextManager[Any]) -> None:
    context.__enter__()


def leave(context: AbstractContextManager[Any]) -> None:
    context.__exit__(None, None, None)


def is_waiting(future: "Future[Any]") -> bool:
    with pytest.raises(TimeoutError):
        future.result(SHORT)
    return True


def test_one_thread_and_then_as_many_as_before() -> None:
    with one_thread():
        assert torch.get_num_threads() == 1
        with one_thread():
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == THREADS


def test_an_error_does_not_leave_one_thread_behind() -> None:
    coordinates = Coordinates(torch.full((3, 3), torch.nan).double(), torch.eye(3), 1e-4)
    with pytest.raises(RuntimeError, match="linalg"):
        coordinates.find()
    assert torch.get_num_threads() == THREADS


def test_one_thread_is_for_the_calling_thread_alone(other: Other) -> None:
    with step_turn(CPU):
        assert other.call(torch.get_num_threads) == THREADS
    with one_thread():
        assert other.call(torch.get_num_threads) == THREADS


def test_a_step_that_begins_while_another_thread_has_one_thread(other: Other) -> None:
    def count() -> int:
        with step_turn(CPU):
            return torch.get_num_threads()

    with one_thread():  # the other one has not used torch yet: it would take this over for good
        found = other.begin(count)
        assert is_waiting(found)
    assert found.result(LONG) == THREADS


def test_steps_on_cuda_take_turns_and_others_do_not_wait(other: Other) -> None:
    def enter_and_leave(device: torch.device) -> None:
        with step_turn(device), step_turn(device):
            pass

    with step_turn(CUDA):
        other.call(partial(enter_and_leave, CPU))
        waiting = other.begin(partial(enter_and_leave, CUDA))
        assert is_waiting(waiting)
    waiting.result(LONG)
    with pytest.raises(ZeroDivisionError), step_turn(CUDA):
        _ = 1 / 0
    other.call(partial(enter_and_leave, CUDA))


@pytest.mark.parametrize("kind", [KSD, HessianFree, NonlinearCG])
def test_every_step_on_cuda_takes_its_turn(
    kind: Any, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[torch.device] = []

    def as_if_on_cuda(device: torch.device) -> AbstractContextManager[None]:
        devices.append(device)
        return step_turn(CUDA)

    def turn() -> None:
        with cuda_turn():
            pass

    waiting: list[Future[Any]] = []

    def forward(model: nn.Module, inputs: Tensor) -> Any:
        if not waiting:
            waiting.append(other.begin(turn))
            assert is_waiting(waiting[0])
        return model(inputs)

    monkeypatch.setattr(base, "step_turn", as_if_on_cuda)
    kind(net(), nn.CrossEntropyLoss(), forward=forward).step(classes())
    waiting[0].result(LONG)
    assert devices == [CPU]


SWITCHES: dict[str, tuple[Shared, Callable[[], Any], Any]] = {
    "garbage": (collector_paused, gc.isenabled, False),
    "attention": (unfused_attention, torch.backends.cuda.flash_sdp_enabled, False),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_the_first_thread_sets_a_switch_and_the_last_one_puts_it_back(
    name: str, other: Other
) -> None:
    context, state, inside = SWITCHES[name]
    outside = state()
    assert outside != inside
    enter(context)
    other.call(partial(enter, context))
    assert state() == inside
    leave(context)  # the first one; the other is still in it
    assert state() == inside
    other.call(partial(leave, context))
    assert state() == outside


@pytest.mark.parametrize("name", SWITCHES)
def test_an_error_puts_a_switch_back(name: str) -> None:
    context, state, inside = SWITCHES[name]
    outside = state()
    with pytest.raises(ZeroDivisionError), context, context:
        _ = 1 / (state() != inside)
    assert state() == outside


def test_what_was_switched_off_outside_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused:
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_context_that_cannot_be_entered_is_not_entered() -> None:
    made: list[str] = []

    @contextmanager
    def fails_once() -> Iterator[None]:
        made.append("made")
        if len(made) == 1:
            raise RuntimeError("not now")
        yield
        made.append("left")

    shared = Shared(fails_once)
    with pytest.raises(RuntimeError, match="not now"), shared:
        pass
    with shared:
        pass
    assert made == ["made", "made", "left"]


class Trained:
    """A model and an optimiser for it."""

    def __init__(self, model: nn.Module, data: Any, **options: Any) -> None:
        self.model, self.data = model, data
        self.optimizer = KSD(model, nn.CrossEntropyLoss(), dimension=4, **options)
        self.seen: list[Any] = []

    def step(self) -> None:
        result = self.optimizer.step(self.data)
        counts = result.status, result.products, result.evaluations
        self.seen.append((counts, result.loss, parameters_of(self.model), torch.get_num_threads()))

    def bits(self) -> list[Any]:
        return [(*rest, p.numpy().tobytes(), threads) for *rest, p, threads in self.seen]


def two() -> tuple[Trained, Trained]:
    """With squared gradients by layers and by random signs; one of them sets the precision, too."""
    images = torch.randn(60, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(3, (60,), generator=torch.Generator().manual_seed(1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        convolutional = nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
        )
    return Trained(net(), classes(), tf32=True), Trained(convolutional, (images, labels))


def switches() -> tuple[Any, ...]:
    return (
        torch.get_num_threads(),
        SETTINGS.fp32_precision,
        gc.isenabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cudnn.enabled,
        list(warnings.filters),
    )


STEPS = 4


def in_threads(jobs: list[Callable[[], Any]], *, at_once: bool) -> None:
    """Run jobs in threads of their own, one after the other or step by step at once."""
    barrier = threading.Barrier(len(jobs) if at_once else 1)

    def steps(job: Callable[[], Any]) -> None:
        for _ in range(STEPS):
            barrier.wait(LONG)
            job()

    with ThreadPoolExecutor(1 if not at_once else len(jobs)) as pool:
        for future in [pool.submit(steps, job) for job in jobs]:
            future.result(2 * LONG)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Python changes threads two hundred times as often as by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 200)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_switches")
def test_steps_at_once_have_the_bits_of_steps_one_after_the_other() -> None:
    before = switches()
    found = []
    for at_once in (False, True):
        pair = two()
        in_threads([trained.step for trained in pair], at_once=at_once)
        found.append([trained.bits() for trained in pair])
        assert switches() == before
    assert found[0] == found[1]
    assert {threads for bits in found[1] for *_, threads in bits} == {THREADS}


@pytest.mark.usefixtures("frequent_switches")
def test_a_step_that_fails_does_not_disturb_one_beside_it() -> None:
    before = switches()
    alone, beside = two()[1], two()[1]
    failures: list[RuntimeError] = []

    def broken(model: nn.Module, inputs: Tensor) -> Any:
        if torch.is_grad_enabled() and len(failures) < STEPS and optimizer.steps:
            raise RuntimeError("broken")
        return model(inputs)

    optimizer = KSD(net(), nn.CrossEntropyLoss(), forward=broken, tf32=True)

    def fail() -> None:
        try:
            optimizer.step(classes())
        except RuntimeError as problem:
            failures.append(problem)

    in_threads([alone.step], at_once=False)
    in_threads([beside.step, fail], at_once=True)
    assert len(failures) == STEPS - 1
    assert alone.bits() == beside.bits()
    assert switches() == before


@pytest.mark.gpu
def test_no_step_has_the_precision_of_one_beside_it() -> None:
    seen: dict[bool, set[str]] = {False: set(), True: set()}

    def noting(tf32: bool, model: nn.Module, inputs: Tensor) -> Any:
        outputs = model(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda _: seen[tf32].add(SETTINGS.fp32_precision))
        return outputs

    jobs = list[Callable[[], Any]]()
    for tf32 in (False, True):
        model = net().to(CUDA)
        optimizer = KSD(model, nn.CrossEntropyLoss(), forward=partial(noting, tf32), tf32=tf32)
        jobs.append(partial(optimizer.step, classes()))
    before = switches()
    in_threads(jobs, at_once=True)
    assert seen[False] == {before[1]}
    assert "tf32" in seen[True]
    assert switches() == before


# What the host does in a step on a GPU, as far as it needs none. Torch makes its threads when it
# first has work for them.
HOST_WORK = """
import json, os, numpy as np, torch
from krylov_descent.objective.batches import Batch, InMemory
from krylov_descent.algorithms.bfgs import BFGS
from krylov_descent.algorithms.minimizer import minimize
from krylov_descent.algorithms.noise import noise_from
from krylov_descent.objective.subsets import SubsetSizes, draw
from krylov_descent.algorithms.basis_storage import Alone, StoredBasis
from krylov_descent.algorithms.coordinates import Coordinates
from krylov_descent.algorithms.subspace import cut

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
generator = torch.Generator().manual_seed(0)
samples = InMemory(Batch(torch.empty(100_000, 0), torch.empty(100_000, 0), 100_000))
basis, identity = torch.randn(81, 81), torch.eye(81)
before = threads()
draw(samples, SubsetSizes(100, 100, 80), generator)
found = torch.cat([identity, identity, torch.ones(1, 81)])
subspace = cut(StoredBasis.at(basis), Alone(81), found)
coordinates = Coordinates(subspace.curvature, subspace.gram, 1e-4)
noise_from(torch.rand(2, dtype=torch.float64, generator=generator))

def function(a):
    moved = coordinates.to_basis(a)
    return float(moved @ moved), coordinates.from_gradient(2 * moved)

start = np.ones(81)
minimize(BFGS(start, *function(start), max_iterations=5, noise=0.0), function)
made = threads() - before
torch.tril(torch.randn(200, 200))
print(json.dumps({"made": made, "in the end": threads() - before}))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_the_host_wakes_no_thread_between_waits_for_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOST_WORK], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if found["in the end"] <= 0:
        pytest.skip("torch makes no threads here, even where it has work for them")
    assert found["made"] <= 0

"""Jobs on parallel branches of a CUDA graph."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD
from krylov_descent.cuda.graphs.capture import Recording
from krylov_descent.cuda.graphs.parallel_branches import (
    BRANCHES,
    all_joined,
    begin,
    side_by_side,
)
from krylov_descent.cuda.graphs.recorder import EVALUATION, NOISE, STEP
from krylov_descent.cuda.triton.availability import possible
from krylov_descent.cuda.triton.entry import tensor_core_products
from krylov_descent.objective.batches import tensors_in
from tests.engines import engine_of

pytestmark = pytest.mark.gpu


def test_jobs_side_by_side_do_not_get_into_each_others_way() -> None:
    x = torch.ones(1000, 1000, device="cuda")

    def job(i: int) -> Tensor:
        return (i * x) @ x

    jobs = [partial(job, i) for i in range(BRANCHES + 3)]
    side_by_side(jobs)  # libraries set themselves up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = side_by_side(jobs)
    graph.replay()
    for i, result in enumerate(results):
        assert torch.equal(result, torch.full_like(x, 1000.0 * i))


def test_jobs_of_jobs_do_not_overwrite_what_others_still_read() -> None:
    x = torch.ones(500, 500, device="cuda")

    def job(i: int) -> Tensor:
        parts = side_by_side([partial(torch.mul, x, i + j) for j in range(3)])
        late = x
        for _ in range(30):  # the parts are read long after another job made its own
            late = (late @ x) / 500
        return late * torch.stack(parts).sum(0)

    jobs = [partial(job, i) for i in range(4)]
    side_by_side(jobs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = side_by_side(jobs)
    for _ in range(5):
        graph.replay()
        for i, result in enumerate(results):
            assert torch.equal(result, torch.full_like(x, 3.0 * i + 3))


def many_short_kernels(x: Tensor) -> Tensor:
    """x + 300, by kernels that leave nearly all of a GPU free."""
    for _ in range(300):
        x = x + 1
    return x


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of a replay, at best."""
    found: list[float] = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return min(found)


def test_jobs_that_were_begun_are_waited_for_where_they_are_read() -> None:
    x, device = torch.ones(1000, device="cuda"), torch.device("cuda", 0)
    if not possible(device):
        pytest.skip("operations do not pass by our own")
    graph, products = torch.cuda.CUDAGraph(), tensor_core_products(device)
    with torch.cuda.graph(graph), products, all_joined():
        early, late = begin([partial(torch.add, x, 1), partial(many_short_kernels, x)])
        beside = many_short_kernels(early)
        read = late * 2
    with torch.cuda.graph(alone := torch.cuda.CUDAGraph()):
        many_short_kernels(x)
    for _ in range(3):
        late.zero_()
        graph.replay()
        assert torch.equal(beside, torch.full_like(x, 302.0))
        assert torch.equal(read, torch.full_like(x, 602.0))
    assert milliseconds(graph) < 1.6 * milliseconds(alone)


def autoencoder(width: int = 400) -> nn.Sequential:
    """Large enough for kernels of the library's own."""
    torch.manual_seed(1)
    layers = [nn.Linear(width, 200), nn.Sigmoid(), nn.Linear(200, 30), nn.Sigmoid()]
    back = [nn.Linear(30, 200), nn.Sigmoid(), nn.Linear(200, width)]
    return nn.Sequential(*layers, *back).cuda()


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    grey = torch.rand(1000, 400, generator=generator).cuda()
    return grey, grey


@pytest.mark.parametrize("preconditioner", ["fisher-diagonal", "kronecker"])
def test_what_is_recorded_gives_the_same_bits_each_time(
    images: tuple[Tensor, Tensor], preconditioner: str
) -> None:
    optimizer = KSD(
        autoencoder(), nn.BCEWithLogitsLoss(), dimension=4, preconditioner=preconditioner
    )
    for _ in range(23):
        optimizer.step(images)
    recordings = engine_of(optimizer).graphs
    assert recordings._room is not None
    basis = recordings._room.slots
    found = 0
    for name, (_, recording) in recordings._held.items():
        if not isinstance(recording, Recording):
            continue
        seen = []
        for _ in range(5):
            result = recording()
            torch.cuda.synchronize()
            tensors = [result.numbers] if name == EVALUATION else tensors_in(result)
            seen.append([t.clone() for t in (*tensors, basis)])
        for other in seen[1:]:
            same = [torch.equal(a, b) for a, b in zip(seen[0], other, strict=True)]
            assert all(same), name
        found += 1
    assert found >= 5


def test_noise_by_recordings_is_that_of_rounding(images: tuple[Tensor, Tensor]) -> None:
    noise = []
    for recorded in (True, False):
        optimizer = KSD(autoencoder(), nn.BCEWithLogitsLoss(), dimension=4, cuda_graphs=recorded)
        noise.append([optimizer.step(images).noise for _ in range(4)])
        assert not recorded or engine_of(optimizer).graphs.has(NOISE)
    for by_recording, without in zip(*noise, strict=True):
        assert by_recording is not None
        assert without is not None
        assert without / 5 < by_recording < 5 * without


def test_a_large_net_in_double_precision_is_recorded() -> None:
    torch.manual_seed(3)
    images = torch.rand(300, 400, device="cuda", dtype=torch.float64)
    optimizer = KSD(autoencoder().double(), nn.BCEWithLogitsLoss(), dimension=4)
    assert all(optimizer.step((images, images)).status.moved for _ in range(3))
    assert {EVALUATION, NOISE, STEP} <= set(engine_of(optimizer).graphs.names)

"""A group of one rank, and a basis on the host or in bfloat16 beside a model on the GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from krylov_descent import KSD, HessianFree, NonlinearCG
from krylov_descent.algorithms.basis_storage import Storage, StoredBasis
from krylov_descent.cuda.engine import CudaEngine
from tests.engines import engine_of
from tests.optimizers.nets import classes, net, parameters_of

pytestmark = pytest.mark.gpu
MAKERS: dict[str, Any] = {
    # With one previous step the whole basis is recorded at the second step.
    "ksd": lambda model: KSD(
        model, nn.CrossEntropyLoss(), dimension=6, bfgs_iterations=5, previous_steps=1
    ),
    "ksd, sharded": lambda model: KSD(
        model, nn.CrossEntropyLoss(), dimension=6, bfgs_iterations=5, basis="sharded"
    ),
    "hf": lambda model: HessianFree(model, nn.CrossEntropyLoss(), cg_iterations=12),
    "ncg": lambda model: NonlinearCG(model, nn.CrossEntropyLoss(), iterations=3),
}


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def three_steps(name: str) -> tuple[torch.Tensor, bool]:
    """The parameters, and whether the whole basis is one recording."""
    model = net(torch.float64).cuda()
    optimizer = MAKERS[name](model)
    for _ in range(3):
        assert optimizer.step(classes(200, torch.float64)).status.moved
    assert not optimizer.objective.ranks.traffic
    engine = engine_of(optimizer)
    assert isinstance(engine, CudaEngine)
    return parameters_of(model).cpu(), engine.graphs.has("basis of gauss-newton")


@pytest.mark.parametrize("name", MAKERS)
def test_a_group_of_one_rank_goes_the_way_of_one_process(
    name: str, request: pytest.FixtureRequest
) -> None:
    expected, recorded = three_steps(name)
    assert recorded == (name == "ksd")
    request.getfixturevalue("one_rank")
    found, recorded_in_group = three_steps(name)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert recorded_in_group == recorded


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_blocks_from_the_host_give_what_the_whole_gives(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("krylov_descent.algorithms.basis_storage.LARGEST_BLOCK", 1 << 16)
    size = 300_001
    rows, like = torch.randn(8, size, device="cuda"), torch.zeros(size, device="cuda")
    store = StoredBasis(8, size, like, Storage(dtype, torch.device("cpu")))
    for k, row in enumerate(rows):
        store.put(k, row * 2)
        store.put(k, row)
    stored = rows.to(dtype or rows.dtype).float()
    v, c = torch.randn(size, device="cuda"), torch.randn(6, device="cuda")
    for some in (slice(0, 6), slice(2, 8)):
        products, sums = stored[some] @ v, stored[some].t() @ c
        torch.testing.assert_close(store.times(some, v), products, rtol=1e-3, atol=1e-1)
        torch.testing.assert_close(store.combine(some, c), sums, rtol=1e-4, atol=1e-4)
    assert torch.equal(store.get(3), stored[3])
    assert store.stored.is_pinned()


def test_a_basis_elsewhere_takes_its_memory_with_it() -> None:
    width, depth, k = 1024, 4, 16
    peaks = {}
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "bfloat16": {"basis_dtype": torch.bfloat16},
        "host": {"basis_device": "cpu"},
    }
    for name, options in cases.items():
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Tanh(), nn.Linear(width, width)) for _ in range(depth)]
        model = nn.Sequential(*layers).cuda()
        data = torch.rand(16, width).cuda(), torch.rand(16, width).cuda()
        optimizer = KSD(model, nn.MSELoss(), dimension=k, cuda_graphs=False, **options)
        optimizer.step(data)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert optimizer.step(data).status.moved
        vector = sum(p.nbytes for p in model.parameters())
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / vector
        del optimizer, model
    # The basis is K + 1 vectors, and three blocks of a sixteenth of it come on top.
    blocks = 3 / 16 * (k + 1)
    assert peaks["plain"] > k + 1
    assert peaks["bfloat16"] < peaks["plain"] - (k + 1) / 2 + blocks + 1
    assert peaks["host"] < peaks["plain"] - (k + 1) + blocks + 1

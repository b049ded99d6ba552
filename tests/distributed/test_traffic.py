"""What is sent: counted where it is handed to torch, and as the documentation's formulas say."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaling
from tests.distributed import work
from tests.distributed.group import Group
from tests.optimizers.nets import net

K = work.OPTIONS["ksd"]["dimension"]
PARAMETERS = sum(p.numel() for p in net().parameters())
VECTOR = 8 * PARAMETERS
SHARDS = {2: [20, 41], 3: [40, 0, 21]}


def bytes_of(group: Group, name: str, **options: Any) -> dict[str, Any]:
    first, *others = group.run(work.bytes_of_steps, name, options, SHARDS[group.size])
    assert all(other == first for other in others)
    found: dict[str, Any] = first
    # The optimiser's own account is that of what reached torch.
    calls, sums = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for phase, kind, size in found["seen"]:
        calls[phase, kind] += 1
        sums[phase, kind] += size
    assert found["traffic"] == {key: (calls[key], sums[key]) for key in calls}
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "options", [{"basis": "replicated"}, {"basis": "sharded"}, {"subset_size": "auto"}]
)
def test_a_step_sends_what_the_formulas_say(
    size: int, options: dict[str, Any], pair: Group, trio: Group
) -> None:
    group = pair if size == 2 else trio
    found = bytes_of(group, "ksd", preconditioner="fisher-diagonal", **options)
    step = scaling.Step(
        parameters=PARAMETERS,
        dimension=K,
        evaluations=found["evaluations"],
        ranks=size,
        sharded=options.get("basis") == "sharded",
        growing="subset_size" in options,
        width=8,
    )
    expected = {key: (sent.calls, sent.bytes) for key, sent in scaling.traffic(step).items()}
    assert found["traffic"] == expected


def test_an_evaluation_in_the_subspace_sends_k_plus_2_numbers(trio: Group) -> None:
    found = bytes_of(trio, "ksd")
    sent = [(kind, size) for phase, kind, size in found["seen"] if phase == "search"]
    evaluations = [entry for entry in sent if entry == ("all-reduce", 8 * (K + 2))]
    assert len(evaluations) == found["evaluations"] >= 3
    # The rest is two pairs of numbers, and four for the noise; no vector is anywhere.
    assert sum(size for _, size in sent) == sum(size for _, size in evaluations) + 8 * 8
    assert max(size for _, size in sent) < VECTOR


@pytest.mark.parametrize("name", ["hf", "ncg"])
def test_the_others_send_a_vector_for_each_product_or_evaluation(name: str, trio: Group) -> None:
    found = bytes_of(trio, name)
    vectors = Counter((phase, kind) for phase, kind, size in found["seen"] if size == VECTOR)
    if name == "hf":
        products = {("cg", "all-reduce"): found["products"]}
        assert vectors == {("gradient", "all-reduce"): 2, ("step", "broadcast"): 1} | products
    else:
        searched = found["evaluations"] - 1
        assert vectors == {
            ("gradient", "all-reduce"): 1,
            ("search", "all-reduce"): searched,
            ("step", "broadcast"): 1,
        }


def test_the_page_shows_what_is_simulated() -> None:
    page = (scaling.DOCS / "distributed.md").read_text(encoding="utf-8")
    rows = scaling.simulate(scaling.Machine())
    assert scaling.filled(page, rows) == page, "run `python -m benchmarks.scaling`"
    assert (scaling.DOCS / "distributed-scaling.svg").stat().st_size > 10_000


def test_the_simulation_knows_its_limits(tmp_path: Path) -> None:
    rows = scaling.simulate(scaling.Machine())
    for row in rows:
        assert row["strong_speedup"] <= row["ranks"] + 1e-9
        assert 0 < row["weak_efficiency"] <= 1
    # Without exchange it is ideal; without bandwidth there is nothing to gain.
    free = scaling.Machine(bandwidth=1e30, latency=0.0)
    assert scaling.simulate(free)[5]["weak_efficiency"] == pytest.approx(1)
    slow = scaling.Machine(bandwidth=1.0)
    assert scaling.simulate(slow)[5]["strong_speedup"] < 0.01

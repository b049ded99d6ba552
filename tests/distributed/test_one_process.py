"""Several ranks give the result of one process on all of the data."""

import math
from typing import Any

import pytest
import torch

from krylov_descent import KroneckerFactors
from tests.distributed import mishaps, work
from tests.distributed.group import Group

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ksd": ("ksd", {}),
    "ksd, hessian": ("ksd", {"curvature": "hessian"}),
    "ksd, fisher": ("ksd", {"curvature": "fisher"}),
    "ksd, identity": ("ksd", {"preconditioner": "identity"}),
    "ksd, sets of all": ("ksd", {"subset_size": "auto"}),
    "ksd, sharded": ("ksd", {"basis": "sharded"}),
    "ksd, lr": ("ksd", {"lr": 0.5}),
    # One at a time: a long search with many directions amplifies rounding.
    "ksd, chooses its dimension": ("ksd", {"dimension": "auto"}),
    "ksd, chooses its evaluations": ("ksd", {"bfgs_iterations": "auto"}),
    "hf": ("hf", {}),
    "hf, hessian": ("hf", {"curvature": "hessian", "damping": 1.0}),
    "hf, fisher": ("hf", {"curvature": "fisher"}),
    "ncg": ("ncg", {}),
    "ncg, hestenes-stiefel": ("ncg", {"formula": "hestenes-stiefel"}),
}
UNEQUAL, ONE_EMPTY = [20, 41], [40, 0, 21]


@pytest.fixture(params=["unequal shards on 2", "an empty shard on 3"])
def shards(request: pytest.FixtureRequest) -> tuple[Group, list[int]]:
    two = request.param == "unequal shards on 2"
    return request.getfixturevalue("pair" if two else "trio"), UNEQUAL if two else ONE_EMPTY


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Equal to rounding with one process, and to the last bit between ranks."""
    assert all(expected["moved"])
    for one in found:
        assert torch.equal(one["parameters"], found[0]["parameters"])
        assert torch.equal(one["state"], found[0]["state"])
        assert one["results"] == found[0]["results"]
    for name in ("parameters", "state"):
        torch.testing.assert_close(found[0][name], expected[name], rtol=0, atol=1e-9)
    for one, other in zip(found[0]["results"], expected["results"], strict=True):
        assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_two_steps_are_those_of_one_process(case: str, shards: tuple[Group, list[int]]) -> None:
    group, sizes = shards
    name, options = CASES[case]
    assert_same(group.run(work.steps, name, options, sizes), work.steps(name, options, sizes))


@pytest.mark.parametrize("name", ["ksd", "hf"])
def test_sets_by_hand_may_be_empty_on_a_rank(name: str, trio: Group) -> None:
    sizes = [ONE_EMPTY, [0, 20, 0], [12, 0, 12]]
    found = trio.run(work.steps_with_sets_by_hand, name, sizes)
    assert_same(found, work.steps_with_sets_by_hand(name, sizes))


def test_ranks_agree_on_kronecker_factors(shards: tuple[Group, list[int]]) -> None:
    """Also one without samples. Signs go by the place on a rank: one process has others."""
    group, sizes = shards
    options = {"preconditioner": KroneckerFactors(after=1)}
    found = group.run(work.steps, "ksd", options, sizes)
    for one in found:
        assert all(one["moved"])
        assert torch.equal(one["parameters"], found[0]["parameters"])
        assert one["results"] == found[0]["results"]
    alone = work.steps("ksd", options, sizes)
    second, theirs = found[0]["results"][1], alone["results"][1]
    assert second["loss_before"] == pytest.approx(theirs["loss_before"], rel=1e-9)
    assert second["loss_after"] == pytest.approx(theirs["loss_after"], rel=0.3)


@pytest.mark.parametrize("copying", [None, 1])
def test_sets_grow_alike(copying: int | None, pair: Group) -> None:
    """Also where the data of one rank are other tensors at each step."""
    sizes = [500, 700]
    alone = work.sizes_of_growing_sets(sizes, 7)
    assert [alone[0][0], alone[-1][0]] == [250, 500]
    first, second = pair.run(work.sizes_of_growing_sets, sizes, 7, copying)
    assert first == second
    for (size, loss), (expected_size, expected_loss) in zip(first, alone, strict=True):
        assert size == expected_size
        assert loss == pytest.approx(expected_loss, rel=1e-7)  # searches end by noise


@pytest.mark.parametrize("size", [20, 1210])
def test_a_fingerprint_is_that_of_all_data_however_divided(
    size: int, pair: Group, trio: Group
) -> None:
    data, copied, changed, _ = alone = work.fingerprints([size])
    assert copied == data
    assert changed != data
    part = size // 4
    for group, shards in (
        (pair, [part, size - part]),
        (pair, [0, size]),
        (trio, [part, 0, size - part]),
        (trio, [0, part, size - part]),
    ):
        for found in group.run(work.fingerprints, shards):
            assert found[:3] == alone[:3]
            assert math.isnan(found[3])


def test_sets_go_on_with_their_sizes_on_another_number_of_ranks(pair: Group, trio: Group) -> None:
    *state, size = pair.run(work.state_of_growing_sets, [500, 700], 6)[0]
    assert size == 500
    alone = work.sizes_after_loading([1200], *state)
    assert alone[0] == 500
    for found in trio.run(work.sizes_after_loading, [0, 800, 400], *state):
        assert found == alone


@pytest.mark.parametrize("name", ["hf", "ncg"])
def test_streams_are_one_after_the_other(name: str, trio: Group) -> None:
    expected = work.steps(name, {}, ONE_EMPTY, 2, 7)
    assert_same(trio.run(work.steps, name, {}, ONE_EMPTY, 2, 7), expected)


def test_sets_from_streams_are_of_the_size_asked_for(trio: Group) -> None:
    found = trio.run(work.steps, "ksd", {}, ONE_EMPTY, 2, 7)
    assert all(torch.equal(one["parameters"], found[0]["parameters"]) for one in found)
    for result in found[1]["results"]:
        assert (result["samples"], result["curvature_samples"]) == (61, 20)
        assert result["objective_samples"] == 24
        assert result["loss_after"] < result["loss_before"]
    # Streams with all samples in B and C have nothing to draw.
    everything = {"subset_size": 1.0}
    expected = work.steps("ksd", everything, ONE_EMPTY)
    assert_same(trio.run(work.steps, "ksd", everything, ONE_EMPTY, 2, 7), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_basis_curvature_and_evaluation_are_those_of_one_process(
    dtype: torch.dtype, shards: tuple[Group, list[int]]
) -> None:
    group, sizes = shards
    expected = work.pieces_of_a_step(sizes, dtype)
    # A basis vector carries the rounding of all before it.
    loose = 1e-4 if dtype == torch.float32 else 1e-12
    for found in group.run(work.pieces_of_a_step, sizes, dtype):
        for name, tensor in expected.items():
            atol = loose * float(tensor.abs().max())
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=name)


def test_each_rank_keeps_a_part_of_a_sharded_basis(trio: Group) -> None:
    assert trio.run(work.numbers_of_a_sharded_basis, 5) == [6 * 17, 6 * 17, 6 * 16]


def test_sums_are_the_same_to_the_last_bit(trio: Group) -> None:
    small, large, gathered = zip(*trio.run(work.agreement_of_sums), strict=True)
    for sums in (small, large, gathered):
        assert all(torch.equal(one, sums[0]) for one in sums)
    torch.testing.assert_close(large[0], gathered[0])


@pytest.mark.parametrize("name", work.OPTIMIZERS)
def test_a_rank_that_rounds_otherwise_does_not_go_its_own_way(name: str, pair: Group) -> None:
    (first, evaluations), (second, others) = pair.run(mishaps.steps_with_jitter, name, [30, 31], 3)
    assert evaluations == others
    assert torch.equal(first, second)

"""Groups of some of the ranks, groups of one, and groups that change."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from krylov_descent.objective.objective import Objective
from tests.distributed import groups, work
from tests.distributed.group import Group
from tests.optimizers.nets import classes, net


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    group = Group(4)
    yield group
    group.close()


@pytest.mark.parametrize(
    ("name", "mesh"), [("ksd", False), ("hf", False), ("ncg", False), ("ksd", True)]
)
def test_two_groups_train_two_models_side_by_side(name: str, mesh: bool, four: Group) -> None:
    found = four.run(groups.steps_in_two_groups, name, mesh)
    for rank, parameters in enumerate(found):
        expected = groups.steps_alone(name, rank % 2)
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-9)
        assert torch.equal(parameters, found[rank % 2])


def test_an_objective_is_summed_over_its_group(four: Group) -> None:
    data = classes(work.SAMPLES, torch.float64)
    expected = Objective(net(torch.float64), nn.CrossEntropyLoss()).value(data)
    assert four.run(groups.value_in_group) == pytest.approx([expected] * 4, rel=1e-12)


def test_a_group_that_cannot_be_summed_over_is_refused(four: Group) -> None:
    for rank, (outside, mesh, word) in enumerate(four.run(groups.make_with_wrong_groups)):
        if rank > 1:
            assert outside.startswith(f"ValueError: this process, rank {rank}, is not in `process_")
        else:
            assert outside == "nothing"
        assert mesh.startswith("ValueError: `process_group` is a DeviceMesh of 2 dimensions")
        assert word.startswith("TypeError: `process_group` must be a torch.distributed.ProcessG")


def test_a_copy_belongs_to_the_same_group(four: Group) -> None:
    for found in four.run(groups.copies_in_a_group):
        assert found["alike"]
        assert found["pickled"].startswith("TypeError: an optimiser with a `process_group` cannot")


@pytest.mark.parametrize("name", work.OPTIMIZERS)
def test_a_group_of_one_is_no_group(name: str, pair: Group) -> None:
    alone = groups.steps_alone(name, 0)
    for parameters, sent in pair.run(groups.steps_in_a_group_of_one, name):
        torch.testing.assert_close(parameters, alone, rtol=0, atol=1e-12)
        assert not sent


def test_a_group_of_one_may_come_and_go(tmp_path: Path) -> None:
    before = work.make("ksd", net(torch.float64))
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        within = work.make("ksd", net(torch.float64), subset_size="auto")
        results = [each.step(classes(dtype=torch.float64)) for each in (before, within)]
    finally:
        dist.destroy_process_group()
    results.append(within.step(classes(dtype=torch.float64)))
    assert all(result.status.moved for result in results)
    assert within.objective.ranks.traffic == {}


def test_a_group_that_changes_after_the_optimiser_was_made_is_noticed(tmp_path: Path) -> None:
    group = Group(3)
    for rank, found in enumerate(group.run(groups.steps_while_the_group_changes, tmp_path)):
        well = ["in three", "alone", "three again", *(["anew"] if rank < 2 else [])]
        assert [found[case] for case in well] == ["nothing"] * len(well)
        for case in ("gone", "another of three"):
            assert "the process group under which KSD was made is gone: make KSD" in found[case]
        assert "a process group was initialised after KSD was made" in found["alone, then three"]
        if rank < 2:
            assert f"KSD was made on rank {rank} of 3, and the process" in found["of two"]
            assert f"this process as rank {rank} of 2: make KSD anew" in found["of two"]
    group.close()

"""A rank that fails, differs, dies or is slow: all end, with the parameters as before."""

import signal
from typing import Any

import pytest
import torch

from tests.distributed import mishaps, work
from tests.distributed.group import Group


@pytest.mark.parametrize("name", work.OPTIMIZERS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_nan_on_one_rank_ends_the_step_on_all(name: str, bad: float, trio: Group) -> None:
    for told in trio.run(mishaps.step_with_nan, name, bad):
        assert told == {"status": "NOT_FINITE", "unchanged": True, "goes on": True}


# Forward passes: of the gradient first, then of products, then of evaluations.
@pytest.mark.parametrize(
    ("name", "after", "phase"),
    [
        ("ksd", 1, "gradient"),
        ("ksd", 2, "basis"),
        ("ksd", 3, "search"),
        ("ksd", 9, "search"),
        ("hf", 1, "gradient"),
        ("hf", 2, "cg"),
        ("hf", 3, "search"),
        ("ncg", 1, "gradient"),
        ("ncg", 3, "search"),
        ("ncg", 9, "search"),
    ],
)
def test_an_error_on_one_rank_ends_the_step_on_all(
    name: str, after: int, phase: str, trio: Group
) -> None:
    first, second, third = trio.run(mishaps.step_with_a_trap, name, mishaps.fail, after)
    for told in (first, second, third):
        assert told["unchanged"]
        assert told["same state"] or name != "ksd"
        assert told["goes on"]
    assert second["error"] == "KeyError"
    for told in (first, third):
        assert told["error"] == "RankError"
        assert f"phase '{phase}'" in told["message"]
        assert "rank 1 failed with KeyError: 'a sample that is not there'" in told["message"]


@pytest.mark.parametrize("name", work.OPTIMIZERS)
def test_bad_data_on_one_rank_is_told_to_all(name: str, trio: Group) -> None:
    first, second, third = trio.run(mishaps.step_with_bad_data, name)
    assert second.startswith("TypeError: `data` must be a tuple (inputs, targets)")
    for told in (first, third):
        assert told.startswith("RankError")
        assert "rank 1 failed with TypeError: `data` must be" in told


def test_no_samples_on_any_rank_is_refused(pair: Group) -> None:
    for told in pair.run(mishaps.step_with_nothing_anywhere):
        assert told == "`data` is empty: it must hold at least one sample"


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("options", "`dimension` is 7 on rank 1 and 6 on rank 0"),
        ("preconditioner", "is KroneckerFactors(1e-05, after=1) on rank 1 and Kro"),
        ("lr", "`lr` of parameter group 0 is 0.5 on rank 1 and 1.0 on rank 0"),
        ("dtype", "torch.float32 on rank 1 and (6, 4) torch.float64 on rank 0"),
        ("model", "the parameter 0.weight is (5, 4) torch.float64 on rank 1"),
        ("optimizer", "the optimiser is HessianFree on rank 1 and KSD on rank 0"),
        ("parameters", "the parameters of rank 1 are not those of rank 0"),
    ],
)
def test_ranks_that_differ_are_named(what: str, sentence: str, pair: Group) -> None:
    for told in pair.run(mishaps.differing, what):
        assert sentence in told


def test_an_optimiser_that_does_not_sum_is_refused(pair: Group) -> None:
    for told in pair.run(mishaps.first_order_step):
        assert told.startswith("FirstOrder does not sum over ranks, and there are 2")


@pytest.mark.parametrize("trap", [mishaps.die, mishaps.sleep])
def test_a_rank_that_dies_or_sleeps_is_not_waited_for(trap: Any) -> None:
    group = Group(2, timeout=mishaps.SLEEP / 2)  # a first step on a busy machine takes seconds
    (good, told), (other, _) = group.try_to_run(mishaps.step_with_a_trap, "ksd", trap, 5)
    assert good
    assert told["error"] == "CommunicationError"
    assert "rank 0 of 2: the all-reduce in phase 'search' failed" in told["message"]
    assert told["unchanged"]
    assert told["same state"]
    assert told["seconds"] < mishaps.SLEEP - 0.5
    if trap is mishaps.die:
        assert not other
        group.processes[1].join(5)
        assert group.processes[1].exitcode == -signal.SIGKILL
    group.close()

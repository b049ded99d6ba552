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


def check_told(found: list[dict[str, Any]], error: str, message: str) -> None:
    """All ranks ended soon, rank 1 with its own error and the others with its words."""
    for rank, told in enumerate(found):
        assert told["error"] == (error if rank == 1 else "RankError"), told
        assert message in told["message"]
        assert rank == 1 or f"rank 1 failed with {error}: " in told["message"]
        assert told["soon"]
        assert told["unchanged"]
        assert told.get("goes on", True)


@pytest.mark.parametrize("method", ["update", "solve", "multiply"])
def test_an_error_of_a_preconditioner_is_told_to_all(method: str, trio: Group) -> None:
    found = trio.run(mishaps.step_with_a_preconditioner_that_fails, method, [1])
    check_told(found, "ArithmeticError", f"{method} does not work on rank 1")


@pytest.mark.parametrize("where", [[0, 2], [1, 2], [0, 1, 2]])
def test_ranks_that_fail_at_once_raise_what_each_failed_of(where: list[int], trio: Group) -> None:
    found = trio.run(mishaps.step_with_a_preconditioner_that_fails, "solve", where)
    for rank, told in enumerate(found):
        assert told["error"] == ("ArithmeticError" if rank in where else "RankError")
        own = f"solve does not work on rank {rank}"
        assert told["message"] == own if rank in where else "solve does not" in told["message"]
        assert told["soon"]
        assert told["unchanged"]
        assert told["goes on"]


def test_no_room_for_the_basis_is_told_to_all(trio: Group) -> None:
    found = trio.run(mishaps.step_without_room_for_the_basis)
    check_told(found, "OutOfMemoryError", "tried to allocate 3 GiB")


def test_an_error_in_the_check_before_a_step_is_told_to_all(trio: Group) -> None:
    check_told(trio.run(mishaps.step_with_a_check_that_fails), "LookupError", "nobody knows")


@pytest.mark.parametrize("name", work.OPTIMIZERS)
@pytest.mark.parametrize(
    ("how", "message"), [("None", "`data` is None on this rank"), ("closure", "needs the data")]
)
def test_no_data_on_one_rank_is_told_to_all(name: str, how: str, message: str, trio: Group) -> None:
    check_told(trio.run(mishaps.step_without_data, name, how), "TypeError", message)


def test_steps_without_data_make_the_state(pair: Group) -> None:
    told = pair.run(mishaps.step_without_data, "ksd", "None everywhere")
    assert told == [{"returned": None, "states": 4}] * 2
    assert pair.run(mishaps.state_for_a_checkpoint) == [0, 4]


@pytest.mark.parametrize("name", ["ksd", "hf"])
@pytest.mark.parametrize(("nan", "error"), [(0, 1), (2, 1)])
def test_a_nan_and_an_error_end_in_the_error(name: str, nan: int, error: int, trio: Group) -> None:
    found = trio.run(mishaps.step_with_nan_and_an_error, name, nan, error)
    check_told(found, "KeyError", "a sample that is not there")


@pytest.mark.parametrize(
    ("which", "argument"),
    [
        ("curvature_data", "curvature_data"),
        ("objective_data", "objective_data"),
        ("chunk", "curvature_data"),
    ],
)
def test_sets_given_on_one_rank_only_are_refused(which: str, argument: str, trio: Group) -> None:
    for told in trio.run(mishaps.sets_on_one_rank, which):
        assert told["error"] == "ValueError"
        assert f"`{argument}` is given on rank 1 and left out on rank 0" in told["message"]
        assert told["soon"]


@pytest.mark.parametrize("name", work.OPTIMIZERS)
def test_a_rank_with_another_last_bit_goes_on_with_the_others(name: str, pair: Group) -> None:
    first, second = pair.run(mishaps.steps_with_another_last_bit, name, 6)
    assert first == second


def test_no_samples_on_any_rank_is_refused(pair: Group) -> None:
    for told in pair.run(mishaps.step_with_nothing_anywhere):
        assert told == "`data` is empty: it must hold at least one sample"


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("options", "`dimension` is 7 on rank 1 and 6 on rank 0"),
        ("preconditioner", "`preconditioner`'s after is 1 on rank 1 and 0 on rank 0"),
        ("lr", "`lr` of parameter group 0 is 0.5 on rank 1 and 1.0 on rank 0"),
        ("dtype", "torch.float32 on rank 1 and (6, 4) torch.float64 on rank 0"),
        ("model", "the parameter 0.weight is (5, 4) torch.float64 on rank 1"),
        ("optimizer", "the optimiser is HessianFree on rank 1 and KSD on rank 0"),
        ("parameters", "the parameter 0.weight of rank 1 is not as on rank 0"),
    ],
)
def test_ranks_that_differ_are_named(what: str, sentence: str, pair: Group) -> None:
    for told in pair.run(mishaps.differing, what):
        assert sentence in told


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("frozen", "the frozen parameter 0.weight of rank 1 is not as on rank 0"),
        ("swapped", "the parameter 0.weight of rank 1 is not as on rank 0"),
        ("buffer", "the buffer statistics of rank 1 is not as on rank 0"),
        ("class weights", "the loss's weight of rank 1 is not as on rank 0"),
        ("smoothing", "the loss's label_smoothing is 0.1 on rank 1 and 0.0 on rank 0"),
        ("argument", "the loss's power is 2.0 on rank 1 and 1.0 on rank 0"),
        ("partial", "the loss's ignore_index is -1 on rank 1 and 0 on rank 0"),
        ("forward", "`forward` is doubled of line"),
        ("activation", "the module 1 is ReLU() on rank 1 and Tanh() on rank 0"),
        ("floor", "`preconditioner`'s epsilon is 0.001 on rank 1 and 0.0001 on rank 0"),
    ],
)
def test_what_the_loss_depends_on_is_compared(what: str, sentence: str, pair: Group) -> None:
    for told in pair.run(mishaps.differing_besides, what):
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

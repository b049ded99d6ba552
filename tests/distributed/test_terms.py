"""Ranks that have the same terms divide their samples, and give the result of one process."""

from typing import Any

import pytest
import torch

from tests.distributed import term_work
from tests.distributed.group import Group
from tests.distributed.test_rank_faults import check_told

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ksd": ("ksd", {}),
    "ksd, sets of all": ("ksd", {"subset_size": "auto"}),
    "ksd, sharded": ("ksd", {"basis": "sharded"}),
    "ksd, diagonal": ("ksd", {"micro_batch": 5, "preconditioner": "auto"}),
    "hf": ("hf", {}),
    "ncg": ("ncg", {}),
}
STEPS = 4


@pytest.fixture(params=[2, 3])
def group(request: pytest.FixtureRequest) -> Group:
    found: Group = request.getfixturevalue("pair" if request.param == 2 else "trio")
    return found


# HF goes back along the iterates of CG while the loss falls. The last two are nearly equal.
BY_ROUNDING = ("evaluations", "passes")


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any], method: str) -> None:
    """Equal to rounding with one process, and to the last bit between ranks."""
    assert all(expected["moved"])
    left_out = BY_ROUNDING if method == "hf" else ()
    for one in found:
        for name in ("parameters", "state"):
            assert torch.equal(one[name], found[0][name])
            torch.testing.assert_close(one[name], expected[name], rtol=0, atol=1e-8)
        for name in ("results", "terms", "held out"):
            assert one[name] == found[0][name]
            for ours, theirs in zip(one[name], expected[name], strict=True):
                kept = {key: number for key, number in theirs.items() if key not in left_out}
                assert {key: ours[key] for key in kept} == pytest.approx(kept, rel=1e-8)
        for name in ("points", "drawn"):
            assert one[name] == expected[name]


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_one_process(case: str, group: Group) -> None:
    name, options = CASES[case]
    expected = term_work.steps(name, options, "many", STEPS)
    assert_same(group.run(term_work.steps, name, options, "many", STEPS), expected, name)
    # Points were drawn anew, on a schedule and because fresh ones were worse.
    assert expected["drawn"]["equation"] == 2
    assert len({tuple(row) for row in expected["points"]}) == (2 if name == "hf" else 3)
    assert bool(expected["drawn"]["runaway"]) == (name != "hf")
    assert set(expected["held out"][0]) == {"equation", "data", "edge", "runaway"}


def test_ranks_search_again_where_one_process_does(group: Group) -> None:
    expected = term_work.steps_of_small_sets(2)["results"]
    assert [step["objective_samples"] for step in expected] == [20, 400]
    ranks = group.run(term_work.steps_of_small_sets, 2)
    for found in ranks:
        assert torch.equal(found["parameters"], ranks[0]["parameters"])
        assert found["results"] == ranks[0]["results"]
        # Rounding grows in searches of so many evaluations.
        assert found["results"] == [pytest.approx(step, rel=1e-4) for step in expected]


def test_ranks_agree_on_a_diagonal_that_is_estimated(group: Group) -> None:
    """By random signs that go by the place on a rank, so one process takes other steps."""
    found = group.run(term_work.steps, "ksd", {"preconditioner": "auto"}, "many", STEPS)
    for one in found:
        assert all(one["moved"])
        assert torch.equal(one["parameters"], found[0]["parameters"])
        assert one["results"] == found[0]["results"]


@pytest.mark.parametrize("name", ["ksd", "hf", "ncg"])
def test_a_rank_may_have_no_samples_of_any_term(name: str, trio: Group) -> None:
    everything: dict[str, dict[str, Any]] = {
        "ksd": {"subset_size": "auto"},
        "hf": {"chunk_size": 1.0},
        "ncg": {},
    }
    options = everything[name]
    expected = term_work.steps(name, options, "two", 2)
    assert_same(trio.run(term_work.steps, name, options, "two", 2), expected, name)


def test_the_work_is_divided(group: Group) -> None:
    assert group.run(term_work.samples_of_a_pass) == [60 // group.size] * group.size
    assert term_work.samples_of_a_pass() == 60


def test_all_ranks_find_out_the_same_of_the_model(trio: Group) -> None:
    """Also those without a sample of the only term that differentiates the model."""
    assert trio.run(term_work.differentiates) == [True] * 3


def test_a_training_goes_on_with_another_number_of_ranks(pair: Group, trio: Group) -> None:
    model, state = pair.run(term_work.state_after, 3)[0]
    expected = term_work.losses_after_loading(model, state, 3)
    for found in trio.run(term_work.losses_after_loading, model, state, 3):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8)
    # The data are known to be those of before, however they are divided.
    assert set(pair.run(term_work.fingerprint) + trio.run(term_work.fingerprint)) == {
        term_work.fingerprint()
    }


def test_one_number_is_sent_for_each_term_and_what_it_holds_out(group: Group) -> None:
    for found in group.run(term_work.bytes_of_terms):
        assert found == {"all-reduce": (1, 8 * (6 + 4))}


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("own part", "the term heat's points[0] is (12, 2) torch.float64 on rank 1 and (8, 2)"),
        ("own part of equal size", "the term heat's points[0] of rank 1 is not as on rank 0"),
        ("held out", "the term edge (held out)'s points[0] of rank 1 is not as on rank 0"),
        ("draws of its own", "the term drawn's points[0] of rank 1"),
        ("weight", "the term edge's weight is 2.0 on rank 1 and 1.0 on rank 0"),
        ("subset_size", "the term heat's subset_size is 3 on rank 1 and None on rank 0"),
        ("residual", "the term edge's rule is with_odd_terms.<locals>.<lambda> of line"),
        ("names", "the terms is heat, border, drawn on rank 1 and heat, edge, drawn on rank 0"),
    ],
)
def test_ranks_that_have_other_terms_are_told_what_to_do(
    what: str, sentence: str, pair: Group
) -> None:
    for told in pair.run(term_work.with_odd_terms, what):
        assert told["error"] == "ValueError"
        assert sentence in told["message"]
        advice = ": give every rank the same terms with all their points; each computes its share"
        assert told["message"].endswith(advice)
        assert told["soon"]
        assert told["unchanged"]


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        *(("ksd", phase) for phase in ("terms", "gradient", "basis", "search")),
        *(("hf", phase) for phase in ("terms", "gradient", "cg", "search")),
        *(("ncg", phase) for phase in ("terms", "gradient", "search")),
    ],
)
def test_an_error_in_a_residual_on_one_rank_ends_the_step_on_all(
    name: str, phase: str, trio: Group
) -> None:
    found = trio.run(term_work.step_with_a_trap, name, phase)
    check_told(found, "KeyError", "a coefficient that is not there")
    assert all(told["same draws"] for told in found)
    assert f"phase '{phase}'" in found[0]["message"]


def test_a_sampler_that_fails_on_one_rank_is_told_to_all(trio: Group) -> None:
    found = trio.run(term_work.step_with_a_sampler_that_fails)
    check_told(found, "LookupError", "no more points")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("data", "the terms have their own points and data"),
        ("curvature_data", "cannot be given beside terms"),
    ],
)
def test_data_on_one_rank_are_told_to_all(argument: str, message: str, trio: Group) -> None:
    check_told(trio.run(term_work.step_with_data, argument), "TypeError", message)


def test_a_point_that_is_not_finite_is_named_by_its_place_among_all(group: Group) -> None:
    expected = (
        "NOT_FINITE",
        "the term 'heat' is not finite for 2 of its 20 samples, the first at index 13",
    )
    assert group.run(term_work.step_with_nan) == [expected] * group.size


def test_optimisers_of_one_process_are_refused(pair: Group) -> None:
    for told in pair.run(term_work.step_of_one_process):
        assert told["message"].startswith("LBFGS does not sum over ranks, and there are 2")

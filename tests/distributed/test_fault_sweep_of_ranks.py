"""An error at any place of a step on one rank ends the step on all, soon and without a trace."""

import pytest

from tests.distributed import faults
from tests.distributed.group import Group


@pytest.mark.parametrize(
    ("case", "place"),
    [
        ("ksd", "exchange"),
        ("ksd, sharded", "exchange"),
        ("ksd, kronecker", "operation"),
        ("ksd, sets that grow", "operation"),
        ("hf", "exchange"),
        ("ncg", "operation"),
    ],
)
def test_an_error_anywhere_ends_the_step_on_all_ranks(
    case: str, place: faults.Place, pair: Group
) -> None:
    made, complaints = faults.sweep(pair, case, place, wanted=3)
    assert made >= 4
    assert complaints == []

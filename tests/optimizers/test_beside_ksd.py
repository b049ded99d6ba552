"""What HessianFree, NonlinearCG, LBFGS and FirstOrder have in common with KSD."""

from functools import partial
from typing import Any

import pytest

from krylov_descent import LBFGS, FirstOrder, HessianFree, NonlinearCG
from tests.optimizers.nets import (
    check_an_error_on_the_way_leaves_no_trace,
    check_copies_step_by_themselves,
    check_errors,
    check_frozen_parameters_stay,
    check_grad_is_left_alone,
    check_refusals,
)

OPTIMIZERS = [HessianFree, NonlinearCG, LBFGS, FirstOrder]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_faults_are_refused(make: Any) -> None:
    check_refusals(make)
    check_errors(make, walks_once=make is FirstOrder)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_gradients_and_frozen_parameters_are_left_alone(make: Any) -> None:
    check_grad_is_left_alone(make)
    check_frozen_parameters_stay(make)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_copies_step_by_themselves(make: Any) -> None:
    check_copies_step_by_themselves(make)


@pytest.mark.parametrize(
    "make",
    [partial(HessianFree, chunk_size=20), NonlinearCG, LBFGS, partial(FirstOrder, batch_size=8)],
    ids=["HessianFree", "NonlinearCG", "LBFGS", "FirstOrder"],
)
def test_an_error_on_the_way_leaves_no_trace(make: Any) -> None:
    check_an_error_on_the_way_leaves_no_trace(make)

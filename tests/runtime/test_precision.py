"""One thread at a time sets the precision of CUDA's products, and it is put back afterwards.

The setting can be read and written on any machine. What steps do with it is in `test_tf32`.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch

from krylov_descent.runtime.precision import (
    SETTINGS,
    derivative_precision,
    derivatives_in_tf32,
    forward_precision,
    precisions,
    rough_products,
)
from krylov_descent.runtime.threads import step_turn

LONG, SHORT = 30.0, 0.05  # seconds: more than anything takes; enough for a thread to get somewhere
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True, params=["none", "ieee"])
def outside(request: pytest.FixtureRequest) -> Iterator[str]:
    before, SETTINGS.fp32_precision = SETTINGS.fp32_precision, request.param
    yield str(request.param)
    SETTINGS.fp32_precision = before


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Another thread."""
    with ThreadPoolExecutor(1) as threads:
        yield threads


def seen_in(context: AbstractContextManager[None]) -> str:
    with context:
        return str(SETTINGS.fp32_precision)


def is_waiting(future: "Future[Any]") -> bool:
    with pytest.raises(TimeoutError):
        future.result(SHORT)
    return True


def test_it_is_put_back_after_an_error(outside: str) -> None:
    with pytest.raises(ZeroDivisionError), derivatives_in_tf32(True), forward_precision():
        _ = 1 / (SETTINGS.fp32_precision != outside)
    assert precisions() == (outside, outside)
    assert derivative_precision() == outside


def test_two_threads_with_tf32_take_turns(outside: str, pool: ThreadPoolExecutor) -> None:
    with derivatives_in_tf32(True):
        waiting = pool.submit(seen_in, derivatives_in_tf32(True))
        assert is_waiting(waiting)
        assert precisions() == (outside, "tf32")
    assert waiting.result(LONG) == "tf32"
    assert precisions() == (outside, outside)


def test_a_step_on_cuda_without_tf32_waits(outside: str, pool: ThreadPoolExecutor) -> None:
    with derivatives_in_tf32(True):
        waiting = pool.submit(seen_in, step_turn(CUDA))
        assert is_waiting(waiting)
    assert waiting.result(LONG) == outside


def test_tf32_waits_for_a_step_without_it(outside: str, pool: ThreadPoolExecutor) -> None:
    with step_turn(CUDA):
        waiting = pool.submit(seen_in, derivatives_in_tf32(True))
        assert is_waiting(waiting)
        assert SETTINGS.fp32_precision == outside
    assert waiting.result(LONG) == "tf32"
    assert SETTINGS.fp32_precision == outside


def test_a_forward_pass_elsewhere_leaves_the_setting_alone(pool: ThreadPoolExecutor) -> None:
    with derivatives_in_tf32(True):
        # That of a step on a CPU, which does not wait: it has no precision of its own.
        assert pool.submit(seen_in, forward_precision()).result(LONG) == "tf32"
        assert pool.submit(seen_in, rough_products(CPU)).result(LONG) == "tf32"
        assert pool.submit(seen_in, step_turn(CPU)).result(LONG) == "tf32"
        assert SETTINGS.fp32_precision == "tf32"


def test_rough_products_are_in_tf32_where_torch_is_free_to_choose(outside: str) -> None:
    rough = "tf32" if outside == "none" else outside
    assert seen_in(rough_products(CUDA)) == rough
    assert seen_in(rough_products(CPU)) == outside
    with pytest.raises(ZeroDivisionError), rough_products(CUDA):
        _ = 1 / 0
    assert SETTINGS.fp32_precision == outside


def test_rough_products_wait_for_a_step_elsewhere(outside: str, pool: ThreadPoolExecutor) -> None:
    with step_turn(CUDA):
        waiting = pool.submit(partial(seen_in, rough_products(CUDA)))
        assert is_waiting(waiting)
        assert SETTINGS.fp32_precision == outside
    waiting.result(LONG)
    assert SETTINGS.fp32_precision == outside

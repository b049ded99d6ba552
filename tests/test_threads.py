"""One thread for a while, and then as many as before, whatever happened."""

from collections.abc import Iterator

import pytest
import torch

from krylov_descent.subspace import Coordinates
from krylov_descent.threads import one_thread

THREADS = 3


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def test_one_thread_and_then_as_many_as_before() -> None:
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == THREADS


def test_an_error_does_not_leave_one_thread_behind() -> None:
    with pytest.raises(RuntimeError, match="eigh"):
        Coordinates(torch.full((3, 3), torch.nan, dtype=torch.float64), 1e-4)
    assert torch.get_num_threads() == THREADS


def test_the_small_algebra_of_a_step_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, eigh = [], torch.linalg.eigh

    def watched(matrix: torch.Tensor) -> object:
        seen.append(torch.get_num_threads())
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", watched)
    Coordinates(torch.eye(3, dtype=torch.float64), 1e-4)
    assert seen == [1]

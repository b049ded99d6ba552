"""What a walk over samples found, where the numbers are known and where they are on their way."""

import pytest
import torch

from krylov_descent.objective.evaluation import Evaluation, check_normaliser
from krylov_descent.runtime.engine import Launched

GRADIENT, SQUARES = torch.tensor([3.0, -4.0]), torch.tensor([9.0, 16.0])


def test_the_norm_is_the_length_of_the_gradient_in_its_own_precision() -> None:
    found = Evaluation(0.5, GRADIENT, SQUARES, 7, 6.5)
    assert (found.value, found.norm) == (0.5, 5.0)
    assert (found.samples, found.normaliser) == (7, 6.5)
    # In float32 these squares are infinite, in float64 they are not.
    assert Evaluation(0.5, GRADIENT * 1e25, SQUARES, 7, 6.5).norm == float("inf")


def test_numbers_on_their_way_are_waited_for_once_and_by_the_reader() -> None:
    reads = list[int]()

    def read() -> tuple[float, float]:
        reads.append(1)
        return 0.25, 5.0

    found = Evaluation(Launched(read), GRADIENT, SQUARES, 7, 7.0)
    without = found.without_squares()
    assert not reads
    assert (without.value, without.norm, found.value, found.norm) == (0.25, 5.0, 0.25, 5.0)
    assert len(reads) == 1


def test_without_squares_everything_else_is_the_same() -> None:
    found = Evaluation(0.5, GRADIENT, SQUARES, 7, 6.5).without_squares()
    assert found.squares.numel() == 0
    assert found.gradient is GRADIENT
    assert (found.value, found.samples, found.normaliser) == (0.5, 7, 6.5)


def test_a_mean_over_nothing_is_refused() -> None:
    check_normaliser(0.5)
    with pytest.raises(ValueError, match="every target is ignored or has weight zero"):
        check_normaliser(0.0)

"""Rows that the device counts are those that the host counts; one recording appends any of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from krylov_descent.algorithms.basis_storage import Alone, StoredBasis
from krylov_descent.algorithms.growing_basis import GrowingBasis
from krylov_descent.algorithms.krylov import KrylovSpace, fill_with_krylov_space, found_on_host
from krylov_descent.algorithms.metric import Diagonal, Metric
from krylov_descent.algorithms.subspace import store_previous
from krylov_descent.cuda.graphs.counted_basis import CountedBasis
from tests.subspaces import Dear
from tests.tape import Tape

SIZE, KRYLOV = 9, 4


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def curvature(v: Tensor) -> Tensor:
    """Hv with a dense H."""
    root = drawn(SIZE, SIZE, seed=5)
    return root @ (root.t() @ v)


@pytest.mark.parametrize("previous", [0, 2])
@pytest.mark.parametrize("metric", [Diagonal, Dear])
def test_the_basis_is_the_one_that_the_host_counts(
    metric: Callable[[Tensor], Metric], previous: int
) -> None:
    D, g, slots = metric(drawn(SIZE, seed=1).abs() + 0.1), drawn(SIZE, seed=2), KRYLOV + previous
    found = []
    for make in (lambda rows: GrowingBasis(StoredBasis.at(rows)), CountedBasis):
        rows = torch.zeros(slots, SIZE, dtype=torch.float64)
        store_previous(
            StoredBasis.at(rows), KRYLOV, list(drawn(previous, SIZE, seed=3)), Alone(SIZE)
        )
        space = KrylovSpace(make(rows), curvature, D, g, Alone(SIZE))
        found.append((rows, fill_with_krylov_space(space, KRYLOV, previous)))
    (expected, numbers), (rows, others) = found
    torch.testing.assert_close(rows, expected)
    for ours, theirs in zip(found_on_host(others)[1:], found_on_host(numbers)[1:], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_recording_appends_every_row() -> None:
    rows = torch.zeros(3, SIZE, dtype=torch.float64)
    basis, vector = CountedBasis(rows), drawn(SIZE)
    table = torch.zeros(3, 3, dtype=torch.float64)

    def append() -> None:
        basis.append(vector, torch.tensor(2.0, dtype=torch.float64))
        basis.note(table, basis.times(vector))

    basis.begin()
    tape = Tape.record(append)
    vectors = drawn(3, SIZE, seed=1)
    for k in range(3):
        vector.copy_(vectors[k])
        tape.replay()
    torch.testing.assert_close(rows, 2 * vectors)
    torch.testing.assert_close(table, (2 * vectors @ vectors.t()).t().tril())
    torch.testing.assert_close(basis.newest(), 2 * vectors[2])
    basis.begin_at(1)
    torch.testing.assert_close(basis.newest(), 2 * vectors[0])
    torch.testing.assert_close(basis.waiting(), 2 * vectors[1])
    basis.begin()
    assert not rows.any()

"""The basis kept in bfloat16, in slices and on the host, beside the one that is kept as it is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD
from krylov_descent.algorithms.basis_storage import (
    Placement,
    Replicated,
    Sharded,
    Storage,
    StoredBasis,
)
from krylov_descent.algorithms.metric import Diagonal
from krylov_descent.algorithms.subspace import Subspace, krylov_basis
from krylov_descent.curvature.preconditioners.preconditioner import Identity
from krylov_descent.runtime.ranks import Ranks
from tests.optimizers.nets import classes, net, parameters_of
from tests.subspaces import basis_in_one_process, vectors

CPU = torch.device("cpu")
SIZE = 40
BFLOAT16 = Storage(torch.bfloat16)


def problem(dtype: torch.dtype = torch.float64, size: int = SIZE) -> tuple[Tensor, Tensor, Tensor]:
    """H with eigenvalues from 0.01 to 10, D, and g."""
    generator = torch.Generator().manual_seed(1)
    q, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    h = (q * torch.logspace(-2, 1, size, dtype=torch.float64)) @ q.t()
    d = torch.rand(size, dtype=torch.float64, generator=generator) + 0.5
    g = torch.randn(size, dtype=torch.float64, generator=generator)
    return h.to(dtype), d.to(dtype), g.to(dtype)


def stored(
    storage: Storage,
    dtype: torch.dtype = torch.float64,
    placement: type[Replicated] | type[Sharded] = Replicated,
    size: int = SIZE,
) -> tuple[Subspace, Tensor]:
    """The subspace and its rows [r, n]."""
    h, d, g = problem(dtype, size)
    place: Placement = placement(Ranks(CPU), len(g))
    found = krylov_basis(
        lambda v: h @ v,
        Diagonal(d),
        g,
        [g.flip(0), g.roll(3)],
        6,
        placement=place,
        storage=storage,
    )
    return found, torch.stack([found.rows.get(k) for k in range(found.rank)])


@pytest.mark.parametrize("placement", [Replicated, Sharded])
def test_in_one_process_it_is_the_basis_of_algorithm_2(placement: type[Replicated]) -> None:
    h, d, g = problem()
    previous = [g.flip(0), g.roll(3)]
    expected = basis_in_one_process(lambda v: h @ v, Diagonal(d), g, previous, 6)
    found, rows = stored(Storage(), placement=placement)
    torch.testing.assert_close(rows, vectors(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.curvature, expected.curvature, rtol=0, atol=1e-12)
    c = torch.linspace(-1, 1, 8, dtype=torch.float64)
    torch.testing.assert_close(found.combine(c), expected.combine(c))
    torch.testing.assert_close(found.project(g.clone()), expected.project(g))


def test_a_rounded_basis_stays_orthogonal_and_its_curvature_is_of_what_is_stored() -> None:
    size = 600
    h, d, g = problem(torch.float32, size)
    found, rows = stored(BFLOAT16, torch.float32, size=size)
    assert found.rank == 8
    # Each entry is rounded by half of 2⁻⁷ at most, and the roundings of a row do not know of the
    # other rows: their inner products are smaller by √n.
    gram = ((rows * d).double() @ rows.double().t() - torch.eye(8)).abs()
    assert float(gram.max()) < 2.0**-8
    assert float((gram - gram.diag().diag()).max()) < 2.0**-8 / size**0.5 * 4
    assert torch.equal(rows, rows.bfloat16().float())
    exact = rows.double() @ h.double() @ rows.double().t()
    torch.testing.assert_close(found.curvature, exact, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        found.project(g.clone()), rows.double() @ g.double(), rtol=1e-4, atol=1e-4
    )


def test_a_direction_within_the_rounding_of_the_rows_is_left_out() -> None:
    # D⁻¹H = 1: there is nothing beside the first direction.
    g = torch.randn(500)
    found = basis_in_one_process(torch.clone, Identity(), g, [g * 2], 4, BFLOAT16)
    assert found.rank == 1
    assert float(found.curvature) == pytest.approx(1, abs=0.01)


def test_rows_may_be_kept_in_a_place_that_is_there_already() -> None:
    room = torch.full((3, 4), torch.nan)
    store = StoredBasis.at(room)
    rows = torch.randn(3, 4)
    for k, row in enumerate(rows):
        store.put(k, row)
    assert store.plain
    assert store.count == 3
    assert torch.equal(room, rows)


def test_blocks_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("krylov_descent.algorithms.basis_storage.NARROWEST", 16)
    rows, like = torch.randn(5, 101), torch.zeros(101)
    store = StoredBasis(5, 101, like, BFLOAT16)
    for k, row in enumerate(rows):
        store.put(k, row)
    rounded = rows.bfloat16().float()
    v, c = torch.randn(101), torch.randn(4)
    for some in (slice(0, 4), slice(1, 5)):
        torch.testing.assert_close(store.times(some, v), rounded[some] @ v)
        torch.testing.assert_close(store.combine(some, c), rounded[some].t() @ c)
    torch.testing.assert_close(store.gram(), rounded @ rounded.t())
    store.move(3, 1)
    assert torch.equal(store.get(1), rounded[3])


@pytest.mark.parametrize(
    "options", [{"basis_dtype": torch.bfloat16}, {"basis": "sharded"}, {"basis_device": "cpu"}]
)
def test_training_goes_as_well(options: dict[str, Any]) -> None:
    # Rounding takes a single run elsewhere, for better or worse; on the mean it should do neither.
    losses = []
    # "auto" has another preconditioner where the basis is sharded.
    settings: dict[str, Any] = {"dimension": 8, "preconditioner": "fisher-diagonal"}
    for seed in range(8):
        models = net(seed=seed), net(seed=seed)
        plain = KSD(models[0], nn.CrossEntropyLoss(), **settings)
        other = KSD(models[1], nn.CrossEntropyLoss(), **settings, **options)
        for _ in range(6):
            expected, found = plain.step(classes()), other.step(classes())
        losses.append((found.loss_after, expected.loss_after))
        if options == {"basis_device": "cpu"}:  # no change where the parameters are there already
            assert torch.equal(parameters_of(models[0]), parameters_of(models[1]))
    found_mean, expected_mean = torch.tensor(losses).mean(0).tolist()
    assert found_mean == pytest.approx(expected_mean, rel=0.1)


class OnlyWhole:
    """A preconditioner that cannot act on a part of a vector."""

    def update(self, objective: Any, data: Any) -> Any:
        return objective.value_and_gradient(data)

    def solve(self, vector: Tensor) -> Tensor:
        return vector.clone()

    def multiply(self, vector: Tensor) -> Tensor:
        return vector.clone()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"basis": "halved"}, "`basis` must be one of 'replicated', 'sharded', found 'halved'"),
        ({"basis_dtype": torch.float16}, "`basis_dtype` must be torch.bfloat16, or None"),
        ({"basis_device": "cuda"}, "`basis_device` must be 'cpu', or None"),
        ({"basis": "sharded", "preconditioner": OnlyWhole()}, "entry by entry.*OnlyWhole has not"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        KSD(net(), nn.CrossEntropyLoss(), **options)

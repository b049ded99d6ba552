"""The sets A, B and C of a KSD step: their sizes, where they come from, and determinism."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from krylov_descent import KSD, StepResult
from krylov_descent.objective.subsets import Size

N = 40


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def samples(count: int = N) -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return torch.randn(count, 5).double(), torch.randn(count, 3).double()


def theta(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """A map-style dataset that remembers who was asked for."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.asked = x, y, list[int]()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.asked.append(index)
        return self.x[index], self.y[index]


class Streamed(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(self.x, self.y, strict=True))


# Sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subset_size", "expected"),
    [
        ("auto", (N, N)),
        ("paper", (10, 10)),  # N/K
        (7, (7, 7)),
        (0.25, (10, 10)),
        (("paper", 0.5), (10, 20)),
        (("auto", 5), (N, 5)),
        (N, (N, N)),
        (1, (1, 1)),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_the_result_reports_the_sizes(
    subset_size: Size | tuple[Size, Size], expected: tuple[int, int], streamed: bool
) -> None:
    x, y = samples()
    optimizer = KSD(network(), nn.MSELoss(), dimension=4, subset_size=subset_size)
    result = optimizer.step(zip(x.split(9), y.split(9), strict=True) if streamed else (x, y))
    assert result.samples == N
    assert (result.curvature_samples, result.objective_samples) == expected


@pytest.mark.parametrize(
    ("size", "total", "dimension", "expected"),
    [
        ("auto", 2500, 2, 1250),
        ("auto", 2500, 20, 1000),
        ("auto", 1999, 20, 1999),
        ("fixed", 2500, 2, 1250),
        ("fixed", 2500, 20, 1000),
        ("fixed", 1999, 20, 1999),
    ],
)
def test_automatic_sets_are_large_and_disjoint_where_the_data_allow_it(
    size: Size, total: int, dimension: int, expected: int
) -> None:
    optimizer = KSD(network(), nn.MSELoss(), dimension=dimension, subset_size=size)
    result = optimizer.step(samples(total))
    assert (result.curvature_samples, result.objective_samples) == (expected, expected)


@pytest.mark.parametrize(("size", "shared"), [(20, 0), (30, 20), (39, 38)])
def test_sets_are_disjoint_or_share_as_little_as_they_can(size: int, shared: int) -> None:
    data = Pairs(*samples())
    optimizer = KSD(network(), nn.MSELoss(), dimension=2, subset_size=size)
    drawn = []
    for _ in range(2):
        data.asked.clear()
        optimizer.step(data)
        everyone, rest = data.asked[:N], data.asked[N:]
        assert everyone == list(range(N))
        b, c = set(rest[:size]), set(rest[size:])
        assert len(rest) == 2 * size
        assert len(b) == len(c) == size
        assert len(b & c) == shared
        drawn.append((b, c))
    assert drawn[0] != drawn[1]  # drawn anew each step


def test_a_size_beyond_the_data_is_an_error() -> None:
    model = network()
    before = theta(model)
    optimizer = KSD(model, nn.MSELoss(), subset_size=N + 1)
    for data in (samples(), [samples()]):
        with pytest.raises(ValueError, match=r"`subset_size` asks for 41 samples .* has 40"):
            optimizer.step(data)
    assert torch.equal(theta(model), before)


@pytest.mark.parametrize("bad", [0, -3, 0.0, 1.5, "half", True, (3,), (1, 2, 3), None])
def test_a_size_that_is_none_is_an_error(bad: Any) -> None:
    with pytest.raises(ValueError, match="`subset_size` must be"):
        KSD(network(), nn.MSELoss(), subset_size=bad)


# Sets by hand --------------------------------------------------------------------------------


def test_sets_by_hand_are_taken_as_given() -> None:
    (x, y), model = samples(), network()
    B, C = (x[3:9], y[3:9]), (x[5:20], y[5:20])
    optimizer = KSD(model, nn.MSELoss(), dimension=3)
    before = theta(model)
    objective_before = float(nn.MSELoss()(model(C[0]), C[1]).detach())
    result = optimizer.step((x, y), curvature_data=B, objective_data=[C])
    assert (result.samples, result.curvature_samples, result.objective_samples) == (N, 6, 15)
    assert result.loss_before == pytest.approx(objective_before, rel=1e-14)
    objective_after = float(nn.MSELoss()(model(C[0]), C[1]).detach())
    assert result.loss_after == pytest.approx(objective_after, rel=1e-14)

    # Each of them matters.
    found = theta(model)
    for changed in ({"curvature_data": C}, {"objective_data": B}, {"data": B}):
        other = network()
        assert torch.equal(theta(other), before)
        sets: dict[str, Any] = {"data": (x, y), "curvature_data": B, "objective_data": C} | changed
        KSD(other, nn.MSELoss(), dimension=3).step(**sets)
        assert float((theta(other) - found).norm()) > 1e-3 * float((found - before).norm())


@pytest.mark.parametrize("kept", [{}, {"basis_dtype": torch.bfloat16}])
def test_another_order_of_c_at_each_walk_is_no_noise(kept: dict[str, Any]) -> None:
    model, (x, y) = network(), samples()
    optimizer = KSD(model, nn.MSELoss(), dimension=4, **kept)
    shuffled = DataLoader(Pairs(x, y), batch_size=8, shuffle=True)
    result = optimizer.step((x, y), objective_data=shuffled)
    assert result.noise < 1e-12
    assert result.iterations > 2


def test_c_cannot_be_walked_over_only_once() -> None:
    x, y = samples()
    optimizer = KSD(network(), nn.MSELoss(), dimension=3, subset_size=8)
    with pytest.raises(TypeError, match="walks over `objective_data` several times"):
        optimizer.step((x, y), objective_data=iter([(x, y)]))


@pytest.mark.parametrize("given", ["curvature_data", "objective_data"])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_other_set_is_drawn(given: str, streamed: bool) -> None:
    x, y = samples()
    data: Any = [(x[:30], y[:30]), (x[30:], y[30:])] if streamed else (x, y)
    optimizer = KSD(network(), nn.MSELoss(), dimension=3, subset_size=8)
    by_hand: dict[str, Any] = {given: (x[:5], y[:5])}
    result = optimizer.step(data, **by_hand)
    sizes = {
        "curvature_data": result.curvature_samples,
        "objective_data": result.objective_samples,
    }
    assert sizes.pop(given) == 5
    assert list(sizes.values()) == [8]


# Forms of data -------------------------------------------------------------------------------


def refilled(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches in the memory of the one before."""
    inputs, targets = torch.empty_like(x[:11]), torch.empty_like(y[:11])
    for some, their in zip(x.split(11), y.split(11), strict=True):
        yield inputs[: len(some)].copy_(some), targets[: len(some)].copy_(their)


def in_form(name: str, x: Tensor, y: Tensor) -> Any:
    forms: dict[str, Any] = {
        "tensors": lambda: (x, y),
        "tensor dataset": lambda: TensorDataset(x, y),
        "dataset": lambda: Pairs(x, y),
        "iterable dataset": lambda: Streamed(x, y),
        "loader, uneven": lambda: DataLoader(Pairs(x, y), batch_size=7),
        "loader, shuffled": lambda: DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True),
        "loader, own sampler": lambda: DataLoader(
            TensorDataset(x, y), batch_size=9, sampler=list(range(len(x)))
        ),
        "list": lambda: list(zip(x.split([1, 2, 30, 7]), y.split([1, 2, 30, 7]), strict=True)),
        "generator": lambda: (pair for pair in zip(x.split(11), y.split(11), strict=True)),
        "generator, refilled": lambda: refilled(x, y),
    }
    return forms[name]()


FORMS = [
    "tensor dataset",
    "dataset",
    "iterable dataset",
    "loader, uneven",
    "loader, shuffled",
    "loader, own sampler",
    "list",
    "generator",
    "generator, refilled",
]


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_the_same_data_give_the_same_step(form: str) -> None:
    x, y = samples()
    expected, found = network(), network()
    reference, optimizer = (KSD(m, nn.MSELoss(), dimension=4) for m in (expected, found))
    for _ in range(2):
        result = optimizer.step(in_form(form, x, y))
        assert result.samples == result.curvature_samples == result.objective_samples == N
        assert result.loss_after == pytest.approx(reference.step((x, y)).loss_after, rel=1e-10)
        torch.testing.assert_close(theta(found), theta(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("settings", [{"micro_batch": 3}, {"activation_memory": 2000}])
def test_micro_batches_give_the_same_step(settings: dict[str, int]) -> None:
    expected, found = network(), network()
    reference = KSD(expected, nn.MSELoss(), dimension=4)
    optimizer = KSD(found, nn.MSELoss(), dimension=4, **settings)  # type: ignore[arg-type]
    for _ in range(2):
        result = optimizer.step(samples())
        assert result.loss_after == pytest.approx(reference.step(samples()).loss_after, rel=1e-10)
        assert result.graphs_kept == ("micro_batch" in settings)
    torch.testing.assert_close(theta(found), theta(expected), rtol=1e-6, atol=1e-7)


# Determinism ---------------------------------------------------------------------------------


def train(seed: int, steps: int = 3) -> tuple[Tensor, list[StepResult]]:
    model = network(torch.float32)
    x, y = samples()
    optimizer = KSD(model, nn.MSELoss(), dimension=3, subset_size=10, seed=seed)
    results = [optimizer.step((x.float(), y.float())) for _ in range(steps)]
    return theta(model), results


def numbers(results: list[StepResult]) -> list[Any]:
    """All but the clock."""
    return [
        (r.loss, r.loss_before, r.loss_after, r.noise, r.ritz_values, r.evaluations)
        for r in results
    ]


def test_the_same_seed_gives_the_same_bits_whatever_the_global_generator_does() -> None:
    torch.manual_seed(1)
    first, first_results = train(seed=5)
    torch.manual_seed(2)
    second, second_results = train(seed=5)
    assert torch.equal(first, second)
    assert numbers(first_results) == numbers(second_results)


def test_another_seed_draws_other_sets() -> None:
    (first, _), (second, _) = train(seed=5), train(seed=6)
    assert not torch.equal(first, second)


def test_seeds_one_apart_share_no_sets_at_steps_one_apart() -> None:
    """As they would if the seed of a step were seed + step."""
    drawn = []
    for seed in (5, 6):
        data = Pairs(*samples())
        optimizer = KSD(network(), nn.MSELoss(), dimension=2, subset_size=10, seed=seed)
        for _ in range(3):
            data.asked.clear()
            optimizer.step(data)
            drawn.append(tuple(data.asked[N:]))
    assert len(set(drawn)) == 6


def test_a_step_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    train(seed=0, steps=1)
    assert torch.equal(torch.get_rng_state(), before)

"""Sets that grow when what they say of a step does not hold for all the data."""

import copy
import itertools
import math
import pickle
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from krylov_descent import KSD, Status, StepResult
from krylov_descent.objective.batches import as_samples
from krylov_descent.optimizers.ksd import subset_growth as growing_sets
from krylov_descent.optimizers.result import SCALED_AWAY
from krylov_descent.runtime.ranks import Ranks
from tests.engines import ENGINES, check_alike, device_of, use
from tests.optimizers.nets import beginning_small, noisy_classes, parameters_of
from tests.terms import wide_net_and_term

N, INPUTS, CLASSES = 1200, 6, 3
ALONE = Ranks(torch.device("cpu"))


def step(loss: float, gain: float, *, part: int = 100, status: Status = Status.MOVED) -> StepResult:
    return StepResult(
        loss=loss,
        loss_before=gain,
        loss_after=0.0,
        status=status,
        reason="",
        samples=1000,
        curvature_samples=part,
        objective_samples=part,
    )


def doublings_after(*results: StepResult) -> int:
    group: dict[str, Any] = {}
    growing_sets.begin(group)
    for result in results:
        growing_sets.learn(group, result)
    return int(group[growing_sets.DOUBLINGS])


def test_steps_that_keep_their_promise_leave_the_sets_alone() -> None:
    # Each is said to bring 1, and brings 0.6.
    assert doublings_after(*(step(10 - 0.6 * k, 1.0) for k in range(12))) == 0


def test_where_the_loss_falls_by_factors_a_rise_is_seen_at_once() -> None:
    """Older decreases, which are larger, do not hide it."""
    falling = [step(2.0**-k, 2.0**-k / 2) for k in range(10)]
    assert doublings_after(*falling) == 0
    assert doublings_after(*falling, step(3 * 2.0**-10, 2.0**-12)) == 1


def test_steps_that_do_not_have_them_doubled() -> None:
    # Seen after the second; the third begins anew, and the fourth shows it again.
    losses = [10 - 0.4 * k for k in range(4)]
    found = [doublings_after(*(step(x, 1.0) for x in losses[: k + 1])) for k in range(4)]
    assert found == [0, 1, 1, 2]


def test_one_bad_step_among_good_ones_is_forgiven() -> None:
    # The last three brought 1, 1 and 0.2 of 1 each: 0.2 + 0.7 + 0.49 of 1 + 0.7 + 0.49.
    assert doublings_after(step(10, 1), step(9, 1), step(8, 1), step(7.8, 1)) == 0
    assert doublings_after(step(10, 1), step(9.8, 1)) == 1


def test_a_step_without_decrease_has_them_doubled_and_one_that_is_not_finite_not() -> None:
    assert doublings_after(step(10, 0, status=Status.NO_DECREASE)) == 1
    assert doublings_after(step(math.nan, 0, status=Status.NOT_FINITE)) == 0


def test_a_step_that_lr_made_worthless_says_nothing_of_the_sets() -> None:
    scaled = replace(step(10, 0, status=Status.NO_DECREASE), reason=SCALED_AWAY)
    assert doublings_after(scaled) == 0


def test_losses_on_other_data_are_not_compared() -> None:
    group: dict[str, Any] = {}
    growing_sets.begin(group)
    growing_sets.learn(group, step(10, 1.0))
    group[growing_sets.SAME_DATA] = False
    growing_sets.learn(group, step(11, 1.0))
    growing_sets.learn(group, step(11, 0, status=Status.NO_DECREASE))
    assert group[growing_sets.DOUBLINGS] == 0
    group[growing_sets.SAME_DATA] = True
    growing_sets.learn(group, step(12, 1.0))  # nothing is left to compare it with
    assert group[growing_sets.DOUBLINGS] == 0
    growing_sets.learn(group, step(12.5, 1.0))
    assert group[growing_sets.DOUBLINGS] == 1


def same(one: Any, other: Any) -> bool:
    first, second = (
        growing_sets.LastData().fingerprint(as_samples(data, may_be_empty=True), ALONE)
        for data in (one, other)
    )
    return first == second


def test_data_are_the_same_if_their_numbers_are() -> None:
    x, y = noisy_classes(30, 2, 3)
    for data in ((x, y), (x, None), ({"a": x}, [y]), TensorDataset(x, y)):
        assert same(data, data)
    assert same((x, y), TensorDataset(x, y))
    assert same((x, y), (x.clone(), y.clone()))  # as a resumed run has them
    assert same((x[:20], y[:20]), (x[:20], y[:20]))
    loader = DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True)
    assert same(loader, loader)
    none = x[:0], y[:0]  # on a rank that has none
    assert same(none, none)


def test_data_are_others_if_numbers_dtype_or_shape_are() -> None:
    x, y = noisy_classes(5000, 2, 3)
    for other in ((x + 1, y), (x, y.flip(0)), (x, None), (x.flip(0), y.flip(0)), (x.float(), y)):
        assert not same((x, y), other)
    assert not same((x[:2000], y[:2000]), (x[1000:3000], y[1000:3000]))
    zeros = torch.zeros(5000, 4)
    for like in (zeros[:4999], zeros[:, :3], zeros.view(5000, 2, 2), zeros.double()):
        assert not same((zeros, None), (like, None))


def test_what_is_not_in_memory_may_be_other_data_each_time() -> None:
    batches = [(torch.zeros(3, 2), torch.zeros(3))]
    assert not same(batches, batches)
    assert not same(iter(batches), iter(batches))


def test_data_are_looked_at_again_only_if_a_tensor_is_another_or_was_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Mock(return_value=1)
    monkeypatch.setattr(growing_sets, "_fingerprint", looks)
    last, (x, y) = growing_sets.LastData(), noisy_classes(30, 2, 3)
    with torch.inference_mode():
        uncounted = torch.zeros(30)

    def looks_at(*data: Any) -> int:
        looks.reset_mock()
        for one in data:
            last.fingerprint(as_samples(one), ALONE)
        return looks.call_count

    assert looks_at((x, y), TensorDataset(x, y), (x, y)) == 1
    assert looks_at((x[:20], y[:20]), (x[:20], y[:20])) == 1  # new views of the same numbers
    assert looks_at((x[10:], y[10:])) == looks_at((x, y)) == looks_at((x, None)) == 1
    x.add_(1)
    assert looks_at((x, None), (x, None)) == 1
    assert looks_at((uncounted, None), (uncounted, None)) == 2


def test_the_memory_of_the_data_does_not_hold_them_and_is_not_copied() -> None:
    last, x = growing_sets.LastData(), torch.zeros(3, 2)
    last.fingerprint(as_samples((x, None)), ALONE)
    assert vars(pickle.loads(pickle.dumps(last)))["_marks"] == []
    gone = weakref.ref(x)
    del x
    assert gone() is None


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"), [(2, 2, 1000), (249, 200, 500), (600, 400, 250)]
)
def test_sets_begin_with_fewer_samples_the_larger_the_model_is(
    inputs: int, outputs: int, expected: int
) -> None:
    """So many that a product keeps a CPU busy, times 50,000 parameters 25 million."""
    optimizer = KSD(nn.Linear(inputs, outputs), nn.MSELoss())
    assert optimizer.subset_sizes.of(4000) == (expected, expected)


def test_there_is_nothing_beyond_all_of_the_data() -> None:
    assert doublings_after(*(step(10, 1, part=1000) for _ in range(5))) == 0


def least_loss(data: tuple[Tensor, Tensor]) -> float:
    """Of a linear classifier, by SciPy."""

    def function(flat: Any) -> tuple[float, Any]:
        weights = torch.from_numpy(flat).requires_grad_()
        matrix = weights[: INPUTS * CLASSES].view(CLASSES, INPUTS)
        scores = nn.functional.linear(data[0], matrix, weights[INPUTS * CLASSES :])
        value = nn.functional.cross_entropy(scores, data[1])
        (gradient,) = torch.autograd.grad(value, weights)
        return float(value.detach()), gradient.numpy()

    start = np.zeros(INPUTS * CLASSES + CLASSES)
    found = scipy.optimize.minimize(
        function, start, jac=True, method="BFGS", options={"gtol": 1e-9}
    )
    return float(found.fun)


@pytest.mark.parametrize(("size", "reached"), [("auto", True), (250, False)])
def test_the_minimum_of_noisy_data_is_reached(size: Any, reached: bool) -> None:
    data = noisy_classes(N, INPUTS, CLASSES)
    model = nn.Linear(INPUTS, CLASSES).double()
    optimizer = KSD(model, nn.CrossEntropyLoss(), subset_size=size, dimension=10)
    beginning_small(optimizer)
    results = [optimizer.step(data) for _ in range(25)]
    assert results[0].curvature_samples == results[0].objective_samples == 250
    assert results[-1].objective_samples == (N if reached else 250)
    excess = results[-1].loss - least_loss(data)
    assert (excess < 1e-9) if reached else (excess > 1e-4)


def parts_of(data: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
    """Half of the samples, others for each k."""
    part = torch.arange(N).roll(150 * k)[: N // 2]
    return data[0][part], data[1][part]


def test_where_every_step_has_new_data_sets_are_as_if_fixed() -> None:
    """The loss differs from batch to batch by more than a step near the minimum brings."""
    data, model = noisy_classes(N, INPUTS, CLASSES), nn.Linear(INPUTS, CLASSES).double()
    optimizer = beginning_small(KSD(model, nn.CrossEntropyLoss(), dimension=10))
    sizes = [optimizer.step(parts_of(data, k)).objective_samples for k in range(8)]
    assert sizes == [250] + 7 * [N // 2]  # two sets of 1,000 do not fit
    assert optimizer.param_groups[0][growing_sets.DOUBLINGS] == 0


def test_sets_given_by_hand_teach_nothing() -> None:
    data, model = noisy_classes(N, INPUTS, CLASSES), nn.Linear(INPUTS, CLASSES).double()
    optimizer = beginning_small(KSD(model, nn.CrossEntropyLoss(), dimension=10))
    few = data[0][:30], data[1][:30]
    for _ in range(8):
        optimizer.step(data, curvature_data=few, objective_data=few)
    assert optimizer.param_groups[0][growing_sets.DOUBLINGS] == 0


def test_without_noise_they_stay_small() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(N, INPUTS)
    teacher, model = nn.Linear(INPUTS, 2), nn.Linear(INPUTS, 2)
    data = inputs, teacher(inputs).detach()
    optimizer = beginning_small(KSD(model, nn.MSELoss(), dimension=3))
    for _ in range(4):
        result = optimizer.step(data)
    assert result.objective_samples == N // 3
    assert result.loss < 1e-3


def small_sets() -> KSD:
    torch.manual_seed(3)
    model = nn.Linear(INPUTS, CLASSES).double()
    return beginning_small(KSD(model, nn.CrossEntropyLoss(), dimension=10))


def resumed(first: KSD, second: KSD, without: str = "") -> KSD:
    """The second in the state of the first, but for one entry."""
    second.objective.network.model.load_state_dict(first.objective.network.model.state_dict())
    state = copy.deepcopy(first.state_dict())
    state["param_groups"][0].pop(without, None)
    second.load_state_dict(state)
    return second


def parameters(optimizer: KSD) -> Tensor:
    return parameters_of(optimizer.objective.network.model)


@pytest.mark.parametrize("new_data", [False, True])
def test_a_loaded_state_goes_on_alike(new_data: bool) -> None:
    data = noisy_classes(N, INPUTS, CLASSES)

    def run(optimizer: KSD, steps: range) -> None:
        for k in steps:
            optimizer.step(parts_of(data, k) if new_data else data)

    straight, first = small_sets(), small_sets()
    run(straight, range(10))
    run(first, range(7))
    assert bool(first.param_groups[0][growing_sets.DOUBLINGS]) is not new_data
    second = resumed(first, small_sets())
    run(second, range(7, 10))
    assert torch.equal(parameters(straight), parameters(second))


def test_also_directly_after_a_change_of_data() -> None:
    """Wherever it was saved, and whatever the optimiser that loads it has seen before."""
    x, y = noisy_classes(2 * N, INPUTS, CLASSES)
    kinds: dict[str, Any] = {
        "a": lambda: (x[:N], y[:N]),
        "b": lambda: (x[N:], y[N:]),
        "a copy of b": lambda: (x[N:].clone(), y[N:].clone()),
        "a stream": lambda: iter([(x[:N], y[:N])]),
    }
    order = ["a", "a", "b", "b", "a copy of b", "a copy of b", "a stream", "a", "a"]
    straight, others, sizes = small_sets(), [], []
    for k, kind in enumerate(order):
        used = small_sets()
        used.step(kinds["b"]())
        others += [(order[k:], resumed(straight, second)) for second in (small_sets(), used)]
        sizes.append(straight.step(kinds[kind]()).objective_samples)
    assert sizes[2:4] == [N, 250]  # the first step on other data, and the next
    for rest, optimizer in others:
        for kind in rest:
            optimizer.step(kinds[kind]())
        assert torch.equal(parameters(optimizer), parameters(straight))


@pytest.mark.parametrize("new_data", [False, True])
def test_a_state_from_before_fingerprints_goes_on_as_at_its_last_step(new_data: bool) -> None:
    data = noisy_classes(N, INPUTS, CLASSES)
    first = small_sets()
    for k in range(3):
        first.step(parts_of(data, k) if new_data else data)
    second = resumed(first, small_sets(), without=growing_sets.FINGERPRINT)
    for optimizer in (first, second):
        optimizer.step(parts_of(data, 3) if new_data else data)
    assert torch.equal(parameters(first), parameters(second))


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_of_terms_lower_the_loss_on_all_points(engine: str) -> None:
    results = steps_of_small_sets(engine, 8)
    for before, after in itertools.pairwise(results):
        assert after.loss < before.loss
    repeated = next(result for result in results if result.objective_samples == 400)
    assert repeated.curvature_samples == 20  # the basis was there already
    assert repeated.loss_before == pytest.approx(repeated.loss, rel=1e-9)
    assert repeated.evaluations > 2 + repeated.iterations  # those of both searches
    assert results[-1].curvature_samples == 400
    if engine != "eager":
        check_alike(results[:2], steps_of_small_sets("eager", 2), rel=1e-3)


def steps_of_small_sets(engine: str, count: int) -> list[StepResult]:
    """With sets of twenty points, which a search fits while it raises the loss of the others."""
    net, terms = wide_net_and_term(device_of(engine))
    optimizer = use(engine, KSD(net, terms, weight_decay=1e-9))
    optimizer.subset_sizes = replace(optimizer.subset_sizes, least=20)
    return [optimizer.step() for _ in range(count)]


def test_sets_that_were_asked_for_stay() -> None:
    sizes: list[tuple[Any, int | None]] = [(20, None), ("auto", 20)]
    for size, of_the_term in sizes:
        net, terms = wide_net_and_term(torch.device("cpu"), subset_size=of_the_term)
        optimizer = KSD(net, terms, subset_size=size)
        assert [optimizer.step().objective_samples for _ in range(4)] == [20] * 4

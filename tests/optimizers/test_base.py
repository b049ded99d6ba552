"""A step whose work an engine finds to be stale is undone, and made again without that engine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, KroneckerFactors, Objective, StepResult
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.runtime.engine import Engine, StaleError
from tests.optimizers.nets import (
    beginning_small,
    classes,
    net,
    noisy_classes,
    parameters_of,
)


class Stale(Engine):
    """An engine that finds work to be stale in some steps, counted from 0, and writes what it did.

    Args:
        steps: in which it does.
    """

    def __init__(self, *steps: int) -> None:
        self.steps, self.verified, self.cleared = steps, 0, 0

    def verify(self) -> None:
        self.verified += 1
        if self.verified - 1 in self.steps:
            raise StaleError("the model has changed")

    def clear(self) -> None:
        self.cleared += 1


class WithEngine(KSD):
    """KSD whose work is run by another engine than the parameters' device has."""

    def __init__(self, engine: Engine, *args: Any, **options: Any) -> None:
        self.engine = engine
        super().__init__(*args, **options)

    def _engine(self) -> Engine:
        return self.engine


class Averaged:
    """A preconditioner of the user's, with memory: the running mean of squared gradients."""

    def __init__(self) -> None:
        self.mean = torch.zeros(51)
        self.updates = 0

    def update(self, objective: Objective, data: Any) -> Evaluation:
        found = objective.value_gradient_and_squares(data)
        self.mean.mul_(0.5).add_(found.squares, alpha=0.5)
        self.updates += 1
        return found

    def solve(self, vector: Tensor) -> Tensor:
        return vector / (self.mean + 1e-3)

    def multiply(self, vector: Tensor) -> Tensor:
        return vector * (self.mean + 1e-3)


PRECONDITIONERS: dict[str, Callable[[], Any]] = {
    "fisher-diagonal": lambda: "fisher-diagonal",
    "kronecker": lambda: KroneckerFactors(after=1),
    "of the user's": Averaged,
}
STEPS = 4


def trained(
    preconditioner: Any, engine: Engine | None = None
) -> tuple[list[StepResult], list[Tensor], Any]:
    """The results of some steps, the parameters and state afterwards, and the groups."""
    model = net()
    settings: dict[str, Any] = {"dimension": 4, "subset_size": 30, "preconditioner": preconditioner}
    loss = nn.CrossEntropyLoss()
    optimizer = (
        KSD(model, loss, **settings)
        if engine is None
        else WithEngine(engine, model, loss, **settings)
    )
    results = [replace(optimizer.step(classes()), seconds={}) for _ in range(STEPS)]
    state = [kept for of_p in optimizer.state.values() for kept in of_p.values()]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return results, [parameters_of(model), *state], groups


@pytest.mark.parametrize("stale", [(0,), (2,), tuple(range(STEPS))], ids=str)
@pytest.mark.parametrize("name", PRECONDITIONERS)
def test_a_stale_step_is_made_again_bit_for_bit(name: str, stale: tuple[int, ...]) -> None:
    make = PRECONDITIONERS[name]
    plain, fresh, engine = make(), Stale(), Stale(*stale)
    preconditioner = make()
    results, tensors, groups = trained(plain)
    trained(make(), fresh)
    found_results, found_tensors, found_groups = trained(preconditioner, engine)
    assert found_results == results
    assert all(map(torch.equal, found_tensors, tensors))
    assert found_groups == groups  # with the number of steps
    # Once a step: the second attempt is made without it.
    assert engine.verified == STEPS
    # A model that is seen for the first time makes an engine forget what it knows, too.
    assert engine.cleared == fresh.cleared + len(stale)
    if isinstance(plain, Averaged):
        assert preconditioner.updates == plain.updates == STEPS
        assert torch.equal(preconditioner.mean, plain.mean)


def test_the_second_attempt_does_not_take_the_first_for_a_step_with_the_same_data() -> None:
    """With the data of the step before, the sets of a step are smaller than with other data."""
    sizes = []
    for engine in (Stale(), Stale(1)):
        torch.manual_seed(0)
        model, (x, y) = nn.Linear(6, 3).double(), noisy_classes(2500, 6, 3)
        optimizer = WithEngine(engine, model, nn.CrossEntropyLoss(), dimension=20)
        beginning_small(optimizer)
        steps = (x, y), (x + 1, y)
        sizes.append([optimizer.step(data).objective_samples for data in steps])
    assert sizes == [[250, 1000], [250, 1000]]


def test_the_engine_runs_the_work_of_the_next_step_again() -> None:
    engine = Stale(0)
    optimizer = WithEngine(engine, net(), nn.CrossEntropyLoss(), dimension=3)
    optimizer.step(classes())
    assert engine.verified == 1
    optimizer.step(classes())
    assert engine.verified == 2
    assert optimizer.objective.engine is not engine  # which has its memory


def test_an_error_of_another_kind_is_not_repeated() -> None:
    class Broken(Stale):
        def verify(self) -> None:
            super().verify()
            raise RuntimeError("broken")

    engine, model = Broken(), net()
    before = parameters_of(model)
    optimizer = WithEngine(engine, model, nn.CrossEntropyLoss(), dimension=3)
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step(classes())
    assert engine.verified == 1
    assert torch.equal(parameters_of(model), before)
    assert optimizer.steps == 0

"""What holds for every optimiser: states, groups and modes that steps leave alone or refuse."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from krylov_descent import KSD, LBFGS, FirstOrder, HessianFree, NonlinearCG, Status
from tests.optimizers.nets import classes, net, parameters_of

SECOND_ORDER = [
    partial(KSD, dimension=3),
    partial(KSD, dimension=3, previous_steps=1),
    HessianFree,
    partial(NonlinearCG, iterations=3),
    partial(LBFGS, iterations=3),
]


def trained(make: Any) -> Any:
    optimizer = make(net(), nn.CrossEntropyLoss())
    for _ in range(2):
        assert optimizer.step(classes()).status is Status.MOVED
    return optimizer


@pytest.mark.parametrize("make", SECOND_ORDER)
def test_steps_of_one_leave_the_state_of_another_alone(make: Any) -> None:
    first = trained(make)
    twin = copy.deepcopy(first)
    second = make(copy.deepcopy(first.objective.network.model), nn.CrossEntropyLoss())
    second.load_state_dict(first.state_dict())
    for optimizer in (first, twin, second):
        losses = [optimizer.step(classes()).loss_after for _ in range(2)]
        if optimizer is first:
            expected = losses
        assert losses == expected


@pytest.mark.parametrize("make", SECOND_ORDER)
def test_a_state_that_was_handed_out_can_be_gone_back_to(make: Any) -> None:
    optimizer = trained(make)
    model = optimizer.objective.network.model
    theta, state = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    runs = []
    for _ in range(3):
        model.load_state_dict(theta)
        optimizer.load_state_dict(state)
        runs.append([optimizer.step(classes()).loss_after for _ in range(2)])
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("make", [*SECOND_ORDER, FirstOrder])
@pytest.mark.parametrize("data", [(), (classes(),)], ids=["empty call", "data"])
def test_inference_mode_is_refused_by_name(make: Any, data: Any) -> None:
    model = net()
    optimizer, before = make(model, nn.CrossEntropyLoss()), parameters_of(model)
    message = r"inference_mode\(\) rules out: .* torch\.no_grad\(\)"
    with torch.inference_mode(), pytest.raises(RuntimeError, match=message):
        optimizer.step(*data)
    assert torch.equal(parameters_of(model), before)
    assert (optimizer.steps, len(optimizer.state)) == (0, 0)
    assert optimizer.step(classes()).status is Status.MOVED


@pytest.mark.parametrize("make", [*SECOND_ORDER, FirstOrder])
@pytest.mark.parametrize("key", ["lr", "weight_decay"])
@pytest.mark.parametrize("value", [-5.0, math.nan, math.inf, None, "x"])
def test_groups_are_checked_at_each_step(make: Any, key: str, value: Any) -> None:
    """They may be written to by hand, by a scheduler or by a state that is loaded."""
    optimizer = trained(make)
    model = optimizer.objective.network.model
    before, right = parameters_of(model), optimizer.param_groups[0][key]
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=f"`{key}` must be a number of 0 or more"):
        optimizer.step(classes())
    assert torch.equal(parameters_of(model), before)
    optimizer.param_groups[0][key] = right
    assert optimizer.step(classes()).status is Status.MOVED


@pytest.mark.parametrize("make", [*SECOND_ORDER, FirstOrder])
def test_the_state_of_another_kind_of_optimiser_is_refused(make: Any) -> None:
    optimizer = trained(make)
    steps, other = optimizer.steps, torch.optim.Adam(net().parameters())
    with pytest.raises(ValueError, match=r"`state_dict` is not.*'seed' and no 'steps'"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.steps == steps
    assert optimizer.step(classes()).status is Status.MOVED


@pytest.mark.parametrize("make", SECOND_ORDER[:4])
def test_the_state_of_another_model_is_told(make: Any) -> None:
    wider = nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 3))
    narrower = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    data = torch.randn(30, 2), torch.randint(3, (30,))
    first, second = (make(model, nn.CrossEntropyLoss()) for model in (wider, narrower))
    for _ in range(2):
        first.step(data)
    second.load_state_dict(first.state_dict())
    before = parameters_of(narrower)
    with pytest.raises(RuntimeError, match=r"state is of another model: `\w+` of 0.weight has"):
        second.step(data)
    assert torch.equal(parameters_of(narrower), before)

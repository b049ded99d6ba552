"""What holds for every optimiser: states that steps leave alone, and no steps in inference mode."""

import copy
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

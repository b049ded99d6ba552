"""Data that are bound to an optimiser once, and steps without data."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import DataLoader, TensorDataset

from krylov_descent import KSD, LBFGS, FirstOrder, HessianFree, NonlinearCG, Term
from tests.optimizers.nets import classes, net, parameters_of

OPTIMIZERS = [
    partial(KSD, dimension=3),
    HessianFree,
    partial(NonlinearCG, iterations=3),
    partial(LBFGS, iterations=3),
    FirstOrder,
]


def bound(make: Any) -> tuple[nn.Module, Any]:
    model = net()
    return model, make(model, nn.CrossEntropyLoss()).bind(classes())


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_bare_steps_are_steps_on_the_bound_data(make: Any) -> None:
    model, optimizer = bound(make)
    assert optimizer.last_result is None
    expected = net()
    other = make(expected, nn.CrossEntropyLoss())
    for _ in range(2):
        result = optimizer.step()
        assert result.loss == other.step(classes()).loss
        assert optimizer.last_result is result
    assert torch.equal(parameters_of(model), parameters_of(expected))


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("positional", [False, True])
def test_a_closure_is_called_once_and_may_return_anything_with_its_graph(
    make: Any, positional: bool
) -> None:
    model, optimizer = bound(make)
    calls: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        calls.append(model(classes()[0]))
        return calls[-1]

    with torch.no_grad():
        result = optimizer.step(closure) if positional else optimizer.step(closure=closure)
    assert result.status.moved
    assert len(calls) == 1
    assert calls[0].requires_grad


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_gradients_that_others_made_are_refused(make: Any) -> None:
    model, optimizer = bound(make)
    before = parameters_of(model)

    def closure() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(classes()[0]), classes()[1]).backward()

    for arguments in ({"closure": closure}, {}):
        with pytest.raises(TypeError, match=r"leave out loss\.backward\(\), or call"):
            optimizer.step(**arguments)
    assert (optimizer.steps, optimizer.last_result) == (0, None)
    assert torch.equal(parameters_of(model), before)
    # The sentence names a call that ignores them.
    assert optimizer.step(data=classes(), closure=closure).status.moved


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_checkpoint_tool_gets_the_state_and_no_step(make: Any, frozen: bool) -> None:
    pairs: list[tuple[Any, Any]] = []
    for _ in range(2):
        model, optimizer = bound(make)
        if frozen:
            next(model.parameters()).requires_grad_(False)
        pairs.append((model, optimizer))
    (model, optimizer), (fresh, resumed) = pairs
    optimizer.step()
    found = get_optimizer_state_dict(model, optimizer)
    fresh.load_state_dict(model.state_dict())
    if make is not OPTIMIZERS[3]:  # the tool cannot resume torch's own L-BFGS either
        set_optimizer_state_dict(fresh, resumed, found)
    else:
        get_optimizer_state_dict(fresh, resumed)
    assert torch.equal(parameters_of(fresh), parameters_of(model))
    assert resumed.last_result is None
    assert resumed.step().status.moved


def test_data_of_a_step_go_before_bound_data_which_can_be_taken_back() -> None:
    model, expected = net(), net()
    optimizer, other = (KSD(m, nn.CrossEntropyLoss(), dimension=3) for m in (model, expected))
    inputs, targets = classes()
    few = inputs[:20], targets[:20]
    optimizer.bind((inputs, targets)).step(few)
    other.step(few)
    assert torch.equal(parameters_of(model), parameters_of(expected))
    assert optimizer.bind(None).step() is None  # creates the state


def test_bound_data_are_in_copies_but_not_in_the_state_dict() -> None:
    _, optimizer = bound(OPTIMIZERS[0])
    assert copy.deepcopy(optimizer).step().loss == optimizer.step().loss
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


def test_a_loader_is_bound_like_other_data() -> None:
    optimizer = KSD(net(), nn.CrossEntropyLoss(), dimension=3)
    optimizer.bind(DataLoader(TensorDataset(*classes()), batch_size=16))
    assert optimizer.step().samples == len(classes()[0])


def test_what_cannot_be_bound_is_told_so() -> None:
    optimizer = KSD(net(), nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match="generator can be iterated over only once: bind"):
        optimizer.bind(iter_ for iter_ in [classes()])
    with pytest.raises(TypeError, match="`data` must be a tuple"):
        optimizer.bind(classes()[0])
    inputs = torch.randn(5, 4)
    with_terms = KSD(net(), {"zero": Term(lambda model, x: model(x), inputs)})
    with pytest.raises(TypeError, match="terms have their own points and data"):
        with_terms.bind((inputs, inputs))


@pytest.mark.parametrize("data", [None, "bound"])
def test_a_gradient_scaler_is_refused(data: str | None) -> None:
    model, optimizer = bound(OPTIMIZERS[0])
    optimizer.bind(classes() if data else None)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(nn.functional.cross_entropy(model(classes()[0]), classes()[1])).backward()
    with pytest.raises(RuntimeError, match="KSD does not work with GradScaler"):
        scaler.step(optimizer)

"""A closure beside the data, as frameworks that wrap an optimiser pass one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from krylov_descent import KSD, LBFGS, FirstOrder, HessianFree, NonlinearCG, StepResult
from tests.optimizers.nets import classes, net, parameters_of

OPTIMIZERS = [
    partial(KSD, dimension=3),
    HessianFree,
    partial(NonlinearCG, iterations=3),
    partial(LBFGS, iterations=3),
    FirstOrder,
]


class Wrapper:
    """Passes closures to an optimiser as the wrapper of Lightning 2 does."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.calls: list[str] = []

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        inner = closure or (lambda: None)

        def wrapped() -> Any:
            result = inner()
            self.calls.append("closure")
            return result

        self._optimizer.register_step_post_hook(lambda *_: self.calls.append("step"))
        return self._optimizer.step(closure=wrapped, **kwargs)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_closure_is_called_once_before_the_step(make: Any) -> None:
    model, data = net(), classes()
    optimizer = make(model, nn.CrossEntropyLoss())
    wrapper, seen = Wrapper(optimizer), []

    def closure() -> Any:
        seen.append(parameters_of(model))
        loss = nn.functional.cross_entropy(model(data[0]), data[1])
        loss.backward()
        return loss

    before = parameters_of(model)
    with torch.no_grad():  # the closure of a torch optimiser has gradients all the same
        result = wrapper.step(closure, data=data)
    assert isinstance(result, StepResult)
    assert result.status.moved
    assert wrapper.calls == ["closure", "step"]
    assert len(seen) == 1
    assert torch.equal(seen[0], before)
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())

    expected = net()
    make(expected, nn.CrossEntropyLoss()).step(data)
    assert torch.equal(parameters_of(model), parameters_of(expected))


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_wrapper_without_a_closure_of_its_own_may_pass_the_data(make: Any) -> None:
    wrapper = Wrapper(make(net(), nn.CrossEntropyLoss()))
    assert wrapper.step(data=classes()).status.moved
    assert wrapper.calls == ["closure", "step"]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_closure_in_place_of_the_data_is_told_how_to_go_with_them(make: Any) -> None:
    model = net()
    optimizer, before, called = make(model, nn.CrossEntropyLoss()), parameters_of(model), []
    message = r"needs the data, .* optimizer\.step\(data=data, closure=closure\)"
    for arguments in ((lambda: called.append(1),), ()):
        closures = {} if arguments else {"closure": lambda: called.append(1)}
        with pytest.raises(TypeError, match=message):
            optimizer.step(*arguments, **closures)
    with pytest.raises(TypeError, match="`closure` must be callable, or None, found tuple"):
        optimizer.step(data=classes(), closure=classes())
    assert not called
    assert (optimizer.steps, len(optimizer.state)) == (0, 0)
    assert torch.equal(parameters_of(model), before)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_error_of_the_closure_leaves_everything_as_it_was(make: Any) -> None:
    model = net()
    optimizer, before = make(model, nn.CrossEntropyLoss()), parameters_of(model)
    state = repr(optimizer.state_dict())

    def closure() -> Any:
        raise OSError("no batch")

    with pytest.raises(OSError, match="no batch"):
        optimizer.step(data=classes(), closure=closure)
    assert repr(optimizer.state_dict()) == state
    assert torch.equal(parameters_of(model), before)

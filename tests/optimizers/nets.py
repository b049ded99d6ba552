"""A small net with data, and faults that every optimiser must refuse in the same way."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Status
from krylov_descent.optimizers.base import DataOptimizer

Make = Callable[[nn.Module, Any], DataOptimizer]


def net(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """4-6-3 with tanh, 51 parameters, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def classes(samples: int = 60, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs and labels for the net, that can be learned but not without error."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        inputs = torch.randn(samples, 4, dtype=torch.float64)
        scores = (inputs @ torch.randn(4, 3).double()).sin() + 0.5 * torch.randn(samples, 3)
        return inputs.to(dtype), scores.argmax(1)


def noisy_classes(count: int, inputs: int, classes: int) -> tuple[Tensor, Tensor]:
    """Samples in float64 whose class is a matter of chance, more likely one than another."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, inputs, dtype=torch.float64, generator=generator)
    scores = x @ torch.randn(inputs, classes, dtype=torch.float64, generator=generator)
    noise = torch.rand(count, classes, dtype=torch.float64, generator=generator).log().neg().log()
    return x, (0.5 * scores - noise).argmax(1)


def beginning_small(optimizer: KSD) -> KSD:
    """The same with sets that begin with 250 samples, as for a large model."""
    optimizer.subset_sizes = replace(optimizer.subset_sizes, least=250)
    return optimizer


def parameters_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def through_a_file(state: Any, path: Any) -> Any:
    """What a checkpoint gives back, loaded as safely as torch can."""
    torch.save(state, path)
    return torch.load(path, weights_only=True)


class Reversed(torch.autograd.Function):
    """The identity with its gradient turned around, so that every step goes uphill."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def check_refusals(make: Make) -> None:
    """NaN, infinity, a zero gradient: a result that says so, the parameters bit for bit."""
    inputs, targets = classes()
    for bad in (torch.nan, torch.inf):
        broken = inputs.clone()
        broken[3, 1] = bad
        model = net()
        before = parameters_of(model)
        result = make(model, nn.CrossEntropyLoss()).step((broken, targets))
        assert result.status is Status.NOT_FINITE
        assert "\n" not in str(result)
        assert torch.equal(parameters_of(model), before)

    model = net()
    before = parameters_of(model)
    flat = make(model, lambda outputs, _: 0.0 * outputs.sum(1)).step((inputs, targets))
    assert flat.status is Status.STATIONARY
    assert torch.equal(parameters_of(model), before)


def check_errors(make: Make, *, walks_once: bool) -> None:
    """Empty data, closures, gradients of one's own, iterators: an error, nothing changed."""
    inputs, targets = classes()
    model = net()
    before = parameters_of(model)
    optimizer = make(model, nn.CrossEntropyLoss())
    nothing: list[Any] = [(inputs[:0], targets[:0]), []]
    for empty in nothing:
        with pytest.raises(ValueError, match="empty"):
            optimizer.step(empty)
    with pytest.raises(TypeError, match="needs the data"):
        optimizer.step(lambda: 0.0)
    if not walks_once:
        with pytest.raises(TypeError, match="only once"):
            optimizer.step(iter([(inputs, targets)]))
    nn.functional.cross_entropy(model(inputs), targets).backward()
    with pytest.raises(TypeError, match="needs the data"):
        optimizer.step()
    assert optimizer.steps == 0
    assert torch.equal(parameters_of(model), before)


def check_grad_is_left_alone(make: Make) -> None:
    """`.grad` belongs to the user, before and after a step."""
    model = net()
    optimizer = make(model, nn.CrossEntropyLoss())
    kept = [torch.randn_like(p) for p in model.parameters()]
    for p, gradient in zip(model.parameters(), kept, strict=True):
        p.grad = gradient
    assert optimizer.step(classes()).status.moved
    for p, gradient in zip(model.parameters(), kept, strict=True):
        assert p.grad is gradient


def check_frozen_parameters_stay(make: Make) -> None:
    """`requires_grad=False` is honoured, also where a stale `.grad` lies about."""
    model = net()
    frozen = next(model.parameters()).requires_grad_(False)
    frozen.grad = torch.ones_like(frozen)
    before = frozen.clone()
    assert make(model, nn.CrossEntropyLoss()).step(classes()).status.moved
    assert torch.equal(frozen, before)


def check_copies_step_by_themselves(make: Make) -> None:
    """A deep copy goes on from where the original is, and leaves it alone."""
    model = net()
    optimizer = make(model, nn.CrossEntropyLoss())
    optimizer.step(classes())
    before = parameters_of(model)
    twin = copy.deepcopy(optimizer)
    moved = twin.step(classes())
    assert torch.equal(parameters_of(model), before)
    assert optimizer.step(classes()).loss_after == moved.loss_after
    assert torch.equal(parameters_of(model), parameters_of(twin.objective.network.model))


class WornOutError(Exception):
    """An error that nobody catches on the way."""


class Fragile(nn.Module):
    """A net that fails after so many calls."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.net, self.left = net(), calls

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise WornOutError
        outputs: Tensor = self.net(x)
        return outputs


def check_an_error_on_the_way_leaves_no_trace(make: Make) -> None:
    """Wherever the model fails, parameters, state and counters are as before the step."""
    whole = Fragile(10**6)
    make(whole, nn.CrossEntropyLoss()).step(classes())
    calls = 10**6 - whole.left
    for after in range(1, calls, max(1, calls // 12)):
        model = Fragile(after)
        optimizer = make(model, nn.CrossEntropyLoss())
        before, state = parameters_of(model), repr(optimizer.state_dict())
        with pytest.raises(WornOutError):
            optimizer.step(classes())
        assert torch.equal(parameters_of(model), before)
        assert repr(optimizer.state_dict()) == state

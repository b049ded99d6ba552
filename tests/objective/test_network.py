"""Losses at a point that the parameters are not moved to, and models that are known as a whole."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from krylov_descent import Objective
from krylov_descent.objective.batches import Batch


class Twice(nn.Module):
    """A net whose first weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.first(torch.tanh(self.first(x)))))
        return result


class TowardsItself(Twice):
    """One whose forward pass differentiates towards a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self.last.bias.square().sum(), self.last.bias)
        return super().forward(x) - slope


@pytest.mark.parametrize("model", [Twice, TowardsItself])
def test_losses_at_a_point_are_those_of_parameters_moved_there(model: type[nn.Module]) -> None:
    network = Objective(model(), nn.MSELoss()).network
    batch, parameters = Batch(torch.randn(12, 5), torch.randn(12, 3), 12), network.parameters
    start, here = parameters.copy(), network.sample_losses(batch)
    point = start + 0.1 * torch.randn_like(start)
    found = network.losses_at(point, batch)
    assert torch.equal(parameters.copy(), start)
    parameters.assign(point)
    torch.testing.assert_close(found, network.sample_losses(batch))
    assert not torch.allclose(found, here)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler
def test_a_stack_is_plain_where_nothing_but_torchs_own_is_called() -> None:
    def plain(model: nn.Module, loss: nn.Module | None = None) -> bool:
        return Objective(model, loss or nn.MSELoss()).network.is_plain

    def stack() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 3)))

    assert plain(stack())
    assert plain(nn.Linear(5, 3), nn.CrossEntropyLoss(label_smoothing=0.1))
    assert not plain(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)))
    assert not plain(Twice())

    forward, before, back, replaced, compiled = (stack() for _ in range(5))
    forward[0].register_forward_hook(lambda module, given, found: found - found.mean(0))
    before[1].register_forward_pre_hook(lambda module, given: None)
    back[0].register_full_backward_hook(lambda module, towards, given: None)
    replaced[0].forward = replaced[0].forward
    compiled.compile(backend="eager")
    for other in (forward, before, back, replaced, compiled, torch.compile(stack())):
        assert isinstance(other, nn.Module)
        assert not plain(other)

    loss = nn.MSELoss()
    loss.register_forward_hook(lambda module, given, found: None)
    assert not plain(stack(), loss)
    everywhere = register_module_forward_hook(lambda module, given, found: None)
    try:
        assert not plain(stack())
    finally:
        everywhere.remove()

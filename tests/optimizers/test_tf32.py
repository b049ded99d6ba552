"""TensorFloat-32 where it is asked for and nowhere else; the setting can be read on any machine."""

from typing import Any

import pytest
import torch
from torch import nn

from krylov_descent import KSD, HessianFree, Status
from tests.optimizers.nets import classes, net

SETTINGS: Any = torch.backends.cuda.matmul  # whose annotations lack the setting


class Watched:
    """A forward pass that notes the precision it runs in, as long as it works."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []
        self.works = True

    def __call__(self, model: nn.Module, inputs: Any) -> Any:
        if not self.works:
            raise RuntimeError("broken")
        self.seen.append((SETTINGS.fp32_precision, torch.is_grad_enabled()))
        return model(inputs)


@pytest.mark.parametrize("kind", [KSD, HessianFree])
def test_the_setting_is_put_back_also_after_an_error(kind: Any) -> None:
    before, forward = SETTINGS.fp32_precision, Watched()
    optimizer = kind(net(), nn.CrossEntropyLoss(), forward=forward, tf32=True)
    assert optimizer.step(classes()).status is Status.MOVED
    assert SETTINGS.fp32_precision == before
    forward.works = False
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step(classes())
    assert SETTINGS.fp32_precision == before


def test_ksd_has_it_for_gradient_and_products_and_not_for_the_search() -> None:
    before, forward = SETTINGS.fp32_precision, Watched()
    KSD(net(), nn.CrossEntropyLoss(), forward=forward, tf32=True).step(classes())
    seen = [precision for precision, _ in forward.seen]
    searched = seen.index(before)  # the first evaluation of the search
    assert set(seen[:searched]) == {"tf32"}
    assert set(seen[searched:]) == {before}


def test_hessian_free_has_it_for_products_alone() -> None:
    before, forward = SETTINGS.fp32_precision, Watched()
    optimizer = HessianFree(net(), nn.CrossEntropyLoss(), forward=forward, tf32=True)
    optimizer.step(classes())
    forward.seen.clear()
    optimizer.step(classes())  # without the checks of the first one
    (gradient, linearization), values = forward.seen[:2], forward.seen[2:]
    assert gradient == (before, True)
    assert linearization == ("tf32", True)
    assert set(values) == {(before, False)}

"""TensorFloat-32 where it is asked for and nowhere else; the setting can be read on any machine."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, HessianFree, Status
from krylov_descent.runtime.precision import (
    SETTINGS,
    derivatives_in_tf32,
    forward_precision,
    precisions,
)
from tests.optimizers.nets import classes, net


class Watched:
    """A forward pass that notes the precision it runs in, forward and back, as long as it works."""

    def __init__(self) -> None:
        self.forward: list[str] = []
        self.backward: list[str] = []
        self.works = True

    def __call__(self, model: nn.Module, inputs: Any) -> Any:
        if not self.works:
            raise RuntimeError("broken")
        self.forward.append(SETTINGS.fp32_precision)
        return _Noting.apply(model(inputs), self.backward)  # type: ignore[no-untyped-call]


class _Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[str]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(SETTINGS.fp32_precision)
        return delta.clone(), None


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
    assert precisions() == (before, before)


def test_ksd_has_it_for_everything_but_forward_passes() -> None:
    before, forward = SETTINGS.fp32_precision, Watched()
    optimizer = KSD(net(), nn.CrossEntropyLoss(), forward=forward, tf32=True)
    result = optimizer.step(classes())
    assert set(forward.forward) == {before}
    assert set(forward.backward) == {"tf32"}
    assert len(forward.backward) > result.products + result.evaluations


def test_hessian_free_has_it_for_products_alone() -> None:
    before, forward = SETTINGS.fp32_precision, Watched()
    optimizer = HessianFree(net(), nn.CrossEntropyLoss(), forward=forward, tf32=True)
    optimizer.step(classes())
    forward.backward.clear()
    result = optimizer.step(classes())  # without the checks of the first one
    assert set(forward.forward) == {before}
    gradient, products = forward.backward[0], forward.backward[1:]
    assert gradient == before
    assert set(products) == {"tf32"}
    assert len(products) > result.products


def test_without_it_nothing_is_set() -> None:
    forward = Watched()
    before = SETTINGS.fp32_precision
    KSD(net(), nn.CrossEntropyLoss(), forward=forward).step(classes())
    assert {*forward.forward, *forward.backward} == {before}


def test_a_forward_pass_has_the_setting_of_outside() -> None:
    before = SETTINGS.fp32_precision
    try:
        for outside in ("ieee", "tf32"):
            SETTINGS.fp32_precision = outside
            with derivatives_in_tf32(True):
                assert precisions() == (outside, "tf32")
                with forward_precision():
                    assert SETTINGS.fp32_precision == outside
                assert SETTINGS.fp32_precision == "tf32"
            assert precisions() == (outside, outside)
    finally:
        SETTINGS.fp32_precision = before

"""The methods, each of which trains a net on the terms of an equation step by step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.environment import UnavailableError, version_of
from benchmarks.road.methods import RATES, Setting
from benchmarks.target.updates import make_update
from krylov_descent import KSD, HessianFree, Term

Terms = dict[str, Term]
# Makes a step, given the part of the time that is left.
Stepper = Callable[[float], None]
# Of the time that Adam has before L-BFGS takes over.
ADAMS_PART, ADAMS_RATE = 0.3, 3e-3
# Iterations of torch's L-BFGS in a call.
ITERATIONS = 20


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        title: what tables call it.
        make: (net, terms, setting) to a stepper.
        settings: those that are tried with the first seed.
        distribution: that it needs.
    """

    title: str
    make: Callable[[nn.Module, Terms, Setting], Stepper]
    settings: tuple[Setting, ...] = ({},)
    distribution: str | None = None

    def require(self) -> None:
        """Say so where its library is not installed."""
        if self.distribution and version_of(self.distribution) is None:
            raise UnavailableError(f"{self.distribution} is not installed")


def loss_of(net: nn.Module, terms: Terms) -> Tensor:
    """The weighted sum of the terms, in the autograd graph."""
    rows = []
    for term in terms.values():
        batch = term.batch
        losses = term.losses(term.outputs(net, batch.inputs), batch.targets, batch.size)
        rows.append(term.weight * losses.mean())
    return torch.stack(rows).sum()


def _of_this_library(kind: Any) -> Callable[[nn.Module, Terms, Setting], Stepper]:
    def make(net: nn.Module, terms: Terms, setting: Setting) -> Stepper:
        optimizer = kind(net, terms, **setting)

        def step(left: float) -> None:
            del left
            optimizer.step()

        return step

    return make


def _first_order(name: str) -> Callable[[nn.Module, Terms, Setting], Stepper]:
    def make(net: nn.Module, terms: Terms, setting: Setting) -> Stepper:
        update = make_update(name, net, 0.0, recorded=False)

        def step(left: float) -> None:
            update.set_rate(setting["rate"] * left)
            for p in net.parameters():
                p.grad = None
            loss_of(net, terms).backward()
            update.step()

        return step

    return make


def _lbfgs(net: nn.Module, terms: Terms, setting: Setting) -> Stepper:
    del setting
    optimizer = torch.optim.LBFGS(
        net.parameters(),
        max_iter=ITERATIONS,
        history_size=100,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, terms)
        loss.backward()
        return loss

    def step(left: float) -> None:
        del left
        optimizer.step(closure)

    return step


def _adam_then_lbfgs(net: nn.Module, terms: Terms, setting: Setting) -> Stepper:
    first = _first_order("adam")(net, terms, {"rate": ADAMS_RATE})
    then = _lbfgs(net, terms, setting)

    def step(left: float) -> None:
        begun = (left - (1 - ADAMS_PART)) / ADAMS_PART
        first(begun) if begun > 0 else then(left)

    return step


DEFAULT = "ksd"
METHODS: dict[str, Method] = {
    DEFAULT: Method("KSD", _of_this_library(KSD)),
    "lbfgs": Method("L-BFGS", _lbfgs),
    "adam-lbfgs": Method("Adam, then L-BFGS", _adam_then_lbfgs),
    "adam": Method("Adam", _first_order("adam"), RATES),
    "soap": Method("SOAP", _first_order("soap"), RATES, "pytorch_optimizer"),
    "hf": Method("HF", _of_this_library(HessianFree)),
}

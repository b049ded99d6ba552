"""The methods, each of which trains a net on the terms of an equation step by step."""

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.environment import UnavailableError, version_of
from benchmarks.physics.levenberg_marquardt import LevenbergMarquardt
from benchmarks.physics.objective import Terms, closure_of, loss_of
from benchmarks.road.methods import RATES, Setting
from benchmarks.target.updates import make_update
from krylov_descent import KSD, HessianFree

# Makes a step, given the part of the time that is left.
Stepper = Callable[[float], None]
# Of the time that Adam has before L-BFGS takes over, and L-BFGS before NNCG does.
ADAMS_PART, LBFGS_PART, ADAMS_RATE = 0.3, 0.4, 3e-3
# Iterations of torch's L-BFGS in a call.
ITERATIONS = 20
# Of Nyström's approximation (60 in Rathore et al. 2024).
RANK = 60
# A matrix of n² numbers in float64, and the copies an update makes, fit a GPU's memory.
DENSE = 30_000


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        title: what tables call it.
        make: (net, terms, setting) to a stepper.
        settings: those that are tried with the first seed.
        distribution: that it needs.
        most: the parameters of the largest net that it can train.
    """

    title: str
    make: Callable[[nn.Sequential, Terms, Setting], Stepper]
    settings: tuple[Setting, ...] = ({},)
    distribution: str | None = None
    most: float = float("inf")

    def require(self, parameters: int) -> None:
        """Say so where its library is not installed, or the net too large."""
        if self.distribution and version_of(self.distribution) is None:
            raise UnavailableError(f"{self.distribution} is not installed")
        if parameters > self.most:
            raise UnavailableError(f"{self.title} needs a matrix of {parameters}² numbers")


def _of_this_library(kind: Any) -> Callable[[nn.Sequential, Terms, Setting], Stepper]:
    def make(net: nn.Sequential, terms: Terms, setting: Setting) -> Stepper:
        optimizer = kind(net, terms, **setting)

        def step(left: float) -> None:
            del left
            optimizer.step()

        return step

    return make


def _first_order(name: str) -> Callable[[nn.Sequential, Terms, Setting], Stepper]:
    def make(net: nn.Sequential, terms: Terms, setting: Setting) -> Stepper:
        update = make_update(name, net, 0.0, recorded=False)
        closure = closure_of(net, terms)

        def step(left: float) -> None:
            update.set_rate(setting["rate"] * left)
            closure()
            update.step()

        return step

    return make


def _lbfgs(net: nn.Sequential, terms: Terms, setting: Setting) -> Stepper:
    del setting
    optimizer = torch.optim.LBFGS(
        net.parameters(),
        max_iter=ITERATIONS,
        history_size=100,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    closure = closure_of(net, terms)

    def step(left: float) -> None:
        del left
        optimizer.step(closure)

    return step


def _adam_then_lbfgs(net: nn.Sequential, terms: Terms, setting: Setting) -> Stepper:
    first = _first_order("adam")(net, terms, {"rate": ADAMS_RATE})
    then = _lbfgs(net, terms, setting)

    def step(left: float) -> None:
        begun = (left - (1 - ADAMS_PART)) / ADAMS_PART
        first(begun) if begun > 0 else then(left)

    return step


def _lbfgs_then_nncg(net: nn.Sequential, terms: Terms, setting: Setting) -> Stepper:
    """As published: after Adam and L-BFGS."""
    first = _adam_then_lbfgs(net, terms, {})
    nncg = _class("deepxde", "optimizers/pytorch/nncg.py", "NNCG")
    optimizer = nncg(
        list(net.parameters()), rank=RANK, chunk_size=RANK, line_search_fn="armijo", **setting
    )
    dtype = torch.get_default_dtype()

    def step(left: float) -> None:
        if left > 1 - ADAMS_PART - LBFGS_PART:
            first(left)
            return
        # It makes its vectors in the default type, prints, and converts losses in a graph.
        torch.set_default_dtype(next(net.parameters()).dtype)
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                optimizer.step(lambda: loss_of(net, terms))
        finally:
            torch.set_default_dtype(dtype)

    return step


def _self_scaled(method: str) -> Callable[[nn.Sequential, Terms, Setting], Stepper]:
    def make(net: nn.Sequential, terms: Terms, setting: Setting) -> Stepper:
        parameters = list(net.parameters())
        kind = _class("scimba_torch", "optimizers/ssbroyden.py", "SSBroyden")
        optimizer = kind(parameters, tolerance_grad=1e-300, method=method, **setting)
        # It makes the matrix in the default type and on the default device.
        size = sum(p.numel() for p in parameters)
        matrix = torch.eye(size, dtype=parameters[0].dtype, device=parameters[0].device)
        optimizer.state[parameters[0]]["Hk"] = matrix
        closure = closure_of(net, terms)

        def step(left: float) -> None:
            del left
            optimizer.step(closure)

        return step

    return make


def _class(package: str, file: str, name: str) -> Any:
    """A class of one file of a package.

    The packages themselves change torch's default type and device when they are imported.
    """
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations
    path = Path(found.submodule_search_locations[0]) / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _levenberg_marquardt(net: nn.Sequential, terms: Terms, setting: Setting) -> Stepper:
    del setting
    method = LevenbergMarquardt(net, terms)

    def step(left: float) -> None:
        del left
        method.step()

    return step


DEFAULT = "ksd"
METHODS: dict[str, Method] = {
    DEFAULT: Method("KSD", _of_this_library(KSD)),
    "lbfgs": Method("L-BFGS", _lbfgs),
    "adam-lbfgs": Method("Adam, then L-BFGS", _adam_then_lbfgs),
    "ssbroyden": Method("SSBroyden", _self_scaled("ssbroyden"), ({},), "scimba", DENSE),
    "ssbfgs": Method("SSBFGS", _self_scaled("ssbfgs"), ({},), "scimba", DENSE),
    "nncg": Method("Adam, L-BFGS, NNCG", _lbfgs_then_nncg, ({"mu": 1e-2}, {"mu": 1e-4}), "deepxde"),
    "lm": Method("Levenberg-Marquardt", _levenberg_marquardt),
    "adam": Method("Adam", _first_order("adam"), RATES),
    "soap": Method("SOAP", _first_order("soap"), RATES, "pytorch_optimizer"),
    "hf": Method("HF", _of_this_library(HessianFree)),
}

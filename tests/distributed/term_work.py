"""What ranks are asked to do with an objective of terms; in one process, too, without a group."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent import KSD, LBFGS, Term
from krylov_descent.optimizers.base import DataOptimizer
from krylov_descent.runtime.ranks import Ranks
from tests.distributed.mishaps import told_of_a_step
from tests.distributed.work import OPTIMIZERS, OPTIONS, rank, told_of
from tests.terms import laplace, points, small_net, wide_net_and_term

Terms = dict[str, Term]
# Short steps amplify rounding little. The diagonal of a residual that differentiates is estimated
# with random signs by place on a rank, so one process has others.
SHORT: dict[str, dict[str, Any]] = {
    "ksd": {"dimension": 4, "bfgs_iterations": 3, "preconditioner": "identity"},
    "hf": {"micro_batch": 5},  # so small that the diagonal is exact
    "ncg": {},
}


def value(net: nn.Module, x: Tensor) -> Any:
    return net(x) - x[:, :1]


def jump(net: nn.Module, left: Tensor, right: Tensor) -> Any:
    return net(left) - net(right)


def drawn(count: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(count, 2, dtype=torch.float64)


def many_terms() -> Terms:
    """63 samples in terms of every kind, of which some have fewer than there are ranks."""
    sensors, others = points(7, 2), points(5, 3)
    return {
        "equation": Term(laplace, drawn(37), resample=2),
        "start": Term(value, points(1, 4), weight=3.0),
        "periodic": Term(jump, (points(9, 5), points(9, 6))),
        "data": Term(
            (sensors, sensors.sum(1, keepdim=True)),
            nn.MSELoss(),
            weight=0.5,
            held_out=(others, others.sum(1, keepdim=True)),
        ),
        "edge": Term(value, points(6, 7), held_out=points(2, 8), subset_size=2),
        # So few points are soon fitted, and then drawn anew.
        "runaway": Term(laplace, drawn(2)),
    }


def two_points() -> Terms:
    """Fewer samples than three ranks."""
    return {"start": Term(value, points(1)), "end": Term(value, points(1, 1))}


MAKERS: dict[str, Callable[[], Terms]] = {"many": many_terms, "two": two_points}


def make_on(terms: Terms, name: str, **options: Any) -> tuple[nn.Module, DataOptimizer]:
    model = small_net()
    return model, OPTIMIZERS[name](model, terms, **OPTIONS[name] | SHORT[name] | options)


def steps(name: str, options: dict[str, Any], which: str, count: int) -> dict[str, Any]:
    """Some steps in float64, and what they led to, with the terms and their points."""
    terms = MAKERS[which]()
    model, optimizer = make_on(terms, name, **options)
    torch.rand(rank())  # ranks have other random numbers of their own
    results, points_of_steps = [], []
    for _ in range(count):
        results.append(optimizer.step())
        points_of_steps.append([float(part.points.sum()) for part in of_points(terms)])
    return told_of(optimizer, model, results) | {
        "terms": [found.terms for found in results],
        "held out": [found.held_out for found in results],
        "points": points_of_steps,
        "drawn": optimizer.param_groups[0].get("points_drawn"),
    }


def steps_of_small_sets(count: int) -> dict[str, Any]:
    """Steps of which the second is searched twice; see `wide_net_and_term`."""
    model, terms = wide_net_and_term(torch.device("cpu"))
    optimizer = KSD(model, terms, preconditioner="identity")
    optimizer.subset_sizes = replace(optimizer.subset_sizes, least=20)
    results = [optimizer.step() for _ in range(count)]
    return told_of(optimizer, model, results)


def of_points(terms: Terms) -> list[Term]:
    return [term for term in terms.values() if isinstance(term.points, Tensor)]


def state_after(count: int) -> tuple[Any, Any]:
    """Model and optimiser after some steps with sets that may grow."""
    model, optimizer = make_on(many_terms(), "ksd", subset_size="auto")
    for _ in range(count):
        optimizer.step()
    return model.state_dict(), copy.deepcopy(optimizer.state_dict())


def losses_after_loading(model_state: Any, state: Any, count: int) -> list[tuple[float, float]]:
    """The losses of some steps with that state, and the same terms made anew."""
    model, optimizer = make_on(many_terms(), "ksd", subset_size="auto")
    model.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    found = []
    for _ in range(count):
        result = optimizer.step()
        assert optimizer.param_groups[0]["set_same_data"]
        found.append((result.loss, result.loss_after))
    return found


def fingerprint() -> float:
    """Of the data of a first step, as it is saved."""
    _, optimizer = make_on(many_terms(), "ksd", subset_size="auto")
    optimizer.step()
    found: float = optimizer.param_groups[0]["set_fingerprint"]
    return found


def samples_of_a_pass() -> int:
    """How many points this rank computes in a forward pass over all of them."""
    seen: list[int] = []

    def counted(net: nn.Module, x: Tensor) -> Any:
        seen.append(len(x))
        return net(x)

    _, optimizer = make_on({"all": Term(counted, points(60))}, "ncg")
    optimizer.step()
    return seen[-1]


def differentiates() -> bool:
    """Whether this rank knows that a forward pass differentiates the model."""
    terms = {"heat": Term(laplace, points(1)), "edge": Term(value, points(20))}
    _, optimizer = make_on(terms, "ncg")
    optimizer.step()
    return optimizer.objective.findings.forward_differentiates


def bytes_of_terms() -> dict[str, tuple[int, int]]:
    """Calls and bytes of the phase in which the terms are evaluated."""
    _, optimizer = make_on(many_terms(), "ksd")
    optimizer.step()
    traffic = optimizer.objective.ranks.traffic
    return {kind: (s.calls, s.bytes) for (phase, kind), s in traffic.items() if phase == "terms"}


# Trouble ------------------------------------------------------------------------------------------


def with_odd_terms(what: str) -> dict[str, Any]:
    """A first step on ranks of which the second has other terms."""
    odd = rank() == 1
    inside = points(20)
    sampler: Any = drawn(5)
    terms = {"heat": Term(laplace, inside), "edge": Term(value, points(4), held_out=points(3))}
    if what == "own part":
        terms["heat"].points = inside[:12] if odd else inside[12:]
    elif what == "own part of equal size":
        terms["heat"].points = inside[:10] if odd else inside[10:]
    elif what == "held out" and odd:
        terms["edge"] = Term(value, points(4), held_out=points(3, 1))
    elif what == "weight" and odd:
        terms["edge"].weight = 2.0
    elif what == "residual" and odd:
        terms["edge"] = Term(lambda net, x: net(x), points(4), held_out=points(3))
    elif what == "names" and odd:
        terms["border"] = terms.pop("edge")
    elif what == "subset_size" and odd:
        terms["heat"].subset_size = 3
    elif what == "draws of its own":
        sampler = Unseeded(rank())
    terms["drawn"] = Term(value, sampler)
    _, optimizer = make_on(terms, "ksd")
    return told_of_a_step(optimizer, None)


class Unseeded:
    """Draws points by random numbers that are not torch's global ones."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self) -> Tensor:
        return torch.rand(5, 2, dtype=torch.float64, generator=self._generator)


class Trap:
    """A residual that fails on rank 1 in a phase of a step."""

    def __init__(self) -> None:
        self._phase: str | None = None
        self._ranks: Ranks | None = None

    def set(self, phase: str | None, ranks: Ranks) -> None:
        self._phase, self._ranks = phase, ranks

    def __call__(self, net: nn.Module, x: Tensor) -> Any:
        if rank() == 1 and self._ranks is not None and self._ranks.current_phase == self._phase:
            raise KeyError("a coefficient that is not there")
        return value(net, x)


def step_with_a_trap(name: str, phase: str) -> dict[str, Any]:
    """A second step in which a residual fails on rank 1; and whether a third one works."""
    trap = Trap()
    terms = {"trap": Term(trap, points(20)), "drawn": Term(value, drawn(5), resample=1)}
    _, optimizer = make_on(terms, name)
    assert optimizer.step().status.moved
    before, ranks = optimizer.param_groups[0]["points_drawn"], optimizer.objective.ranks
    trap.set(phase, ranks)
    told = told_of_a_step(optimizer, None)
    told["same draws"] = optimizer.param_groups[0]["points_drawn"] == before
    trap.set(None, ranks)
    return told | {"goes on": optimizer.step().status.moved}


def step_with_a_sampler_that_fails() -> dict[str, Any]:
    def sampler() -> Tensor:
        if rank() == 1:
            raise LookupError("no more points")
        return points(5)

    _, optimizer = make_on({"drawn": Term(value, sampler)}, "ksd")
    return told_of_a_step(optimizer, None)


def step_with_data(argument: str) -> dict[str, Any]:
    """A step to which rank 1 alone gives data, or a set."""
    _, optimizer = make_on(many_terms(), "ksd")
    pair: Any = (points(3), points(3)) if rank() == 1 else None
    if argument == "data":
        return told_of_a_step(optimizer, pair)
    return told_of_a_step(optimizer, None, **{argument: pair})


def step_with_nan() -> tuple[str, str]:
    """A step with two points that are not finite, of which the first is not on the first rank."""
    inside = points(20)
    inside[[13, 19]] = float("nan")
    terms = {"heat": Term(laplace, inside), "edge": Term(value, points(4))}
    result = make_on(terms, "ksd")[1].step()
    return result.status.name, result.reason


def step_of_one_process() -> dict[str, Any]:
    return told_of_a_step(LBFGS(small_net(), two_points()), None)

"""The trial of `damped_first.json`: damped steps at first, and Krylov steps alone.

Few residuals (the first net of the README, with more points too) and noisy readings. From the
repository's root, with `src` and the root on PYTHONPATH, on a CPU that does nothing else:

    python results/trials/damped_first.py
"""

import itertools
import json
import time
from collections.abc import Callable
from math import pi
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.environment import describe
from krylov_descent import KSD, Term
from krylov_descent.curvature import damped_basis
from krylov_descent.optimizers.ksd import damped_phase

SECONDS, SHOWN = 20.0, (1.0, 3.0, 10.0, 20.0)
Problem = tuple[nn.Module, dict[str, Term], Callable[[nn.Module], float]]


def bend(net: nn.Module, x: Tensor) -> Tensor:
    """Δu at the points x [m, d]."""
    (first,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    second = [
        torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0][:, i]
        for i in range(x.shape[1])
    ]
    return torch.stack(second).sum(0)


def net_of(*widths: int) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for size, following in itertools.pairwise(widths):
        layers += [nn.Linear(size, following), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def first_net(count: int) -> Problem:
    """The README's equation on an interval, at so many points."""

    def equation(net: nn.Module, x: Tensor) -> Tensor:
        f = pi**2 * (pi * x).sin() + 8 * pi**2 * (4 * pi * x).sin()
        return bend(net, x) + f[:, 0]

    def error(net: nn.Module) -> float:
        x = torch.linspace(0, 1, 1000)[:, None]
        exact = (pi * x).sin() + 0.5 * (4 * pi * x).sin()
        return float((net(x) - exact).detach().abs().max())

    ends = torch.tensor([[0.0], [1.0]])
    terms = {
        "equation": Term(equation, torch.linspace(0, 1, count)[:, None]),
        "boundary": Term(lambda net, x: net(x), ends, weight=100.0),
    }
    return net_of(1, 32, 32, 1), terms, error


def noisy_readings() -> Problem:
    """Poisson's equation in a square with 500 readings, each with an error of 0.05."""

    def solution(x: Tensor) -> Tensor:
        return (pi * x).sin().prod(1, keepdim=True)

    def equation(net: nn.Module, x: Tensor) -> Tensor:
        return bend(net, x) + 2 * pi**2 * solution(x)[:, 0]

    def error(net: nn.Module) -> float:
        x = torch.rand(2000, 2, generator=torch.Generator().manual_seed(7))
        exact = solution(x)
        return float((net(x) - exact).detach().norm() / exact.norm())

    places = torch.rand(500, 2)
    readings = solution(places) + 0.05 * torch.randn(500, 1)
    terms = {
        "equation": Term(equation, torch.rand(500, 2), held_out=torch.rand(500, 2)),
        "readings": Term(lambda net, x, y: net(x) - y, (places, readings), weight=10.0),
    }
    return net_of(2, 64, 64, 1), terms, error


def run(make: Callable[[], Problem], seed: int, *, damped: bool) -> dict[str, object]:
    """Errors after the seconds of `SHOWN`, and the lowest on the way."""
    torch.manual_seed(seed)
    net, terms, error = make()
    optimizer = KSD(net, terms)
    if not damped:
        damped_phase.end(optimizer.param_groups[0])
    begun, shown, errors, evaluations = time.perf_counter(), list(SHOWN), list[float](), 0
    lowest, steps, passed = error(net), 0, 0.0
    while shown:
        result = optimizer.step()
        passed = time.perf_counter() - begun
        steps, evaluations, now = steps + 1, evaluations + result.evaluations, error(net)
        lowest = min(lowest, now)
        while shown and passed >= shown[0]:
            errors.append(float(f"{now:.3g}"))
            shown.pop(0)
    return {
        "seed": seed,
        "damped": damped,
        "errors": errors,
        "lowest": float(f"{lowest:.3g}"),
        "steps": steps,
        "evaluations": evaluations,
    }


def main() -> None:
    """Run all, and write the record beside this file."""
    torch.set_default_dtype(torch.float64)
    damped_phase.FEWEST_RESIDUALS = damped_basis.FEWEST_DIRECTIONS = (
        1  # also where they are left out
    )
    problems: dict[str, Callable[[], Problem]] = {
        f"first net, {count} points": lambda count=count: first_net(count)  # type: ignore[misc]
        for count in (200, 400, 1000)
    }
    problems["500 noisy readings and 500 points"] = noisy_readings
    record: dict[str, object] = {
        "what": f"Errors after {SHOWN} s with damped steps at first, and with Krylov steps alone.",
        "environment": describe(torch.device("cpu")),
    }
    for name, make in problems.items():
        record[name] = runs = []
        for seed in (0, 1):
            for damped in (True, False):
                runs.append(run(make, seed, damped=damped))
                print(name, runs[-1], flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

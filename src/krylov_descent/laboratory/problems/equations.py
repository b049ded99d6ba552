"""Physics-informed nets: equations as problems of the laboratory.

Nothing but the equation and its conditions is trained on. Errors are those of the solution: at the
points of the equation, and at points that no term has.
"""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from krylov_descent.laboratory.physics.equation import Equation
from krylov_descent.laboratory.physics.equations import EQUATIONS
from krylov_descent.laboratory.problems.problem import Metric, Problem, Size, Split
from krylov_descent.laboratory.problems.tuned_rates import rates_of

START = "glorot-normal"
# Of Adam on an equation that it was not tuned on.
RATE = 0.01
METRIC = "relative L2 error of the solution"


def summary_of(equation: Equation) -> str:
    """One sentence."""
    return f"Physics-informed net: {equation.title}, {equation.formula}."


def load_equation(
    name: str, *, folder: str | Path | None = None, seed: int = 0, size: Size | None = None
) -> Problem:
    """An equation with its points and its solution, in float64.

    Args:
        name: one of `EQUATIONS`.
        folder: not used; there are no files.
        seed: not used; the points are always the same.
        size: there is only one.

    Raises:
        ValueError: another size or seed is asked for.
    """
    del folder
    if size is not None or seed != 0:
        raise ValueError(
            f"{name} has one size and one set of points: leave out "
            f"{'--small' if size is not None else 'the seed of the problem'}"
        )
    equation = EQUATIONS[name]
    held_out, terms = equation.test_points(), equation.make_terms()
    points = sum(term.batch.size for term in terms.values())
    scale = float(equation.solution(held_out).square().mean())

    def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum(1) / scale

    return Problem(
        name=name,
        title=equation.title,
        summary=summary_of(equation),
        task="equation",
        train=_with_solution(equation, terms["equation"].points),
        validation=_with_solution(equation, held_out[1::2]),
        test=_with_solution(equation, held_out[::2]),
        build=partial(_build, equation),
        initialization=START,
        starts={START: partial(_start, equation)},
        loss=squared_error,
        criterion=nn.MSELoss(),
        metric=Metric(METRIC, "", squared_error, root=True),
        terms=equation.make_terms,
        suited={name: {"lr": RATE, "batch_size": points} for name in ("adam", "adamw")},
        # AdamW is Adam here, as there is no weight decay.
        rates={name: rate for rate in rates_of(name).values() for name in ("adam", "adamw")},
        weight_decay=0.0,
    )


def _with_solution(equation: Equation, points: Tensor) -> Split:
    return points, equation.solution(points)


def _build(equation: Equation, *, device: torch.device | str, dtype: torch.dtype) -> nn.Sequential:
    return equation.make_net(0).to(device, dtype)


def _start(equation: Equation, model: nn.Module, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        model.load_state_dict(equation.make_net(seed).state_dict())

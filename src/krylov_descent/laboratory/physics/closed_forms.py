"""Equations whose solution is a formula."""

from functools import partial
from math import pi

import numpy as np
import torch
from torch import Tensor

from krylov_descent.laboratory.physics.equation import (
    Equation,
    Function,
    at,
    between,
    drawn,
    matches,
    on_sides,
    second,
    slopes,
)
from krylov_descent.objective.term import Term

KFAC = "Dangel, Müller and Zeinhofer 2024, Kronecker-Factored Approximate Curvature for PINNs"
RATHORE = "Rathore et al. 2024, Challenges in Training PINNs"


# Poisson and heat ---------------------------------------------------------------------------------


def _sines(points: Tensor) -> Tensor:
    return (pi * points).sin().prod(1, keepdim=True)


def _cosines(points: Tensor) -> Tensor:
    return (pi * points).cos().sum(1, keepdim=True)


def _pairs(points: Tensor) -> Tensor:
    return (points[:, ::2] * points[:, 1::2]).sum(1, keepdim=True)


def _poisson(
    title: str, solution: Function, factor: float, widths: tuple[int, ...], points: tuple[int, int]
) -> Equation:
    """-Δu = factor · solution on the unit cube, with the solution's values on the sides."""
    d = widths[0]
    low, high = [0.0] * d, [1.0] * d

    def equation(net: Function, x: Tensor) -> Tensor:
        laplacian = second(slopes(net(x), x), x, range(d))
        return laplacian + factor * solution(x.detach())[:, 0]

    def terms() -> dict[str, Term]:
        return {
            "equation": Term(equation, drawn(points[0], low, high)),
            "boundary": Term(matches(solution), on_sides(points[1], low, high, range(d))),
        }

    return Equation(
        title=title,
        formula="-Δu = f",
        source=KFAC,
        widths=widths,
        make_terms=terms,
        solution=solution,
        box=(low, high),
        axes=("x", "y") if d == 2 else ("the first coordinate", "the last one"),
    )


def _heat(
    title: str, solution: Function, widths: tuple[int, ...], points: tuple[int, int]
) -> Equation:
    """u_t = ¼ Δu; the last coordinate is the time."""
    d = widths[0]
    low, high = [0.0] * d, [1.0] * d

    def equation(net: Function, x: Tensor) -> Tensor:
        first = slopes(net(x), x)
        return first[:, -1] - second(first, x, range(d - 1)) / 4

    def terms() -> dict[str, Term]:
        half = points[1] // 2
        return {
            "equation": Term(equation, drawn(points[0], low, high)),
            "boundary": Term(matches(solution), on_sides(half, low, high, range(d - 1))),
            "start": Term(matches(solution), at(drawn(half, low, high, 3), d - 1, 0.0)),
        }

    return Equation(
        title=title,
        formula="u_t = ¼ Δu",
        source=KFAC,
        widths=widths,
        make_terms=terms,
        solution=solution,
        box=(low, high),
        axes=("x" if d == 2 else "the first coordinate", "t"),
    )


def _fading_sine(points: Tensor) -> Tensor:
    x, t = points[:, :1], points[:, 1:]
    return torch.exp(-(pi**2) * t / 4) * torch.sin(pi * x)


def _fading_cosines(points: Tensor) -> Tensor:
    return torch.exp(-points[:, -1:]) * (2 * points[:, :-1]).cos().sum(1, keepdim=True)


# On a circle --------------------------------------------------------------------------------------


def _on_a_circle(
    title: str, formula: str, solution: Function, speed: float, growth: float
) -> Equation:
    """u_t + speed · u_x = growth · u (1 - u) for x on a circle of length 2π."""
    low, high = [0.0, 0.0], [2 * pi, 1.0]

    def equation(net: Function, points: Tensor) -> Tensor:
        u = net(points)
        first = slopes(u, points)
        return first[:, 1] + speed * first[:, 0] - growth * (u * (1 - u))[:, 0]

    def periodic(net: Function, left: Tensor, right: Tensor) -> Tensor:
        return net(left) - net(right)

    def terms() -> dict[str, Term]:
        # At equal distances: any wave that moves with the speed satisfies the equation, so between
        # two points of these nothing but the net's smoothness determines the solution.
        start, sides = between(low, high, 256), between(low, high, 101)
        return {
            "equation": Term(equation, drawn(10_000, low, high)),
            "start": Term(matches(solution), at(start, 1, 0.0)),
            "periodic": Term(periodic, (at(sides, 0, 0.0), at(sides, 0, 2 * pi))),
        }

    return Equation(
        title=title,
        formula=formula,
        source=RATHORE,
        widths=(2, 50, 50, 50, 1),
        make_terms=terms,
        solution=solution,
        box=(low, high),
    )


def _moving_sine(speed: float, points: Tensor) -> Tensor:
    return torch.sin(points[:, :1] - speed * points[:, 1:])


def _growing_hill(growth: float, points: Tensor) -> Tensor:
    x, t = points[:, :1], points[:, 1:]
    start = torch.exp(-((x - pi) ** 2) / (2 * (pi / 4) ** 2))
    grown = start * torch.exp(growth * t)
    return grown / (grown + 1 - start)


# Others -------------------------------------------------------------------------------------------


def _two_modes(points: Tensor) -> Tensor:
    x, t = pi * points[:, :1], pi * points[:, 1:]
    return x.sin() * (2 * t).cos() + (4 * x).sin() * (8 * t).cos() / 2


def _wave_equation(net: Function, points: Tensor) -> Tensor:
    first = slopes(net(points), points)
    return second(first, points, [1]) - 4 * second(first, points, [0])


def _at_rest(net: Function, points: Tensor) -> Tensor:
    return slopes(net(points), points)[:, 1]


def _wave_terms() -> dict[str, Term]:
    low, high = [0.0, 0.0], [1.0, 1.0]
    begin = at(drawn(200, low, high, 3), 1, 0.0)
    return {
        "equation": Term(_wave_equation, drawn(3000, low, high)),
        "boundary": Term(matches(_two_modes), on_sides(200, low, high, [0]), weight=100.0),
        "start": Term(matches(_two_modes), begin, weight=100.0),
        "rest": Term(_at_rest, begin),
    }


def _helmholtz_solution(points: Tensor) -> Tensor:
    return torch.sin(pi * points[:, :1]) * torch.sin(4 * pi * points[:, 1:])


def _helmholtz_equation(net: Function, points: Tensor) -> Tensor:
    u = net(points)
    right = (1 - 17 * pi**2) * _helmholtz_solution(points.detach())
    return second(slopes(u, points), points, [0, 1]) + (u - right)[:, 0]


def _helmholtz_terms() -> dict[str, Term]:
    low, high = [-1.0, -1.0], [1.0, 1.0]
    edge = on_sides(400, low, high, [0, 1])
    return {
        "equation": Term(_helmholtz_equation, drawn(3000, low, high)),
        "boundary": Term(matches(_helmholtz_solution), edge, weight=100.0),
    }


VISCOSITY = 0.01 / pi
# Of Gauss and Hermite, for the integrals of Cole and Hopf.
NODES = 100


def burgers_solution(points: Tensor, viscosity: float = VISCOSITY) -> Tensor:
    """u [m, 1] at (x, t > 0), from u(x, 0) = -sin πx, by the formula of Cole and Hopf."""
    nodes, weights = (torch.from_numpy(row) for row in np.polynomial.hermite.hermgauss(NODES))
    x, t = points[:, :1], points[:, 1:]
    y = x - (4 * viscosity * t).sqrt() * nodes
    log = -torch.cos(pi * y) / (2 * pi * viscosity)
    f = weights * torch.exp(log - log.amax(1, keepdim=True))
    return -(torch.sin(pi * y) * f).sum(1, keepdim=True) / f.sum(1, keepdim=True)


def _burgers_equation(net: Function, points: Tensor) -> Tensor:
    u = net(points)
    first = slopes(u, points)
    return first[:, 1] + u[:, 0] * first[:, 0] - VISCOSITY * second(first, points, [0])


def _burgers_start(net: Function, points: Tensor) -> Tensor:
    return net(points) + torch.sin(pi * points[:, :1])


def _burgers_terms() -> dict[str, Term]:
    low, high = [-1.0, 0.0], [1.0, 1.0]
    return {
        "equation": Term(_burgers_equation, drawn(10_000, low, high)),
        "boundary": Term(lambda net, x: net(x), on_sides(100, low, high, [0]), weight=10.0),
        "start": Term(_burgers_start, at(drawn(200, low, high, 3), 1, 0.0), weight=10.0),
    }


SMALL, MEDIUM, LARGE = (64,), (64, 64, 48, 48), (256, 256, 128, 128)
CLOSED_FORMS: dict[str, Equation] = {
    **{
        f"poisson-2d-{name}": _poisson(
            f"Poisson 2D, {name}", _sines, 2 * pi**2, (2, *hidden, 1), (900, 120)
        )
        for name, hidden in (("small", SMALL), ("medium", MEDIUM), ("large", LARGE))
    },
    "poisson-5d": _poisson("Poisson 5D", _cosines, pi**2, (5, *MEDIUM, 1), (3000, 500)),
    "poisson-10d": _poisson("Poisson 10D", _pairs, 0.0, (10, *LARGE, 1), (3000, 500)),
    "heat-1d": _heat("heat 1+1D", _fading_sine, (2, *MEDIUM, 1), (900, 120)),
    "heat-4d": _heat("heat 4+1D", _fading_cosines, (5, *LARGE, 1), (3000, 500)),
    **{
        f"convection-{speed}": _on_a_circle(
            f"convection, β = {speed}",
            "u_t + β u_x = 0",
            partial(_moving_sine, float(speed)),
            float(speed),
            0.0,
        )
        for speed in (30, 40)
    },
    "reaction": _on_a_circle(
        "reaction, ρ = 5", "u_t = ρ u (1 - u)", partial(_growing_hill, 5.0), 0.0, 5.0
    ),
    "wave": Equation(
        title="wave",
        formula="u_tt = 4 u_xx",
        source="Wang, Yu and Perdikaris 2022, When and why PINNs fail to train",
        widths=(2, 50, 50, 50, 1),
        make_terms=_wave_terms,
        solution=_two_modes,
        box=([0.0, 0.0], [1.0, 1.0]),
    ),
    "helmholtz": Equation(
        title="Helmholtz",
        formula="u_xx + u_yy + u = q",
        source="Wang, Teng and Perdikaris 2021, Gradient flow pathologies in PINNs",
        widths=(2, 50, 50, 50, 1),
        make_terms=_helmholtz_terms,
        solution=_helmholtz_solution,
        box=([-1.0, -1.0], [1.0, 1.0]),
        axes=("x", "y"),
    ),
    "burgers": Equation(
        title="Burgers",
        formula="u_t + u u_x = 0.01/π u_xx",
        source="Raissi, Perdikaris and Karniadakis 2019, Physics-informed neural networks",
        widths=(2, *(20,) * 8, 1),
        make_terms=_burgers_terms,
        solution=burgers_solution,
        box=([-1.0, 0.01], [1.0, 1.0]),
    ),
}

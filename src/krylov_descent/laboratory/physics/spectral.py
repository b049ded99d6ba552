"""Solutions by Fourier series in float64, where there is no formula: Allen–Cahn and KdV.

An equation u_t = L u + N(u) on the circle [-1, 1) is a system of ordinary equations for the Fourier
coefficients. L is diagonal there, and exponential time differencing of fourth order takes its part
exactly (Cox and Matthews 2002; coefficients by contour integrals, Kassam and Trefethen 2005).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import pi
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from krylov_descent.laboratory.physics.equation import (
    Equation,
    Function,
    at,
    drawn,
    second,
    slopes,
)
from krylov_descent.objective.term import Term

Real = NDArray[np.floating[Any]]
Complex = NDArray[np.complexfloating[Any, Any]]
# On the unit circle, for the contour integrals.
CONTOUR = 64


@dataclass(frozen=True)
class Evolution:
    """u_t = L u + N(u) on [-1, 1), periodic, from time 0 to 1.

    Attributes:
        start: x to u(x, 0).
        linear: wave numbers to the diagonal of L.
        nonlinear: (u, wave numbers) to the Fourier coefficients of N(u), given u on the grid.
        modes: points of the grid in space that are enough.
        steps: in a hundredth of the time that are enough.
    """

    start: Callable[[Real], Real]
    linear: Callable[[Real], Complex]
    nonlinear: Callable[[Real, Real], Complex]
    modes: int = 512
    steps: int = 100

    def solve(self, modes: int, steps: int, frames: int) -> Real:
        """u on a grid [frames + 1, modes], at times 0, 1/frames, …, 1.

        Args:
            modes: points of the grid in space.
            steps: between two frames.
            frames: to return after the first one.
        """
        x = np.linspace(-1, 1, modes, endpoint=False)
        k = pi * np.fft.rfftfreq(modes, 1 / modes)
        dt, linear = 1 / (frames * steps), self.linear(k)
        whole, half, (q, f1, f2, f3) = _coefficients(linear, dt)
        kept = k <= pi * modes / 3  # products of two waves do not come back as others

        def nonlinear(v: Complex) -> Complex:
            return kept * self.nonlinear(np.fft.irfft(v, modes), k)

        v = np.fft.rfft(self.start(x))
        found = [self.start(x)]
        for _ in range(frames):
            for _ in range(steps):
                nv = nonlinear(v)
                a = half * v + q * nv
                na = nonlinear(a)
                b = half * v + q * na
                nb = nonlinear(b)
                c = half * a + q * (2 * nb - nv)
                v = whole * v + f1 * nv + 2 * f2 * (na + nb) + f3 * nonlinear(c)
            found.append(np.fft.irfft(v, modes))
        return np.stack(found)


def _coefficients(linear: Complex, dt: float) -> tuple[Complex, Complex, list[Complex]]:
    """exp(L dt), exp(L dt/2), and the four functions of the scheme."""
    around = np.exp(1j * pi * (np.arange(1, CONTOUR + 1) - 0.5) / (CONTOUR / 2))
    z = dt * linear[:, None] + around[None, :]
    e = np.exp(z)
    rows = [
        (np.exp(z / 2) - 1) / z,
        (-4 - z + e * (4 - 3 * z + z**2)) / z**3,
        (2 + z + e * (z - 2)) / z**3,
        (-4 - 3 * z - z**2 + e * (4 - z)) / z**3,
    ]
    return np.exp(dt * linear), np.exp(dt * linear / 2), [dt * row.mean(1) for row in rows]


# Its start has a kink at the ends of the interval: errors fall with the square of the modes only.
ALLEN_CAHN = Evolution(
    start=lambda x: x**2 * np.cos(pi * x),
    linear=lambda k: (5 - 1e-4 * k**2).astype(np.complex128),
    nonlinear=lambda u, k: -5 * np.fft.rfft(u**3),
    modes=8192,
    steps=10,
)
DISPERSION = 0.022
KDV = Evolution(
    start=lambda x: np.cos(pi * x),
    linear=lambda k: 1j * DISPERSION**2 * k**3,
    nonlinear=lambda u, k: -0.5j * k * np.fft.rfft(u**2),
)
# Of the grid on which nets are compared with the solution.
COLUMNS, FRAMES = 512, 100
LOW, HIGH = [-1.0, 0.0], [1.0, 1.0]


@cache
def _grid(evolution: Evolution) -> Real:
    found = evolution.solve(evolution.modes, evolution.steps, FRAMES)
    return found[:, :: evolution.modes // COLUMNS]


def _grid_points() -> Tensor:
    """The points (x, t) of the grid, frame by frame."""
    x = torch.linspace(-1, 1, COLUMNS + 1, dtype=torch.float64)[:-1]
    t = torch.linspace(0, 1, FRAMES + 1, dtype=torch.float64)
    return torch.cartesian_prod(t, x).flip(1)


def _on_grid(evolution: Evolution, points: Tensor) -> Tensor:
    """The solution at points of the grid."""
    column = ((points[:, 0] + 1) * COLUMNS / 2).round().long() % COLUMNS
    row = (points[:, 1] * FRAMES).round().long()
    return torch.from_numpy(_grid(evolution))[row, column].unsqueeze(1)


def _terms(
    equation: Callable[[Function, Tensor], Tensor], start: Function, order: int
) -> dict[str, Term]:
    """The equation, the start, and u with its first derivatives alike on both sides."""

    def begins(net: Function, points: Tensor) -> Tensor:
        return net(points) - start(points.detach())

    def periodic(net: Function, left: Tensor, right: Tensor) -> Tensor:
        sides = []
        for points in (left, right):
            rows = [net(points)[:, 0]]
            for _ in range(order):
                rows.append(slopes(rows[-1], points)[:, 0])
            sides.append(torch.stack(rows, 1))
        return sides[0] - sides[1]

    ends = drawn(200, LOW, HIGH, 1)
    return {
        "equation": Term(equation, drawn(10_000, LOW, HIGH)),
        "start": Term(begins, at(drawn(512, LOW, HIGH, 3), 1, 0.0), weight=100.0),
        "periodic": Term(periodic, (at(ends, 0, -1.0), at(ends, 0, 1.0))),
    }


def _allen_cahn(net: Function, points: Tensor) -> Tensor:
    u = net(points)
    first = slopes(u, points)
    return first[:, 1] - 1e-4 * second(first, points, [0]) - 5 * (u - u**3)[:, 0]


def _kdv(net: Function, points: Tensor) -> Tensor:
    u = net(points)
    first = slopes(u, points)
    bend = slopes(first[:, 0], points)[:, 0]
    return first[:, 1] + u[:, 0] * first[:, 0] + DISPERSION**2 * slopes(bend, points)[:, 0]


def _wavy_square(points: Tensor) -> Tensor:
    return points[:, :1] ** 2 * torch.cos(pi * points[:, :1])


def _cosine(points: Tensor) -> Tensor:
    return torch.cos(pi * points[:, :1])


SPECTRAL: dict[str, Equation] = {
    "allen-cahn": Equation(
        title="Allen–Cahn",
        formula="u_t = 0.0001 u_xx + 5 (u - u³)",
        source="Raissi, Perdikaris and Karniadakis 2019, Physics-informed neural networks",
        widths=(2, *(20,) * 8, 1),
        make_terms=partial(_terms, _allen_cahn, _wavy_square, 1),
        solution=partial(_on_grid, ALLEN_CAHN),
        box=(LOW, HIGH),
        make_test_points=_grid_points,
    ),
    "kdv": Equation(
        title="KdV",
        formula="u_t + u u_x + 0.022² u_xxx = 0",
        source="Wang et al. 2024, PirateNets",
        widths=(2, *(20,) * 8, 1),
        make_terms=partial(_terms, _kdv, _cosine, 2),
        solution=partial(_on_grid, KDV),
        box=(LOW, HIGH),
        make_test_points=_grid_points,
    ),
}

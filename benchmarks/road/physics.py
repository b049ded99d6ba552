"""Physics-informed nets in float64, and a net that learns an operator.

A point has its coordinates, what is asked there (`EQUATION`, `VALUE` or `SLOPE` in time) and how
much it counts. The model maps points to weighted residuals; targets hold the weighted right sides.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import pi

import torch
from torch import Tensor, nn

from benchmarks.road.problem import Task

EQUATION, VALUE, SLOPE = 0, 1, 2
INNER = {"cpu": 900, "cuda": 3000}
CONDITIONS = 120
SPEED, GROWTH = 20.0, 5.0  # of the convection and of the reaction

# (u, ∂u/∂first, ∂u/∂second, points) to the residual of an equation [N]
Equation = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def derivative(u: Tensor, points: Tensor, axis: int) -> Tensor:
    """∂u/∂(axis) at each point [N], in the autograd graph."""
    (slopes,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    return slopes[:, axis]


class Residuals(nn.Module):
    """Points to weighted residuals.

    Args:
        equation: the residual within.
        periodic: whether the first coordinate is an angle.
        widths: of the hidden layers.
    """

    def __init__(self, equation: Equation, *, periodic: bool, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.equation, self.periodic = equation, periodic
        layers: list[nn.Module] = []
        for before, after in pairwise((3 if periodic else 2, *widths, 1)):
            layer = nn.Linear(before, after, dtype=torch.float64)
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
            layers += [layer, nn.Tanh()]
        self.net = nn.Sequential(*layers[:-1])

    def forward(self, points: Tensor) -> Tensor:
        place = points[:, :2].detach().requires_grad_()
        x, t = place[:, :1], place[:, 1:]
        u = self.net(torch.cat([x.sin(), x.cos(), t], 1) if self.periodic else place)[:, 0]
        first, second = derivative(u, place, 0), derivative(u, place, 1)
        within = self.equation(u, first, second, place)
        asked, weight = points[:, 2], points[:, 3]
        conditions = torch.where(asked == VALUE, u, second)
        return (torch.where(asked == EQUATION, within, conditions) * weight).unsqueeze(1)


def _points(
    inner: Tensor, right: Tensor, conditions: list[tuple[Tensor, int, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Inputs [N, 4] and targets [N, 1].

    Args:
        inner: where the equation holds.
        right: its right side there.
        conditions: points, what is asked there, and the answers. All conditions together count as
            much as the equation.
    """
    sets = [(inner, EQUATION, right), *conditions]
    rows, answers = [], []
    for places, asked, values in sets:
        parts = 1 if asked == EQUATION else len(conditions)
        weight = (len(inner) / (parts * len(places))) ** 0.5
        what = places.new_tensor([asked, weight]).expand(len(places), 2)
        rows.append(torch.cat([places, what], 1))
        answers.append(weight * values)
    return torch.cat(rows), torch.cat(answers).unsqueeze(1)


def _random(count: int, *scales: float) -> Tensor:
    """Points in a box at the origin."""
    generator = torch.Generator().manual_seed(count)
    unit = torch.rand(count, len(scales), generator=generator, dtype=torch.float64)
    return unit * unit.new_tensor(scales)


def _along(count: int, axis: int, at: float, length: float = 1.0) -> Tensor:
    """Points on a side of the box, where a coordinate has a value."""
    line = torch.linspace(0, length, count, dtype=torch.float64)
    other = torch.full_like(line, at)
    return torch.stack([other, line] if axis == 0 else [line, other], 1)


def _in_time(equation: Equation, start: Callable[[Tensor], Tensor], kind: str, seed: int) -> Task:
    """An equation on a circle, from time 0 to 1."""
    inner, begin = _random(INNER[kind], 2 * pi, 1.0), _along(CONDITIONS, 1, 0.0, 2 * pi)
    x, y = _points(inner, torch.zeros_like(inner[:, 0]), [(begin, VALUE, start(begin[:, 0]))])
    torch.manual_seed(seed)
    return Task(Residuals(equation, periodic=True, widths=(32, 32, 32)), nn.MSELoss(), x, y)


def _convection(u: Tensor, u_x: Tensor, u_t: Tensor, place: Tensor) -> Tensor:
    del u, place
    return u_t + SPEED * u_x


def _reaction(u: Tensor, u_x: Tensor, u_t: Tensor, place: Tensor) -> Tensor:
    del u_x, place
    return u_t - GROWTH * u * (1 - u)


def _hill(x: Tensor) -> Tensor:
    return torch.exp(-8 * (x - pi) ** 2 / pi**2)


def _wave(u: Tensor, u_x: Tensor, u_t: Tensor, place: Tensor) -> Tensor:
    del u
    return derivative(u_t, place, 1) - 4 * derivative(u_x, place, 0)


def _laplace(u: Tensor, u_x: Tensor, u_y: Tensor, place: Tensor) -> Tensor:
    del u
    return -derivative(u_x, place, 0) - derivative(u_y, place, 1)


convection = partial(_in_time, _convection, torch.sin)
reaction = partial(_in_time, _reaction, _hill)


def wave(kind: str, seed: int) -> Task:
    """A string with fixed ends, in two modes."""
    inner, begin = _random(INNER[kind], 1.0, 1.0), _along(CONDITIONS, 1, 0.0)
    string = torch.sin(pi * begin[:, 0]) + torch.sin(4 * pi * begin[:, 0]) / 2
    ends = torch.cat([_along(CONDITIONS // 2, 0, at) for at in (0.0, 1.0)])
    none = torch.zeros(CONDITIONS, dtype=torch.float64)
    conditions = [(begin, VALUE, string), (begin, SLOPE, none), (ends, VALUE, none)]
    x, y = _points(inner, torch.zeros_like(inner[:, 0]), conditions)
    torch.manual_seed(seed)
    return Task(Residuals(_wave, periodic=False, widths=(32, 32, 32)), nn.MSELoss(), x, y)


def poisson(kind: str, seed: int) -> Task:
    """-Δu = 2π² sin πx sin πy on a square."""
    inner = _random(INNER[kind], 1.0, 1.0)
    sides = [_along(CONDITIONS // 4, axis, at) for axis in (0, 1) for at in (0.0, 1.0)]
    right = 2 * pi**2 * torch.sin(pi * inner).prod(1)
    border = torch.cat(sides)
    x, y = _points(inner, right, [(border, VALUE, torch.zeros_like(border[:, 0]))])
    torch.manual_seed(seed)
    return Task(Residuals(_laplace, periodic=False, widths=(32, 32)), nn.MSELoss(), x, y)


class DeepONet(nn.Module):
    """Values of a function at sensors, and a place, to the value of its integral there."""

    def __init__(self, sensors: int, width: int) -> None:
        super().__init__()
        self.sensors = sensors
        self.branch, self.trunk = (
            nn.Sequential(nn.Linear(size, width), nn.Tanh(), nn.Linear(width, width))
            for size in (sensors, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts: Tensor = self.branch(x[:, : self.sensors]) * self.trunk(x[:, self.sensors :])
        return parts.sum(1, keepdim=True)


def deeponet(kind: str, seed: int) -> Task:
    """Integrals of random trigonometric polynomials (Lu et al., 2021)."""
    functions, places, sensors, waves = {"cpu": 100, "cuda": 500}[kind], 20, 50, 5
    generator = torch.Generator().manual_seed(0)
    number = torch.arange(1, waves + 1) * pi
    a, b = torch.randn(2, functions, 1, waves, generator=generator) / torch.arange(1, waves + 1)
    grid = torch.linspace(0, 1, sensors)[:, None] * number
    y = torch.rand(functions, places, 1, generator=generator)
    values = (a * grid.sin() + b * grid.cos()).sum(-1)  # [functions, sensors]
    integral = ((a * (1 - (y * number).cos()) + b * (y * number).sin()) / number).sum(-1)
    inputs = torch.cat([values[:, None].expand(-1, places, -1), y], 2).reshape(-1, sensors + 1)
    torch.manual_seed(seed)
    return Task(DeepONet(sensors, 40), nn.MSELoss(), inputs, integral.reshape(-1, 1))

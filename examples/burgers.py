"""Burgers' equation u_t + u u_x = ν u_xx: a shock that forms and moves, on points drawn anew.

Run it with `python examples/burgers.py`; it takes half a minute.
"""

from math import pi

import numpy as np
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Term

VISCOSITY, DRIFT = 0.05 / pi, 0.5


def equation(net: nn.Module, points: Tensor) -> Tensor:
    """u_t + u u_x - ν u_xx at points (x, t) [m, 2]."""
    u: Tensor = net(points)
    (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    u_x, u_t = first[:, :1], first[:, 1:]
    (second,) = torch.autograd.grad(u_x.sum(), points, create_graph=True)
    return u_t + u * u_x - VISCOSITY * second[:, :1]


def exact(points: Tensor) -> Tensor:
    """u by the formula of Cole and Hopf, with Gauss-Hermite quadrature."""
    x, t = points.numpy().T[:, :, None]
    nodes, weights = np.polynomial.hermite.hermgauss(100)
    y = x - DRIFT * t - np.sqrt(4 * VISCOSITY * t) * nodes
    log = -np.cos(pi * y) / (2 * pi * VISCOSITY)
    f = weights * np.exp(log - log.max(1, keepdims=True))
    return torch.from_numpy(DRIFT - (np.sin(pi * y) * f).sum(1) / f.sum(1)).unsqueeze(1)


def inside() -> Tensor:
    """3,000 random points of space and time."""
    return torch.rand(3000, 2) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x, t = torch.linspace(-1, 1, 200).unsqueeze(1), torch.linspace(0, 1, 100).unsqueeze(1)
ends = torch.cat([0 * t - 1, t], 1), torch.cat([0 * t + 1, t], 1)
hidden = [layer for _ in range(3) for layer in (nn.Linear(20, 20), nn.Tanh())]
net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), *hidden, nn.Linear(20, 1))
terms = {
    "equation": Term(equation, inside),  # drawn anew when fresh points tell another story
    "start": Term((torch.cat([x, 0 * x], 1), DRIFT - torch.sin(pi * x)), nn.MSELoss(), weight=10.0),
    "periodic": Term(lambda net, left, right: net(left) - net(right), ends, weight=10.0),
}
optimizer = KSD(net, terms)
grid = torch.cartesian_prod(torch.linspace(-1, 1, 201), torch.linspace(0.01, 1, 100))
truth = exact(grid)
for _ in range(16):
    result = optimizer.step()
    error = float((net(grid) - truth).detach().norm() / truth.norm())
    print(result, f"| error {error:.1e}")

"""An inverse problem: how fast does a rod conduct heat? u_t = k u_xx, and 300 noisy readings.

The unknown k is a parameter like the net's own. Run it with `python examples/inverse.py`; it takes
a few seconds.
"""

from math import pi

import torch
from torch import Tensor, nn

from krylov_descent import KSD, Term

CONDUCTIVITY, NOISE = 0.3, 0.02


class Rod(nn.Module):
    """The temperature u at points (x, t) [m, 2], and the conductivity k."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)
        )
        self.conductivity = nn.Parameter(torch.tensor(1.0))

    def forward(self, points: Tensor) -> Tensor:
        u: Tensor = self.net(points)
        return u


def equation(rod: Rod, points: Tensor) -> Tensor:
    """u_t - k u_xx."""
    (first,) = torch.autograd.grad(rod(points).sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
    return first[:, 1] - rod.conductivity * second[:, 0]


def true_temperature(points: Tensor) -> Tensor:
    """Two waves that fade."""
    x, t = points[:, :1], points[:, 1:]
    waves = [torch.exp(-CONDUCTIVITY * (n * pi) ** 2 * t) * torch.sin(n * pi * x) for n in (1, 2)]
    return waves[0] + 0.5 * waves[1]


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
places = torch.rand(300, 2)
readings = true_temperature(places) + NOISE * torch.randn(300, 1)
rod = Rod()
terms = {
    "equation": Term(equation, torch.rand(2000, 2)),
    "readings": Term((places, readings), nn.MSELoss(), weight=10.0),
}
optimizer = KSD(rod, terms)
for _ in range(12):
    print(optimizer.step(), f"| k {rod.conductivity.item():.4f}")
print(f"k is {rod.conductivity.item():.4f}, and in truth {CONDUCTIVITY}")

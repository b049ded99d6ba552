"""A first physics-informed net: -u'' = f on (0, 1) with u(0) = u(1) = 0, and Adam beside it.

The equation and the boundary are two terms of the loss. Run it with
`python examples/physics_informed.py`; it takes a few seconds.
"""

import copy
import time
from math import pi

import torch
from torch import Tensor, nn

from krylov_descent import KSD, Term


def equation(net: nn.Module, x: Tensor) -> Tensor:
    """-u'' - f, the residual at the points x [m, 1]."""
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    f = pi**2 * torch.sin(pi * x) + 8 * pi**2 * torch.sin(4 * pi * x)
    return -bend - f


def boundary(net: nn.Module, x: Tensor) -> Tensor:
    """u itself, which shall be zero."""
    u: Tensor = net(x)
    return u


def error(net: nn.Module) -> float:
    """The largest deviation from the exact solution."""
    x = torch.linspace(0, 1, 1000).unsqueeze(1)
    exact = torch.sin(pi * x) + 0.5 * torch.sin(4 * pi * x)
    return float((net(x) - exact).detach().abs().max())


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
inside, ends = torch.linspace(0, 1, 200).unsqueeze(1), torch.tensor([[0.0], [1.0]])
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
adam_net = copy.deepcopy(net)

terms = {"equation": Term(equation, inside), "boundary": Term(boundary, ends, weight=100.0)}

start = time.perf_counter()
optimizer = KSD(net, terms)
for _ in range(18):
    print(optimizer.step(), f"| error {error(net):.1e}")
seconds = time.perf_counter() - start

adam = torch.optim.Adam(adam_net.parameters(), lr=3e-3)  # the best of 1e-3, 3e-3, 1e-2, 3e-2
x = inside.requires_grad_()
while time.perf_counter() - start < 2 * seconds:
    adam.zero_grad()
    loss = equation(adam_net, x).square().mean() + 100 * boundary(adam_net, ends).square().mean()
    loss.backward()
    adam.step()
print(f"error after {seconds:.1f} s: KSD {error(net):.1e}, Adam {error(adam_net):.1e}")

"""A physics-informed net: -u'' = f on (0, 1) with u(0) = u(1) = 0, and Adam beside it.

The residuals of the equation are the net's outputs: `forward` says how points become -u'', the
targets are f. Run it with `python examples/physics_informed.py`; it takes a few seconds.
"""

import copy
import time
from math import pi

import torch
from torch import Tensor, nn

from krylov_descent import KSD


def solution(net: nn.Module, x: Tensor) -> Tensor:
    """u(x), zero at both ends whatever the net says."""
    u: Tensor = x * (1 - x) * net(x)
    return u


def minus_second_derivative(net: nn.Module, x: Tensor) -> Tensor:
    """-u''(x), part of the autograd graph of the net's parameters."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(solution(net, x).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return -bend


def error(net: nn.Module) -> float:
    """The largest deviation from the exact solution."""
    return float((solution(net, x) - exact).detach().abs().max())


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.linspace(0, 1, 256).unsqueeze(1)
exact = torch.sin(pi * x) + 0.5 * torch.sin(4 * pi * x)
f = pi**2 * torch.sin(pi * x) + 8 * pi**2 * torch.sin(4 * pi * x)
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
adam_net = copy.deepcopy(net)

loss = nn.MSELoss()
start = time.perf_counter()
optimizer = KSD(net, loss, forward=minus_second_derivative, preconditioner="identity")
for _ in range(16):
    print(optimizer.step((x, f)), f"| error {error(net):.1e}")
seconds = time.perf_counter() - start

adam = torch.optim.Adam(adam_net.parameters(), lr=3e-2)  # the best of 1e-3, 3e-3, 1e-2, 3e-2
while time.perf_counter() - start < 2 * seconds:
    adam.zero_grad()
    loss(minus_second_derivative(adam_net, x), f).backward()
    adam.step()
print(f"error after {seconds:.1f} s: KSD {error(net):.1e}, Adam {error(adam_net):.1e}")

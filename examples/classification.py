"""Two spirals, one inside the other: a small classifier, trained on all points at once.

Run it with `python examples/classification.py`; it takes a few seconds.
"""

import math

import torch
from torch import Tensor, nn

from krylov_descent import KSD


def spirals(count: int) -> tuple[Tensor, Tensor]:
    """Points [count, 2] on two noisy spirals and the spiral (0 or 1) that each belongs to."""
    labels = torch.arange(count) % 2
    radius = torch.rand(count).sqrt()
    angle = 3.5 * math.pi * radius + math.pi * labels
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return points + 0.02 * torch.randn(count, 2), labels


torch.manual_seed(0)
train, test = spirals(1000), spirals(1000)
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))

# The L2 term keeps the weights finite once every point is on its side.
optimizer = KSD(model, nn.CrossEntropyLoss(), weight_decay=1e-5)
for _ in range(25):
    print(optimizer.step(train))

with torch.no_grad():
    inputs, labels = test
    accuracy = float((model(inputs).argmax(dim=1) == labels).float().mean())
print(f"{accuracy:.1%} of {len(labels):,} new points are on the right spiral")

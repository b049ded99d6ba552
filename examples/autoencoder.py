"""A deep autoencoder of small images of curves, and linear PCA with the same code beside it.

Run it with `python examples/autoencoder.py`; it takes a few seconds.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from krylov_descent import KSD

SIDE, CODE = 16, 6


def curves(count: int) -> Tensor:
    """Images [count, SIDE²] of soft strokes along quadratics through three random points."""
    low = torch.tensor([[1.0, 5.0, 10.0], [1.0, 1.0, 1.0]])
    high = torch.tensor([[5.0, 10.0, 14.0], [14.0, 14.0, 14.0]])
    points = low + (high - low) * torch.rand(count, 2, 3)
    t = torch.linspace(0, 1, 30)
    # The quadratic passes through the points at t = 0, ½, 1 (Lagrange's polynomials).
    through = torch.stack([(2 * t - 1) * (t - 1), 4 * t * (1 - t), t * (2 * t - 1)])
    dabs = (points @ through).unsqueeze(-1) - torch.arange(SIDE)
    along_x, along_y = (-dabs.square()).exp().unbind(1)
    density = along_y.transpose(1, 2) @ along_x
    return (1 - (-0.5 * density).exp()).reshape(count, SIDE * SIDE)


def squared_error(reconstructions: Tensor) -> float:
    """Per image, summed over the pixels."""
    return float((reconstructions - images).square().sum(1).mean())


torch.manual_seed(0)
images = curves(500)
sizes = [SIDE * SIDE, 64, 32, CODE, 32, 64, SIDE * SIDE]
layers: list[nn.Module] = []
for fan_in, fan_out in pairwise(sizes):
    layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
model = nn.Sequential(*layers[:-1])  # logits: the logistic function belongs to the loss

# Curves have no noise, so a step may use every image for everything.
optimizer = KSD(model, nn.BCEWithLogitsLoss(), subset_size=1.0)
for step in range(1, 21):
    result = optimizer.step((images, images))
    if step % 5 == 0:
        print(f"step {step:2} | {result}")

with torch.no_grad():
    error = squared_error(model(images).sigmoid())
centred = images - images.mean(0)
components = torch.linalg.svd(centred, full_matrices=False).Vh[:CODE]
pca_error = squared_error(images.mean(0) + centred @ components.T @ components)
print(f"squared error per image with a code of {CODE}: {error:.2f}, PCA {pca_error:.2f}")

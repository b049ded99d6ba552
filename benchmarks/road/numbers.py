"""Tables of numbers: regression, classification, and two convex problems."""

import torch
from torch import Tensor, nn

from benchmarks.environment import UnavailableError
from benchmarks.road.problem import Task


def _table(name: str) -> tuple[Tensor, Tensor]:
    """One of scikit-learn's own tables: standardised inputs, and the answers."""
    try:
        from sklearn import datasets
    except ImportError as missing:
        raise UnavailableError("scikit-learn is not installed") from missing
    inputs, answers = getattr(datasets, name)(return_X_y=True)
    x, y = (torch.tensor(side, dtype=torch.float32) for side in (inputs, answers))
    return (x - x.mean(0)) / x.std(0), y


def _mlp(inputs: int, outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    hidden = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


def regression(kind: str, seed: int) -> Task:
    """The progress of diabetes, of 442 patients."""
    del kind
    x, y = _table("load_diabetes")
    targets = ((y - y.mean()) / y.std()).unsqueeze(1)
    return Task(_mlp(x.shape[1], 1, seed), nn.MSELoss(), x, targets)


def classification(kind: str, seed: int) -> Task:
    """Handwritten digits of 8 × 8 pixels, 1,797 of them."""
    del kind
    x, y = _table("load_digits")  # a pixel that is always empty becomes NaN
    return Task(_mlp(x.shape[1], 10, seed), nn.CrossEntropyLoss(), x.nan_to_num(), y.long())


def logistic(kind: str, seed: int) -> Task:
    """Labels of which many contradict each other, and inputs whose sizes differ by a thousand."""
    samples = {"cpu": 5000, "cuda": 50000}[kind]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 100, generator=generator) * torch.logspace(0, -3, 100)
    chance = torch.sigmoid(x @ torch.randn(100, 1, generator=generator))
    labels = (torch.rand(samples, 1, generator=generator) < chance).float()
    torch.manual_seed(seed)
    return Task(nn.Linear(100, 1), nn.BCEWithLogitsLoss(), x, labels)


def least_squares(kind: str, seed: int) -> Task:
    """A linear model in float64 whose curvature has a condition of 1e12."""
    del kind
    generator = torch.Generator().manual_seed(0)
    size, samples = 30, 300

    def orthonormal(rows: int) -> Tensor:
        drawn = torch.randn(rows, size, generator=generator, dtype=torch.float64)
        basis: Tensor = torch.linalg.qr(drawn)[0]
        return basis

    sizes = torch.logspace(0, -6, size, dtype=torch.float64)
    x = orthonormal(samples) * sizes @ orthonormal(size).T * samples**0.5
    y = x @ torch.randn(size, 1, generator=generator, dtype=torch.float64)
    torch.manual_seed(seed)
    return Task(nn.Linear(size, 1, bias=False, dtype=torch.float64), nn.MSELoss(), x, y)

"""The learning rates of first-order methods that were tuned on a form of a problem.

`python -m benchmarks tuning` finds them, and `benchmarks/results` has what every rate came to.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TunedRate:
    """The best of several rates.

    Attributes:
        rate: of the lowest validation error.
        tried: how many rates there were.
        epochs: that each of them was given.
        form: of the problem that they were tried on.
    """

    rate: float
    tried: int
    epochs: int
    form: str

    def __str__(self) -> str:
        """One line for tables and records."""
        return f"{self.rate:g}, best of {self.tried} on {self.form} after {self.epochs} epochs"


# For each form its epochs, and for each method the best rate and how many were tried.
_FOUND: dict[str, tuple[int, dict[str, tuple[float, int]]]] = {
    "curves-small": (150, {"adam": (0.004, 4), "adamw": (0.008, 5), "sgd": (0.01, 5)}),
    "mnist-autoencoder-small": (110, {"adam": (0.004, 4), "adamw": (0.004, 4), "sgd": (0.008, 5)}),
    "mnist-classifier-small": (250, {"adam": (0.016, 6), "adamw": (0.032, 7), "sgd": (0.512, 10)}),
    "poisson-2d-small": (1_500, {"adam": (0.064, 8)}),
    "poisson-2d-medium": (400, {"adam": (0.008, 5)}),
    "heat-1d": (700, {"adam": (0.008, 5)}),
    "reaction": (240, {"adam": (0.004, 4)}),
    "wave": (200, {"adam": (0.008, 5)}),
    "burgers": (100, {"adam": (0.032, 7)}),
    "allen-cahn": (100, {"adam": (0.008, 5)}),
}
# By the form of a problem and the name of the contender.
RATES: Mapping[str, Mapping[str, TunedRate]] = {
    form: {
        method: TunedRate(rate=rate, tried=tried, epochs=epochs, form=form)
        for method, (rate, tried) in found.items()
    }
    for form, (epochs, found) in _FOUND.items()
}


def rates_of(name: str, small: bool = False) -> Mapping[str, TunedRate]:
    """The rates for a form of a problem by the name of the contender; empty where none is tuned."""
    return RATES.get(f"{name}-small" if small else name, {})

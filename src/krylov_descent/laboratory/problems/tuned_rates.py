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


def _rates(form: str, epochs: int, **found: tuple[float, int]) -> dict[str, TunedRate]:
    """By the name of the contender, from the rate and how many were tried."""
    return {
        name: TunedRate(rate=rate, tried=tried, epochs=epochs, form=form)
        for name, (rate, tried) in found.items()
    }


# By the form, as the benchmark calls it.
RATES: Mapping[str, Mapping[str, TunedRate]] = {
    "curves-small": _rates("curves-small", 150, adam=(0.004, 4), adamw=(0.008, 5), sgd=(0.01, 5)),
    "mnist-autoencoder-small": _rates(
        "mnist-autoencoder-small", 110, adam=(0.004, 4), adamw=(0.004, 4), sgd=(0.01, 4)
    ),
    "mnist-classifier-small": _rates(
        "mnist-classifier-small", 250, adam=(0.004, 4), adamw=(0.004, 4), sgd=(0.01, 4)
    ),
    "poisson-2d-small": _rates("poisson-2d-small", 1500, adam=(0.01, 3), adamw=(0.01, 3)),
}


def rates_of(name: str, small: bool) -> Mapping[str, TunedRate]:
    """The rates for a form of a problem by the name of the contender; empty where none is tuned."""
    return RATES.get(f"{name}-small" if small else name, {})

"""The methods by name, with the grids of their learning rates.

Those without a learning rate have the library's defaults.
"""

from dataclasses import dataclass
from typing import Any

from benchmarks.environment import UnavailableError, version_of
from krylov_descent import KroneckerFactors

# Wide enough that the best is seldom at an end, on full problems and small ones.
ADAPTIVE_RATES = (2e-3, 5e-3, 1.2e-2, 3e-2)
SOAP_RATES = (4e-3, 1e-2, 2.5e-2, 6e-2)
# Its updates are matrices of equal singular values, whatever the gradient's size.
MUON_RATES = (5e-3, 1e-2, 2e-2, 4e-2)
# Its authors: larger than with a schedule, by up to ten times.
SCHEDULE_FREE_RATES = (8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
KRON_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
# Its steps are as long as RMSProp's.
SHAMPOO_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
# The loss of an autoencoder is a sum over 784 pixels.
SGD_RATES = (1e-3, 4e-3, 1.6e-2, 6.4e-2)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method as it takes part.

    Attributes:
        title: what tables call it.
        rates: the grid of its learning rate; empty for methods without one.
        distribution: that it needs.
        tf32: whether gradient (and products) are in TensorFloat-32; None as the defaults say.
        gpu_only: whether it takes part on GPUs alone.
        kind: the method that it is a form of. Forms take part where the goals are about them,
            with the learning rate of the method itself.
        decays: whether its learning rate falls to 0.
    """

    title: str
    rates: tuple[float, ...] = ()
    distribution: str | None = None
    tf32: bool | None = None
    gpu_only: bool = False
    kind: str | None = None
    decays: bool = True

    @property
    def own_rate(self) -> bool:
        """Whether a learning rate is to be found for it."""
        return bool(self.rates) and self.kind is None

    def require(self) -> None:
        """Say so where its library is not installed."""
        if self.distribution and version_of(self.distribution) is None:
            raise UnavailableError(f"{self.distribution} is not installed")


METHODS: dict[str, Method] = {
    "ksd": Method(title="KSD"),
    "hf": Method(title="HF"),
    "lbfgs": Method(title="L-BFGS"),
    "ncg": Method(title="Nonlinear CG"),
    "adam": Method(title="Adam", rates=ADAPTIVE_RATES),
    "adamw": Method(title="AdamW", rates=ADAPTIVE_RATES),
    "sgd": Method(title="SGD (Nesterov)", rates=SGD_RATES),
    "soap": Method(title="SOAP", rates=SOAP_RATES, distribution="pytorch_optimizer"),
    "schedule-free": Method(
        title="Schedule-free AdamW",
        rates=SCHEDULE_FREE_RATES,
        distribution="pytorch_optimizer",
        decays=False,
    ),
    "shampoo": Method(title="Shampoo", rates=SHAMPOO_RATES, distribution="pytorch_optimizer"),
    # Its step takes more than a hundred times Adam's on a CPU: some 300 steps in 20 s.
    "kron": Method(
        title="PSGD-Kron", rates=KRON_RATES, distribution="pytorch_optimizer", gpu_only=True
    ),
    # Its products are in bfloat16, with which many CPUs take minutes for an epoch.
    "muon": Method(title="Muon", rates=MUON_RATES, gpu_only=True),
    "hf-tf32": Method(title="HF (tf32 products)", tf32=True, gpu_only=True, kind="hf"),
    "adam-tf32": Method(
        title="Adam (tf32)", rates=ADAPTIVE_RATES, tf32=True, gpu_only=True, kind="adam"
    ),
    "soap-tf32": Method(
        title="SOAP (tf32)",
        rates=SOAP_RATES,
        distribution="pytorch_optimizer",
        tf32=True,
        gpu_only=True,
        kind="soap",
    ),
    "muon-tf32": Method(
        title="Muon (tf32)", rates=MUON_RATES, tf32=True, gpu_only=True, kind="muon"
    ),
}


def methods_of(device: str) -> dict[str, Method]:
    """Those that there are on a device."""
    return {name: m for name, m in METHODS.items() if device == "cuda" or not m.gpu_only}


def settings_of(method: str) -> dict[str, Any]:
    """Options of a method without learning rate: the defaults, but for the precision."""
    chosen = METHODS[method]
    return {} if chosen.rates or chosen.tf32 is None else {"tf32": chosen.tf32}


def first_steps(method: str) -> int:
    """After so many a method without learning rate does nothing for the first time."""
    return 2 + (KroneckerFactors().after if method == "ksd" else 0)

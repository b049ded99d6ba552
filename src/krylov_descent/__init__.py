"""Krylov Subspace Descent: second-order training without a learning rate and without damping."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from krylov_descent.curvature.preconditioners.kronecker import KroneckerFactors
    from krylov_descent.curvature.preconditioners.preconditioner import (
        FisherDiagonal,
        Identity,
        Preconditioner,
    )
    from krylov_descent.objective.evaluation import Evaluation
    from krylov_descent.objective.objective import Objective
    from krylov_descent.objective.term import Term
    from krylov_descent.optimizers.first_order import FirstOrder
    from krylov_descent.optimizers.hessian_free import HessianFree
    from krylov_descent.optimizers.ksd.ksd import KSD
    from krylov_descent.optimizers.lbfgs import LBFGS
    from krylov_descent.optimizers.nonlinear_cg import NonlinearCG
    from krylov_descent.optimizers.result import Status, StepResult

__version__ = "0.1.0"

__all__ = [
    "KSD",
    "LBFGS",
    "Evaluation",
    "FirstOrder",
    "FisherDiagonal",
    "HessianFree",
    "Identity",
    "KroneckerFactors",
    "NonlinearCG",
    "Objective",
    "Preconditioner",
    "Status",
    "StepResult",
    "Term",
]

# Where each of them is. They are imported when they are first asked for, so that `ksd --help` does
# not wait for torch.
_MODULES = {
    "KSD": "optimizers.ksd.ksd",
    "LBFGS": "optimizers.lbfgs",
    "Evaluation": "objective.evaluation",
    "FirstOrder": "optimizers.first_order",
    "FisherDiagonal": "curvature.preconditioners.preconditioner",
    "HessianFree": "optimizers.hessian_free",
    "Identity": "curvature.preconditioners.preconditioner",
    "KroneckerFactors": "curvature.preconditioners.kronecker",
    "NonlinearCG": "optimizers.nonlinear_cg",
    "Objective": "objective.objective",
    "Preconditioner": "curvature.preconditioners.preconditioner",
    "Status": "optimizers.result",
    "StepResult": "optimizers.result",
    "Term": "objective.term",
}


if not TYPE_CHECKING:  # which would take every other name for one of them

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Krylov Subspace Descent: second-order training without a learning rate and without damping."""

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

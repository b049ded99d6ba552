"""The BFGS update of an inverse Hessian (Nocedal & Wright 2006, equation 6.17)."""

import math
import sys

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
EPSILON = sys.float_info.epsilon


class InverseHessian:
    """The BFGS approximation of the inverse Hessian, [m, m], positive definite."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.reset()

    def reset(self) -> None:
        self.matrix = np.eye(self._size)
        self.is_identity = True

    def times(self, vector: Array) -> Array:
        product: Array = self.matrix.dot(vector)
        return product

    def update(self, step: Array, change: Array) -> None:
        """Learn that this step changed the gradient by `change`, so that H·change = step.

        The update is skipped if the curvature along the step, stepᵀchange, is not safely positive:
        the matrix would lose its definiteness.
        """
        curvature = float(step.dot(change))
        squares = float(change.dot(change))
        if curvature <= EPSILON * math.sqrt(float(step.dot(step))) * math.sqrt(squares):
            return
        if self.is_identity:
            # The usual scaling of the first matrix, but only upwards. If the first direction has
            # more curvature than expected, this says nothing about the other directions. BFGS is
            # slow to learn a direction whose curvature it overestimates.
            self.matrix *= max(1.0, curvature / squares)
            self.is_identity = False
        image = self.matrix.dot(change)
        weight = (1 + float(change.dot(image)) / curvature) / curvature
        # weight·ssᵀ − (s·imageᵀ + image·sᵀ)/curvature, as one matrix plus its transpose.
        half = step[:, None] * (0.5 * weight * step - image / curvature)
        self.matrix += half
        self.matrix += half.T

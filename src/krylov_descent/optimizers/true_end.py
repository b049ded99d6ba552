"""Where a training has truly ended: what a further step could gain is rounding alone."""

import math

import torch

from krylov_descent.algorithms.bfgs import StopReason
from krylov_descent.optimizers.result import StepResult

# Times the rounding of the loss at the beginning (a cross-entropy rounds as its logits do, and they
# are some tens), and times that of the gradient's norm.
LOSS_ROUNDING, GRADIENT_ROUNDING = 100.0, 10.0


def truly_ended(result: StepResult, first_loss: float, dtype: torch.dtype) -> bool:
    """Whether one of these is rounding alone after a step.

    The loss, beside the loss at the beginning; the gradient; the decrease that the search predicts,
    with a noise of the loss that is plausible.
    """
    epsilon = torch.finfo(dtype).eps
    little_to_gain = StopReason.BELOW_NOISE in result.reason and not result.status.moved
    return (
        result.loss <= LOSS_ROUNDING * epsilon * first_loss
        or result.gradient_norm <= GRADIENT_ROUNDING * (result.gradient_noise or 0.0)
        or (little_to_gain and result.noise <= math.sqrt(epsilon) * result.loss)
    )

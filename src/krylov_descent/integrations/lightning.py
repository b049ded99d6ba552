"""Lightning's automatic optimisation by an optimiser of this library.

    class Net(KSDModule):
        def configure_optimizers(self):
            return KSD(self, nn.MSELoss()).bind(self.data)

The rest is as in any LightningModule. Each batch of the loader makes one step on the bound data, so
a loader with one batch makes one step in an epoch. Manual optimisation needs nothing of this
file: call `self.optimizers().step(data=batch)`.
"""

from typing import Any

import lightning
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from krylov_descent.optimizers.base import DataOptimizer


class KSDModule(lightning.LightningModule):  # type: ignore[misc]
    """A LightningModule whose optimiser has bound data, and makes its own gradients of them.

    `training_step` is called before each step, for its metrics. The loss that it returns is not
    differentiated. The numbers of the step are logged as "ksd/loss", "ksd/rank" and so on; a
    module with an `on_train_batch_end` of its own calls that of this class for them.
    """

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Nothing: a step makes its own gradients."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """Make a step in the precision of the Trainer."""
        with self.trainer.precision_plugin.forward_context():
            optimizer.step(closure=optimizer_closure)

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Raise ValueError if the Trainer is to clip gradients, of which there are none."""
        if gradient_clip_val:
            raise ValueError(
                f"`gradient_clip_val` is {gradient_clip_val}, and a step has no gradients to clip: "
                "leave it out"
            )

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        """Log the numbers of the step."""
        optimizer = self.optimizers()
        if isinstance(optimizer, DataOptimizer) and optimizer.last_result is not None:
            numbers = optimizer.last_result.numbers()
            self.log_dict({f"ksd/{name}": number for name, number in numbers.items()})

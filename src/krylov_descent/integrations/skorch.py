"""skorch's estimators with another optimiser: their module is trained by KSD.

The option `optimizer__dimension=30` of an estimator is the option `dimension=30` of KSD.
"""

from typing import Any

import skorch
import torch
from skorch.dataset import unpack_data
from torch import Tensor, nn

from krylov_descent.optimizers.ksd.ksd import KSD


class _DataSteps:
    """A skorch net whose optimiser gets the module, the criterion and the data."""

    def initialize_optimizer(self: Any, triggered_directly: Any = None) -> Any:
        """Make the optimiser of `module`, with options named `optimizer__…`."""
        parameters = self.module_.named_parameters()
        (params,), options = self.get_params_for_optimizer("optimizer", parameters)
        loss = self.criterion_
        if isinstance(self, skorch.NeuralNetClassifier) and isinstance(loss, nn.NLLLoss):
            loss = _OfProbabilities(loss)
        self.optimizer_ = self.optimizer(self.module_, loss, params=params, **options)
        return self

    def train_step(self: Any, batch: Any, **fit_params: Any) -> dict[str, Tensor]:
        """Make a step on the batch; its loss and predictions are those before the step."""
        inputs, targets = unpack_data(batch)
        self.module_.train()
        self.criterion_.train()
        with torch.no_grad():
            predicted = self.infer(inputs, **fit_params)
            loss = self.get_loss(predicted, targets, X=inputs, training=True)
        result = self.optimizer_.step((inputs, targets))
        self.history.record_batch("step", result.numbers())
        return {"loss": loss, "y_pred": predicted}


class NeuralNetClassifier(_DataSteps, skorch.NeuralNetClassifier):  # type: ignore[misc]
    """skorch's NeuralNetClassifier, trained by KSD.

    An epoch is one step on all of the training data. The module returns logits, because the
    criterion is the cross-entropy; with `criterion=NLLLoss` it returns probabilities, as in skorch.
    The numbers of each step are in the history, as `net.history[-1, "batches", 0, "step"]`.

    Args:
        module: as for skorch, as are `args` and `options`.
        criterion: a class or an object of torch's losses.
        optimizer: KSD, or another optimiser of this library; `optimizer__…` are its options.
        lr: the factor on steps.
        batch_size: -1 makes a step on all data; other sizes make one on each batch.
    """

    def __init__(
        self,
        module: Any,
        *args: Any,
        criterion: Any = nn.CrossEntropyLoss,
        optimizer: Any = KSD,
        lr: float = 1.0,
        batch_size: int = -1,
        **options: Any,
    ) -> None:
        super().__init__(
            module,
            *args,
            criterion=criterion,
            optimizer=optimizer,
            lr=lr,
            batch_size=batch_size,
            **options,
        )


class NeuralNetRegressor(_DataSteps, skorch.NeuralNetRegressor):  # type: ignore[misc]
    """skorch's NeuralNetRegressor, trained by KSD; see `NeuralNetClassifier`."""

    def __init__(
        self,
        module: Any,
        *args: Any,
        optimizer: Any = KSD,
        lr: float = 1.0,
        batch_size: int = -1,
        **options: Any,
    ) -> None:
        super().__init__(
            module, *args, optimizer=optimizer, lr=lr, batch_size=batch_size, **options
        )


class _OfProbabilities:
    """The criterion NLLLoss on probabilities, as skorch's classifier applies it."""

    def __init__(self, criterion: nn.NLLLoss) -> None:
        self._criterion = criterion

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = self._criterion((outputs + torch.finfo(outputs.dtype).eps).log(), targets)
        return found

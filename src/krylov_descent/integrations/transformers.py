"""The Trainer of Hugging Face with KSD as its optimiser."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import Trainer, get_constant_schedule

from krylov_descent.objective.losses import Loss
from krylov_descent.optimizers.ksd.ksd import KSD


class KSDTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose steps are steps of KSD on the whole of `train_dataset`.

    A batch of the Trainer makes one step, so `max_steps` is the number of steps of KSD. The batch
    itself only gives the loss for the log. The numbers of the step are added to the log as
    "ksd_loss", "ksd_rank" and so on. The model is trained in evaluation mode, without dropout. The
    learning rate of the arguments and its schedule are not used; their weight decay becomes KSD's.
    Under `torchrun` each process has its own part of the data.

    Args:
        args: of the Trainer, as are `kwargs`.
        loss: of the model's logits and the labels, as for `KSD`.
        ksd: options of `KSD`; `forward` where the loss is not one of the logits.
        kwargs: see `args`.

    Raises:
        ValueError: the arguments ask for scaled gradients (`fp16`) or accumulate them.
    """

    # Set by Trainer; mypy does not read it.
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self, *args: Any, loss: Loss, ksd: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._loss, self._options = loss, dict(ksd or {})
        if self.args.fp16:
            raise ValueError("`fp16` scales gradients, and KSD makes its own: take `bf16=True`")
        if self.args.gradient_accumulation_steps > 1:
            raise ValueError(
                "`gradient_accumulation_steps` must be 1: each step is one on all of the data"
            )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make KSD, and bind the training data to it."""
        if self.optimizer is None:
            usual = {
                "forward": _logits,
                "weight_decay": self.args.weight_decay,
                "seed": self.args.seed,
            }
            made = KSD(model or self.model, self._loss, **usual | self._options)
            self.optimizer = made.bind(self._data())
        found: torch.optim.Optimizer = self.optimizer
        return found

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Leave the learning rate at 1, of which a schedule would take away."""
        if self.lr_scheduler is None:
            self.lr_scheduler = get_constant_schedule(optimizer or self.optimizer)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """The loss of a batch, for the log: KSD makes its own gradients."""
        model.eval()
        with torch.no_grad(), self.compute_loss_context_manager():
            loss: Tensor = self.compute_loss(model, inputs)
        return loss.mean()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the numbers of the last step beside the loss."""
        if "loss" in logs:
            result = self.optimizer.optimizer.last_result  # in the wrapper of Accelerate
            logs["grad_norm"] = result.gradient_norm
            logs |= {f"ksd_{name}": number for name, number in result.numbers().items()}
        super().log(logs, start_time)

    def _data(self) -> DataLoader[Any]:
        """This process's part of the training data, as pairs (inputs, labels)."""
        usual = self.get_train_dataloader()
        own = range(self.args.process_index, len(usual.dataset), self.args.world_size)
        collate = partial(_pair, usual.collate_fn, self.label_names)
        batch_size = self.args.per_device_train_batch_size
        return DataLoader(Subset(usual.dataset, own), batch_size, collate_fn=collate)


def _pair(
    collate: Callable[[Any], Mapping[str, Tensor]], label_names: list[str], samples: Any
) -> tuple[dict[str, Tensor], Any]:
    inputs = dict(collate(samples))
    labels = {name: inputs.pop(name) for name in label_names if name in inputs}
    return inputs, next(iter(labels.values())) if len(labels) == 1 else labels


def _logits(model: Any, inputs: dict[str, Tensor]) -> Any:
    return model(**inputs).logits

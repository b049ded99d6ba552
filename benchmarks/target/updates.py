"""What first-order methods do with a gradient, in the form that runs fastest.

On a GPU a step is one CUDA graph, so its learning rate must be a tensor that is changed in place.
Adam, AdamW and SGD take one. Muon does not, but its update is linear in the rate: it is made with
rate 1 and then shortened. The others decide on the host or factorise matrices: only the gradient is
recorded for them, and the update runs as it is.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

RateForm = Literal["tensor", "scaled", "number"]
MOMENTUM = 0.95  # of SGD
# Its authors recommend a warm-up; in steps of mini-batches.
SCHEDULE_FREE_WARM_UP = 100
# Steps between two inversions of Shampoo's factors.
SHAMPOO_INTERVAL = 100


class Update:
    """Optimisers that share one learning rate.

    Args:
        optimizers: that together update all parameters.
        parameters: those.
        rate: a scalar on the parameters' device.
        form: how the optimisers learn of the rate: "tensor" (they were given `rate`), "scaled"
            (they have rate 1, and the step is multiplied), "number" (set in their groups).
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[Tensor],
        rate: Tensor,
        form: RateForm,
    ) -> None:
        self.optimizers, self.parameters = list(optimizers), list(parameters)
        self.rate, self.form = rate, form

    @property
    def recordable(self) -> bool:
        """Whether a CUDA graph can hold it."""
        return self.form != "number"

    def set_rate(self, rate: float) -> None:
        """For the steps that follow."""
        self.rate.fill_(rate)
        if self.form == "number":
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters by their `.grad`."""
        before = [p.clone() for p in self.parameters] if self.form == "scaled" else []
        for optimizer in self.optimizers:
            optimizer.step()
        for p, start in zip(self.parameters, before, strict=False):
            p.copy_(torch.lerp(start, p, self.rate))

    def for_training(self) -> None:
        """The parameters as steps move them."""
        for optimizer in self.optimizers:
            if hasattr(optimizer, "train"):  # schedule-free
                optimizer.train()

    def for_evaluation(self) -> None:
        """The parameters whose errors count: with a schedule-free method an average."""
        for optimizer in self.optimizers:
            if hasattr(optimizer, "eval"):
                optimizer.eval()

    def forget(self) -> None:
        """The state of the beginning, which for all of these is zeros, at the same addresses."""
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()


def make_update(method: str, model: nn.Module, weight_decay: float, *, recorded: bool) -> Update:
    """The update of a method.

    Args:
        method: one with a learning rate.
        model: whose parameters it moves.
        weight_decay: as the method itself understands it.
        recorded: for a CUDA graph.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    rate = torch.zeros((), device=parameters[0].device)
    lr: Any = rate if recorded else 0.0
    fast: dict[str, Any] = {"fused": True, "weight_decay": weight_decay}
    adaptive = fast | ({"capturable": True} if recorded else {})
    form: RateForm = "tensor" if recorded else "number"
    optimizers: list[torch.optim.Optimizer]
    if method == "adam":
        optimizers = [torch.optim.Adam(parameters, lr=lr, **adaptive)]
    elif method == "adamw":
        optimizers = [torch.optim.AdamW(parameters, lr=lr, **adaptive)]
    elif method == "sgd":
        optimizers = [torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM, nesterov=True, **fast)]
    elif method == "muon":
        form = "scaled" if recorded else "number"
        matrices = [p for p in parameters if p.dim() == 2]
        others = [p for p in parameters if p.dim() != 2]
        optimizers = [
            # With steps as long as AdamW's, so that one rate serves both.
            torch.optim.Muon(
                matrices, lr=1.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
        ]
        if others:
            optimizers.append(torch.optim.AdamW(others, lr=1.0, **adaptive))
    elif method == "soap":
        from pytorch_optimizer import SOAP

        form = "number"
        optimizers = [SOAP(parameters, lr=1.0, weight_decay=weight_decay)]
    elif method == "schedule-free":
        from pytorch_optimizer import ScheduleFreeAdamW

        form = "number"
        optimizers = [
            ScheduleFreeAdamW(
                parameters, lr=1.0, weight_decay=weight_decay, warmup_steps=SCHEDULE_FREE_WARM_UP
            )
        ]
    elif method == "kron":
        from pytorch_optimizer import Kron

        form = "number"
        optimizers = [Kron(parameters, lr=1.0, weight_decay=weight_decay)]
    elif method == "shampoo":
        from pytorch_optimizer import ScalableShampoo
        from pytorch_optimizer.optimizer.utils.graft import LayerWiseGrafting

        form = "number"
        optimizers = [
            ScalableShampoo(
                parameters,
                lr=1.0,
                weight_decay=weight_decay,
                decoupled_weight_decay=True,
                moving_average_for_momentum=True,
                graft_type=LayerWiseGrafting.RMSPROP,
                preconditioning_compute_steps=SHAMPOO_INTERVAL,
            )
        ]
    else:
        raise ValueError(f"`method` must be one with a learning rate, found {method!r}")
    return Update(optimizers, parameters, rate, form)

"""Calls of `step` that cannot work, whatever the data are."""

from typing import Any

import torch


def check_call(optimizer: object, closure: Any) -> None:
    """Check where and how `step` is called.

    Args:
        optimizer: whose `step` is called.
        closure: its argument.

    Raises:
        RuntimeError: a GradScaler calls it, or it is called within torch.inference_mode().
        TypeError: the closure cannot be called.
    """
    name = type(optimizer).__name__
    if hasattr(optimizer, "grad_scale"):
        vars(optimizer).pop("grad_scale"), vars(optimizer).pop("found_inf", None)
        raise RuntimeError(
            f"{name} does not work with GradScaler: it computes its own gradients and needs no "
            "loss scaling. Call optimizer.step(data), and use torch.autocast with bfloat16 where a "
            "low-precision forward pass is wanted"
        )
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{name} needs gradients, which torch.inference_mode() rules out: call optimizer.step "
            "outside of it, or use torch.no_grad() in its place"
        )
    if closure is not None and not callable(closure):
        raise TypeError(
            f"`closure` must be callable, or None, found {type(closure).__name__}: give the data "
            "as the first argument"
        )

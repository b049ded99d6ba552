"""Devices and precisions by the names that a person types."""

import torch

from krylov_descent.laboratory.choices import unknown_name
from krylov_descent.laboratory.problems import PROBLEMS
from krylov_descent.laboratory.settings import RunSettings

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def find_device(name: str) -> torch.device:
    """The device of a name.

    Raises:
        ValueError: there is none of that name here.
    """
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise ValueError(f"`device` must be like 'cpu' or 'cuda:0', found {name!r}") from problem
    try:
        torch.zeros((), device=device).item()
    except (AssertionError, NotImplementedError, RuntimeError) as problem:
        found = torch.cuda.device_count()
        raise ValueError(
            f"`device`: there is no {name!r} here, torch sees {found or 'no'} CUDA device"
            f"{'' if found == 1 else 's'}: use --device cpu"
        ) from problem
    return device


def find_dtype(name: str) -> torch.dtype:
    """The precision of a name."""
    if name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)
    return DTYPES[name]


def precision_of(settings: RunSettings) -> torch.dtype:
    """The dtype of the network.

    Raises:
        UnknownNameError: no such dtype; the nearest is suggested.
    """
    entry = PROBLEMS.get(settings.problem)
    return find_dtype(settings.dtype or (entry.dtype if entry else "float32"))


def name_of(dtype: torch.dtype) -> str:
    """The name of a precision."""
    return next(name for name, known in DTYPES.items() if known is dtype)

"""Checks of arguments, which name the argument in the error."""

import math
from numbers import Integral, Real
from typing import Any

from torch import Tensor


def check_counts(**given: Any) -> None:
    """Raise TypeError or ValueError unless each argument is a whole number of at least 1."""
    for name, value in given.items():
        check_whole(**{name: value})
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, found {value}")


def check_counts_or_auto(**given: Any) -> None:
    """Raise TypeError or ValueError unless each is "auto" or a whole number of at least 1."""
    for name, value in given.items():
        if isinstance(value, str) and value != "auto":
            raise ValueError(f"`{name}` must be 'auto' or a whole number, found {value!r}")
        if not isinstance(value, str):
            check_counts(**{name: value})


def check_whole(**given: Any) -> None:
    """Raise TypeError unless each argument is a whole number."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"`{name}` must be a whole number, found {value!r}")


def check_not_negative(**given: Any) -> None:
    """Raise ValueError unless each argument is a finite number ≥ 0, or a tensor with one."""
    for name, value in given.items():
        is_number = isinstance(value, Real | Tensor) and not isinstance(value, bool)
        if not is_number or not 0 <= float(value) < math.inf:
            raise ValueError(f"`{name}` must be a number of 0 or more, found {value!r}")


def check_flags(**given: Any) -> None:
    """Raise TypeError unless each argument is a bool: a string such as "no" would be true."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"`{name}` must be True or False, found {value!r}")

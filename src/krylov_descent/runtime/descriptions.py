"""Descriptions of a model and a loss as text and tensors, which must be equal on every rank.

A description holds the names of classes and functions, and settings: numbers, strings and flags. It
leaves out memory addresses and private attributes (names with a leading underscore), because
private attributes may hold state.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
PLAIN = (bool, int, float, str, type(None), torch.dtype)


def described(name: str, thing: Any) -> dict[str, str]:
    """Describe an object by its name and its public settings, as text by label.

    Args:
        name: the label of the object.
        thing: a function, a `functools.partial`, a module or any other object.
    """
    told = {name: name_of(thing)}
    return told | {f"{name}'s {key}": str(v) for key, v in _public(thing) if _is_plain(v)}


def described_modules(model: nn.Module) -> dict[str, str]:
    """Describe each module of a model by its class, `extra_repr` and function attributes."""
    return {
        f"the module {name}" if name else "the model": _words(module)
        for name, module in model.named_modules()
    }


def tensors_of(name: str, thing: Any) -> dict[str, Tensor]:
    """The tensors of a loss by label: public attributes, and a module's parameters and buffers."""
    found = {f"{name}'s {key}": v for key, v in _public(thing) if isinstance(v, Tensor)}
    if isinstance(thing, nn.Module):
        owned = (*thing.named_parameters(), *thing.named_buffers())
        found |= {f"{name}'s {key}": tensor for key, tensor in owned}
    return found


def name_of(thing: Any) -> str:
    """The name of a function with its line number, or the name of an object's class."""
    if isinstance(thing, functools.partial):
        return f"partial of {name_of(thing.func)}"
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    code = getattr(thing, "__code__", None)
    return named.__qualname__ + ("" if code is None else f" of line {code.co_firstlineno}")


def _public(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, functools.partial):
        yield from ((f"argument {i}", value) for i, value in enumerate(thing.args))
        yield from thing.keywords.items()
        return
    for key, value in getattr(thing, "__dict__", {}).items():
        # `training` may differ between ranks: rank 0 alone may evaluate the model.
        if not key.startswith("_") and key != "training":
            yield key, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def _words(module: nn.Module) -> str:
    functions = [
        f"{key}={name_of(value)}"
        for key, value in _public(module)
        if callable(value) and hasattr(value, "__qualname__")
    ]
    shown = ADDRESS.sub("", " ".join(module.extra_repr().split()))
    return f"{type(module).__qualname__}({', '.join([*filter(None, [shown]), *functions])})"

"""A model and a loss in words and tensors: what must be the same on every rank.

Told are names of classes and functions, and settings: numbers, words and flags. Addresses are not
told, nor anything that an object keeps under a name with an underscore, which may be its state.
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
    """An object by its name and its public settings.

    Args:
        name: under which it is told.
        thing: a function, a `functools.partial`, a module or any other object.
    """
    told = {name: name_of(thing)}
    return told | {f"{name}'s {key}": str(v) for key, v in _public(thing) if _is_plain(v)}


def described_modules(model: nn.Module) -> dict[str, str]:
    """Every module of a model by its class, what it shows of itself, and the functions it holds."""
    return {
        f"the module {name}" if name else "the model": _words(module)
        for name, module in model.named_modules()
    }


def tensors_of(name: str, thing: Any) -> dict[str, Tensor]:
    """The tensors of a loss: those of a module, and any that it has as a public attribute."""
    found = {f"{name}'s {key}": v for key, v in _public(thing) if isinstance(v, Tensor)}
    if isinstance(thing, nn.Module):
        owned = (*thing.named_parameters(), *thing.named_buffers())
        found |= {f"{name}'s {key}": tensor for key, tensor in owned}
    return found


def name_of(thing: Any) -> str:
    """The name of a function, with its line, or of an object's class."""
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
        # The mode of a loss may be another one where only rank 0 evaluates it.
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

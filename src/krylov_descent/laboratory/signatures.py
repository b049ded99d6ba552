"""What can be set on a class or function: names, defaults, and what its docstring says of them."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# "name: what it is" or, as torch writes it, "name (type, optional): what it is".
ENTRY = re.compile(r" {4}\*{0,2}(\w+)(?: \(.*\) ?)?:\s*(.*)")


@dataclass(frozen=True)
class Option:
    """One argument that may be left out.

    Attributes:
        name: of the argument.
        default: its value if left out.
        meaning: what the docstring says of it; empty if it says nothing.
        takes_dtype: whether it is annotated as a torch.dtype.
    """

    name: str
    default: str
    meaning: str
    takes_dtype: bool = False


def options_of(made: Callable[..., Any], manual: object = None) -> list[Option]:
    """The arguments of a callable that have a default.

    Args:
        made: a class or function.
        manual: what has the docstring that describes them, where that is not `made` itself.
    """
    meanings = _meanings(inspect.getdoc(made if manual is None else manual) or "")
    return [
        Option(
            name,
            str(parameter.default),
            meanings.get(name, ""),
            torch.dtype in (parameter.annotation, *get_args(parameter.annotation)),
        )
        for name, parameter in inspect.signature(made).parameters.items()
        if parameter.kind in NAMED and parameter.default is not inspect.Parameter.empty
    ]


def with_truths(values: Mapping[str, Any], options: Iterable[Option]) -> dict[str, Any]:
    """The values with "yes", "off" and the like as booleans, for options whose default is one."""
    boolean = {option.name for option in options if option.default in ("True", "False")}
    return {
        name: TRUTHS.get(value.lower(), value)
        if name in boolean and isinstance(value, str)
        else value
        for name, value in values.items()
    }


def with_dtypes(values: Mapping[str, Any], options: Iterable[Option]) -> dict[str, Any]:
    """The values with names such as "bfloat16" as torch's dtypes, for options that take one."""
    taking = {option.name for option in options if option.takes_dtype}
    return {
        name: _floating_dtype(value) if name in taking and isinstance(value, str) else value
        for name, value in values.items()
    }


def _floating_dtype(name: str) -> torch.dtype | str:
    """What torch has by this name; the name itself if that is no floating dtype."""
    found = getattr(torch, name.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else name


def takes_anything(made: Callable[..., Any]) -> bool:
    """Whether a callable takes keyword arguments of any name."""
    parameters = inspect.signature(made).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _meanings(text: str) -> dict[str, str]:
    """What the section "Args:" says of each argument."""
    _, _, section = text.partition("Args:\n")
    found: dict[str, str] = {}
    name = None
    for line in section.splitlines():
        if line and not line.startswith("    "):
            break  # the next section
        if entry := ENTRY.fullmatch(line):
            name, found[entry[1]] = entry[1], entry[2]
        elif name is not None:
            found[name] += " " + line.strip()
    return {name: words.strip() for name, words in found.items()}

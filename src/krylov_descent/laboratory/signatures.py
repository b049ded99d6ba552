"""What can be set on a class or function: names, defaults, and what its docstring says of them."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# "name: what it is" or, as torch writes it, "name (type, optional): what it is".
ENTRY = re.compile(r" {4}\*{0,2}(\w+)(?: \(.*\) ?)?:\s*(.*)")


@dataclass(frozen=True)
class Option:
    """One argument that may be left out.

    Attributes:
        name: of the argument.
        default: its value if left out.
        meaning: what the docstring says of it; empty if it says nothing.
    """

    name: str
    default: str
    meaning: str


def options_of(made: Callable[..., Any], manual: object = None) -> list[Option]:
    """The arguments of a callable that have a default.

    Args:
        made: a class or function.
        manual: what has the docstring that describes them, where that is not `made` itself.
    """
    meanings = _meanings(inspect.getdoc(made if manual is None else manual) or "")
    return [
        Option(name, str(parameter.default), meanings.get(name, ""))
        for name, parameter in inspect.signature(made).parameters.items()
        if parameter.kind in NAMED and parameter.default is not inspect.Parameter.empty
    ]


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

"""What can be set on a class or function: names, defaults, and what its docstring says of them."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import torch

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# Of kinds that are checked: what a value must be an instance of, and what it is called.
KINDS: dict[Any, tuple[type, tuple[str, ...]]] = {
    int: (Integral, ("a whole number",)),
    float: (Real, ("a number",)),
    bool: (bool, ("True", "False")),
    NoneType: (NoneType, ("None",)),
}
# "name: what it is" or, as torch writes it, "name (type, optional): what it is".
ENTRY = re.compile(r" {4}\*{0,2}(\w+)(?: \(.*\) ?)?:\s*(.*)")


@dataclass(frozen=True)
class Option:
    """One argument that may be left out.

    Attributes:
        name: of the argument.
        default: its value if left out.
        meaning: what the docstring says of it; empty if it says nothing.
        kinds: what it is annotated as; several where that is a union.
    """

    name: str
    default: str
    meaning: str
    kinds: tuple[Any, ...]


def options_of(made: Callable[..., Any], manual: object = None) -> list[Option]:
    """The arguments of a callable that have a default.

    Args:
        made: a class or function.
        manual: what has the docstring that describes them, where that is not `made` itself.
    """
    meanings = _meanings(inspect.getdoc(made if manual is None else manual) or "")
    parameters = inspect.signature(made).parameters
    return [
        Option(name, str(default), meanings.get(name, ""), _kinds(parameters[name].annotation))
        for name, default in defaults_of(made).items()
    ]


def defaults_of(made: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a callable that have a default, with it."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(made).parameters.items()
        if parameter.kind in NAMED and parameter.default is not inspect.Parameter.empty
    }


def plain(value: Any) -> Any:
    """A value of an option as JSON has it: what JSON has no form for by its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [plain(part) for part in value] if isinstance(value, list | tuple) else str(value)


def check_kinds(values: Mapping[str, Any], options: Iterable[Option]) -> None:
    """Refuse by name what is no number or no boolean, for options that take only such.

    Raises:
        ValueError: the value is of another kind.
    """
    for option in options:
        known = [KINDS[kind] for kind in option.kinds if kind in KINDS]
        if option.name not in values or len(known) < len(option.kinds):
            continue
        value = values[option.name]
        kinds = tuple(kind for kind, _ in known)
        # A boolean is a number to Python, though not to a person.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            *others, last = (word for _, words in known for word in words)
            wanted = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(f"`{option.name}` must be {wanted}, found {value!r}")


def with_truths(values: Mapping[str, Any], options: Iterable[Option]) -> dict[str, Any]:
    """The values with "yes", "off" and the like as booleans, for options that take one."""
    boolean = {
        option.name
        for option in options
        if bool in option.kinds or option.default in ("True", "False")
    }
    return {
        name: TRUTHS.get(value.lower(), value)
        if name in boolean and isinstance(value, str)
        else value
        for name, value in values.items()
    }


def with_dtypes(values: Mapping[str, Any], options: Iterable[Option]) -> dict[str, Any]:
    """The values with names such as "bfloat16" as torch's dtypes, for options that take one."""
    taking = {option.name for option in options if torch.dtype in option.kinds}
    return {
        name: _floating_dtype(value) if name in taking and isinstance(value, str) else value
        for name, value in values.items()
    }


def _kinds(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, UnionType)
    # A tensor, which torch's optimisers take for a number, is nothing that a person types.
    parts = (kind for kind in get_args(annotation) if kind is not torch.Tensor)
    return tuple(parts) if is_union else (annotation,)


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

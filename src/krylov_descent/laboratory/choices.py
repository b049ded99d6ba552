"""Names that a person types: an unknown one is answered with the nearest that exists."""

import difflib
from collections.abc import Iterable


class UnknownNameError(ValueError):
    """A problem, initialisation, option or data file that does not exist."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """The error for `name`, with the nearest of the `known` names and the list of all."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
    hint = f": did you mean {nearest[0]!r}?" if nearest else "."
    return UnknownNameError(f"Unknown {kind} {name!r}{hint} Known: {', '.join(names) or 'none'}.")

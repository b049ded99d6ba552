"""Names that a person types: an unknown one is answered with the nearest that exists."""

import difflib
from collections.abc import Iterable


class UnknownNameError(ValueError):
    """A problem, initialisation, option or data file that does not exist."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """The error for `name`, with the list of the `known` names, and the nearest if one is near."""
    names = sorted(known)
    typed = name.lower()
    nearest = difflib.get_close_matches(typed, names, n=1)
    # A beginning is near too, however much is left out.
    nearest = nearest or [known for known in names if typed and known.startswith(typed)]
    hint = f": did you mean {nearest[0]!r}?" if nearest else "."
    return UnknownNameError(f"Unknown {kind} {name!r}{hint} Known: {', '.join(names) or 'none'}.")

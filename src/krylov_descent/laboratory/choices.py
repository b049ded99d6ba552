"""Names and numbers that a person types: an unknown name is answered with the nearest one."""

import difflib
from collections.abc import Iterable

# A random generator takes no more.
SEED_BITS = 63


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


def check_seed(seed: int) -> None:
    """Refuse what no random generator takes.

    Raises:
        ValueError: it is negative or too large.
    """
    if not 0 <= seed < 2**SEED_BITS:
        raise ValueError(f"`seed` must be 0 or more and below 2**{SEED_BITS}, found {seed}")

"""The terminal: what went as asked is printed on one stream, what did not on the other."""

import codecs
import sys
import unicodedata
from io import TextIOWrapper

from rich.console import Console

# What a terminal shows in place of signs that it has no letters for.
PLAIN = {"×": "x", "–": "-", "—": "-", "−": "-", "…": "...", "≤": "<=", "≥": ">=", "·": "|"}
PLAIN |= {"λ": "lambda", "θ": "theta", "ρ": "rho", "Δ": "Laplacian "}

console, complaints = Console(), Console(stderr=True)


def _in_plain_letters(problem: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: signs as plain letters, and "?" where there are none."""
    if not isinstance(problem, UnicodeEncodeError):
        raise problem
    signs = problem.object[problem.start : problem.end]
    plain = (PLAIN.get(s) or unicodedata.normalize("NFKD", s)[0] for s in signs)
    return "".join(s if s.isascii() else "?" for s in plain), problem.end


codecs.register_error("plain letters", _in_plain_letters)


def speak_to_any_terminal() -> None:
    """Print what the terminal's encoding lacks in plain letters."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="plain letters")


def only_the_first_speaks(leads: bool) -> None:
    """Of several processes rank 0 prints; what goes wrong on another one it is told."""
    console.quiet = complaints.quiet = not leads


def say(line: str) -> None:
    """Print a line as it is, however long."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def complain(line: str) -> None:
    """Print a line about what did not go as asked, as it is."""
    complaints.print(line, highlight=False, markup=False, soft_wrap=True)

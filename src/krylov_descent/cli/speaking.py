"""The terminal: what went as asked is printed on one stream, what did not on the other."""

import codecs
import sys
import unicodedata
from io import TextIOWrapper

from rich.console import Console

# What a terminal shows in place of signs that it has no letters for.
PLAIN = {"×": "x", "–": "-", "—": "-", "−": "-", "…": "...", "≤": "<=", "≥": ">=", "·": "|"}
PLAIN |= {"∂": "d", "‖": "||", "√": "sqrt", "∇": "grad ", "Δ": "Laplacian "}

console, complaints = Console(), Console(stderr=True)


def _in_plain_letters(problem: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: signs as plain letters, and "?" where there are none."""
    if not isinstance(problem, UnicodeEncodeError):
        raise problem
    signs = problem.object[problem.start : problem.end]
    return "".join(PLAIN.get(sign) or _letters_of(sign) for sign in signs), problem.end


def _letters_of(sign: str) -> str:
    """Greek by name, fractions and accents by their parts."""
    name = unicodedata.name(sign, "")
    if name.startswith("GREEK SMALL LETTER "):
        return name.split()[3].lower()
    parts = unicodedata.normalize("NFKD", sign).replace("\u2044", "/")
    return "".join(part for part in parts if part.isascii()) or "?"


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

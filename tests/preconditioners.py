"""Preconditioners by name, for tests of a few steps."""

from krylov_descent import KroneckerFactors, Preconditioner


def at_once(name: str) -> str | Preconditioner:
    """One that KSD uses from its first step on."""
    return KroneckerFactors(after=0) if name == "kronecker" else name

"""All equations by name."""

from krylov_descent.laboratory.choices import unknown_name
from krylov_descent.laboratory.physics.closed_forms import CLOSED_FORMS
from krylov_descent.laboratory.physics.equation import Equation
from krylov_descent.laboratory.physics.spectral import SPECTRAL

EQUATIONS: dict[str, Equation] = {**CLOSED_FORMS, **SPECTRAL}


def equation_named(name: str) -> Equation:
    """The equation of a name; any other raises an error that lists all names."""
    if name not in EQUATIONS:
        raise unknown_name("equation", name, EQUATIONS)
    return EQUATIONS[name]

"""How a run is marked throughout the page: one colour and one dash pattern."""

# As many as page.css has. The numbers have no common factor, so that every pair comes once before
# one returns, and neighbours never differ in colour alone.
COLOURS, DASHES = 6, 5


def curve_style(index: int) -> str:
    """The classes that give the run of this index its colour and dash pattern."""
    return f"colour-{index % COLOURS} dash-{index % DASHES}"


def swatch(index: int) -> str:
    """A short piece of the run's curve, to stand before its name."""
    return (
        f'<svg class="swatch {curve_style(index)}" viewBox="0 0 28 8" aria-hidden="true">'
        '<path d="M0 4H28"/></svg>'
    )

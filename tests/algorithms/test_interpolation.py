"""The next step of a line search, against polynomials whose minima NumPy finds."""

import math

import numpy as np
import pytest
from numpy.polynomial import Polynomial

from krylov_descent.algorithms.interpolation import Point, middle, step_between, step_beyond


def at(polynomial: Polynomial, step: float) -> Point:
    return Point(step, float(polynomial(step)), float(polynomial.deriv()(step)))


def minimum_of(polynomial: Polynomial) -> float:
    """The real root of the derivative where it climbs."""
    roots = polynomial.deriv().roots()
    (found,) = (x.real for x in roots if polynomial.deriv(2)(x.real) > 0)
    return float(found)


@pytest.mark.parametrize("seed", range(20))
def test_the_minimum_of_a_cubic_is_found_from_two_points(seed: int) -> None:
    generator = np.random.default_rng(seed)
    # Its derivative is zero at `bottom`, and at a maximum further left.
    bottom, top = generator.uniform(1, 2), generator.uniform(-3, -1)
    cubic = 3 * (Polynomial([-bottom, 1]) * Polynomial([-top, 1])).integ()
    assert minimum_of(cubic) == pytest.approx(bottom)
    low, high = at(cubic, 0.2), at(cubic, bottom + 0.3)
    assert high.value < low.value
    assert step_between(low, high, 0.0) == pytest.approx(bottom)
    # From the same side, as far as the step may grow.
    assert step_beyond(at(cubic, 0.0), low, 0.0) == pytest.approx(min(bottom, 10 * 0.2))


def test_a_higher_end_is_met_by_a_parabola_through_the_values() -> None:
    """It has the left slope and both values; the right slope is left out."""
    low, high = Point(1.0, 2.0, -1.0), Point(3.0, 5.0, 1e6)
    parabola = Polynomial([2.0, -1.0, (5.0 - 2.0 + 1.0 * 2) / 2**2])  # around the low end
    assert parabola(2.0) == 5.0
    assert step_between(low, high, 0.0) == pytest.approx(1 + minimum_of(parabola))


def test_noisy_values_are_left_out() -> None:
    """The slopes -1 and 3 cross zero at a quarter of the way, whatever the values say."""
    for value in (-50.0, 0.0, 50.0):
        assert step_between(Point(0, 0, -1), Point(2, value, 3), 100.0) == pytest.approx(0.5)


def test_without_a_minimum_steps_grow_tenfold_and_brackets_are_halved_in_magnitude() -> None:
    line = Polynomial([0.0, -1.0])
    assert step_beyond(at(line, 0.0), at(line, 2.0), 0.0) == 20.0
    unknown = Point(1.0, math.nan, math.nan)
    assert step_between(Point(1e-4, 0.0, -1.0), unknown, 0.0) == pytest.approx(1e-2)
    assert middle(Point(0.0, 0.0, -1.0), unknown) == 0.1

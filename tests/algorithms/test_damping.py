"""The rule of Levenberg and Marquardt by hand."""

import math

import pytest

from krylov_descent.algorithms.damping import adapted_damping, reduction_ratio


@pytest.mark.parametrize(
    ("ratio", "factor"),
    [
        (-math.inf, 3 / 2),
        (-1.0, 3 / 2),
        (0.0, 3 / 2),
        (0.2499, 3 / 2),
        (0.25, 1.0),
        (0.5, 1.0),
        (0.75, 1.0),
        (0.7501, 2 / 3),
        (1.2, 2 / 3),
    ],
)
def test_damping_at_each_threshold(ratio: float, factor: float) -> None:
    assert adapted_damping(12.0, ratio) == pytest.approx(12.0 * factor, rel=1e-15)


def test_the_damping_of_the_reference_run_comes_out() -> None:
    # Martens' log on CURVES: λ0 = 45, the first ratios, and λ after them.
    damping = 45.0
    for ratio, after in [(0.82455, 30.0), (0.99706, 20.0), (1.0609, 13.3333), (1.0661, 8.8889)]:
        damping = adapted_damping(damping, ratio)
        assert damping == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "predicted", "ratio"),
    [
        (-2.0, -4.0, 0.5),
        (-6.0, -4.0, 1.5),
        (0.0, -4.0, 0.0),
        (1e-9, -4.0, -math.inf),
        (math.inf, -4.0, -math.inf),
        (math.nan, -4.0, -math.inf),
        (-1.0, 0.0, -math.inf),
        (-1.0, 2.0, -0.5),
    ],
)
def test_the_ratio(change: float, predicted: float, ratio: float) -> None:
    assert reduction_ratio(change, predicted) == ratio

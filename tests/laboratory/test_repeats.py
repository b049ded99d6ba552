import numpy as np
import pytest
from scipy import stats

from krylov_descent.laboratory.repeats import estimate


def test_the_interval_is_students() -> None:
    values = [0.05, 0.07, 0.04, 0.11, 0.05]
    found = estimate(values)
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert found.runs == 5
    assert found.half_width is not None
    assert found.mean - found.half_width == pytest.approx(low)
    assert found.mean + found.half_width == pytest.approx(high)


def test_it_holds_the_truth_as_often_as_it_says() -> None:
    samples = np.random.default_rng(0).normal(3.0, 2.0, (1_000, 10))
    held = 0
    for sample in samples:
        found = estimate(sample.tolist())
        assert found.half_width is not None
        held += abs(found.mean - 3.0) <= found.half_width
    assert 930 <= held <= 970


def test_a_single_value_has_no_interval_and_none_is_refused() -> None:
    assert estimate([0.3]).mean == 0.3
    assert estimate([0.3]).half_width is None
    with pytest.raises(ValueError, match="`values`"):
        estimate([])

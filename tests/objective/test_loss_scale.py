"""Lengths of vectors whose squares are out of range, and the scale that brings them into it."""

import math

import pytest
import torch

from krylov_descent.objective.loss_scale import LIMITS, fitting_scale, length

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float32, [1e-44, 1e-38, 1e-24, 1e-13, 1e-6, 1.0, 1e6, 1e13, 1e20, 1e37]),
        (torch.float64, [5e-324, 1e-300, 1e-200, 1e-90, 1.0, 1e90, 1e200, 1e304]),
        (torch.float16, [1e-7, 1.0, 6e4]),
        (torch.bfloat16, [1e-30, 1.0, 1e30]),
    ],
)
def test_a_length_is_right_at_any_scale(dtype: torch.dtype, sizes: list[float]) -> None:
    for size in sizes:
        vector = (size * torch.linspace(-1, 2, 1001, dtype=torch.float64)).to(dtype)
        exact = math.hypot(*vector.tolist())  # which scales by itself
        assert length(vector) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_length_is_that_of_torch_where_torch_is_right(dtype: torch.dtype) -> None:
    vector = torch.linspace(-1, 2, 1001, dtype=dtype)
    assert length(vector) == float(vector.norm())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_length_is_zero_or_not_finite_only_where_the_vector_is(dtype: torch.dtype) -> None:
    assert length(torch.zeros(3, dtype=dtype)) == 0
    assert length(torch.zeros(0, dtype=dtype)) == 0
    assert length(torch.tensor([1.0, math.inf], dtype=dtype)) == math.inf
    assert math.isnan(length(torch.tensor([1e-30, math.nan], dtype=dtype)))
    assert math.isnan(length(torch.tensor([math.inf, math.nan], dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ordinary_gradients_have_no_scale(dtype: torch.dtype) -> None:
    for norm in (1e-12, 1e-3, 1.0, 1e12):
        assert fitting_scale(1e30, norm, 1.0, dtype) == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_that_may_be_to_blame_is_given_up(dtype: torch.dtype) -> None:
    for value, norm in ((1.0, 0.0), (1.0, math.inf), (1.0, math.nan), (math.inf, 1.0)):
        assert fitting_scale(value, norm, 2.0**80, dtype) == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scaled_loss_stays_in_range(dtype: torch.dtype) -> None:
    _, most = LIMITS[dtype]
    for value in (-(2.0**20), 2.0**20.7):
        assert fitting_scale(value, 2.0**-most, 1.0, dtype) == 2.0 ** (most - 20)
        assert fitting_scale(value, 2.0**most, 1.0, dtype) == 2.0**-most


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scale_makes_the_norm_about_one(dtype: torch.dtype) -> None:
    within, most = LIMITS[dtype]
    for exponent in (within + 1, within + 12.3, most - 0.5):
        for norm in (2.0**exponent, 2.0**-exponent):
            scale = fitting_scale(1.0, norm, 1.0, dtype)
            assert 0.5 <= scale * norm <= 2
            assert math.frexp(math.sqrt(scale))[0] == 0.5  # a power of two, and so its root
            # Found at another scale, it is the same number, so that a resumed run agrees.
            assert fitting_scale(scale, norm * scale, scale, dtype) == scale
    assert fitting_scale(0.0, torch.finfo(dtype).tiny, 1.0, dtype) == 2.0**most
    assert fitting_scale(0.0, torch.finfo(dtype).max, 1.0, dtype) == 2.0**-most

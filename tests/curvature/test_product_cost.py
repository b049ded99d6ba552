"""What a product may hold, in what arithmetic it is right, and what becomes of compiled models."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from krylov_descent.curvature.products import Curvature, CurvatureKind
from krylov_descent.objective.objective import Objective
from tests.curvature_reference import DENSE, KINDS, assert_equals_dense, product_of
from tests.matrices import numbers
from tests.problems import Problem, make

# Memory and cost ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_are_rebuilt_where_they_do_not_fit(kind: CurvatureKind) -> None:
    problem = make("mlp", "cross-entropy")
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    problem.model.register_forward_hook(count)
    matrix = DENSE[kind](problem)
    kept = product_of(problem, kind, micro_batch=2)
    calls = 0
    assert kept.kept
    assert_equals_dense(kept, matrix, vectors=4)
    assert calls == 3  # one linearisation per micro-batch

    rebuilt = product_of(problem, kind, micro_batch=2, activation_memory=1)
    calls = 0
    assert not rebuilt.kept
    assert_equals_dense(rebuilt, matrix, vectors=4)
    assert calls == 4 * 5  # one per product and sample: no more than one fits


class LargestTensor(TorchDispatchMode):
    """How many numbers the largest tensor has that any operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_no_product_holds_a_number_per_sample_and_parameter(kind: CurvatureKind) -> None:
    samples, width = 200, 40
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    x = torch.randn(samples, width)
    objective = Objective(model, nn.CrossEntropyLoss())
    n = objective.parameters.numel
    product = Curvature(kind).at(objective, (x, torch.arange(samples) % width))
    with LargestTensor() as largest:
        product(torch.randn(n))
    assert largest.numbers <= max(n, samples * width)

    gradient_of_one = torch.func.grad(lambda weight, row: F.linear(row, weight).sum())
    with LargestTensor() as by_rows:
        torch.vmap(gradient_of_one, (None, 0))(torch.zeros(width, width), x)
    assert by_rows.numbers == samples * width * width  # the instrument sees such a tensor


# Arithmetic --------------------------------------------------------------------------------------


def float32_error(problem: Problem, kind: CurvatureKind, *, bfloat16: bool) -> float:
    """Of a product in float32 against the dense float64 matrix, relative."""
    matrix = DENSE[kind](problem)
    v = numbers(len(matrix))
    expected = matrix @ v
    problem.model.float()
    objective = Objective(problem.model, problem.loss)
    data = problem.inputs.float(), problem.case.targets
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16), objective.network.algebra():
        product = Curvature(kind).at(objective, data)
        found = product(v.float())
    assert found.dtype == torch.float32
    assert product.kept
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["mlp", "conv", "lstm", "attention", "transformer"])
def test_float32_products_are_near_float64(kind: CurvatureKind, model: str) -> None:
    assert float32_error(make(model, "cross-entropy"), kind, bfloat16=False) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["mlp", "conv", "attention"])
def test_bfloat16_products_are_near_float64(kind: CurvatureKind, model: str) -> None:
    error = float32_error(make(model, "cross-entropy"), kind, bfloat16=True)
    assert 1e-4 < error < 0.1  # the forward pass has three digits, the algebra all of them


# Compiled models ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within torch's compiler
@pytest.mark.parametrize("whole", [True, False], ids=["whole model", "a part of it"])
def test_compiled_model_is_unwrapped_for_products(whole: bool) -> None:
    problem = make("mlp", "cross-entropy")
    matrices = {kind: DENSE[kind](problem) for kind in KINDS}
    # As every backend but "eager" it has no double backward, and it needs no C++ compiler.
    compiled: Any = torch.compile(problem.model, backend="aot_eager")
    model = compiled if whole else nn.Sequential(compiled)
    objective = Objective(model, problem.loss)
    for kind, matrix in matrices.items():
        product = Curvature(kind).at(objective, problem.data)
        assert product.kept
        assert_equals_dense(product, matrix)
    # And it still is compiled for values.
    assert "Compiled" in type(model(problem.inputs).grad_fn).__name__

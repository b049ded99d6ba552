"""The floor's operations: against torch's own counter, and by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.flops import LinearStack, StepFlops
from benchmarks.workloads import autoencoder_workload
from krylov_descent import Objective
from krylov_descent.curvature.products import Curvature
from krylov_descent.laboratory.models import autoencoder

SAMPLES = 7


@pytest.fixture
def objective() -> Objective:
    return Objective(autoencoder((12, 8, 5, 3)), nn.BCEWithLogitsLoss(reduction="sum"))


@pytest.fixture
def images() -> Tensor:
    return torch.rand(SAMPLES, 12)


def counted(function: Callable[[], object]) -> int:
    """By torch, in a second call: the first one may look closer."""
    function()
    with FlopCounterMode(display=False) as counter:
        function()
    found: int = counter.get_total_flops()
    return found


def assert_no_more_than_needed(found: int, objective: Objective, per_sample: int) -> None:
    """The floor, and at most the sums of two vectors a bias, which may be matrix products, too."""
    biases = sum(p.numel() for p in objective.parameters.tensors if p.dim() == 1)
    assert SAMPLES * per_sample <= found <= SAMPLES * (per_sample + 2 * 2 * biases)


def test_torch_counts_the_same_for_a_plain_gradient() -> None:
    workload = autoencoder_workload(torch.device("cpu"), (12, 8, 5, 3), SAMPLES)
    flops = SAMPLES * LinearStack.of(workload.model).gradient
    assert counted(workload.gradient) == flops


def test_a_gradient_is_done_with_what_the_floor_counts(
    objective: Objective, images: Tensor
) -> None:
    found = counted(lambda: objective.value_and_gradient((images, images)))
    stack = LinearStack.of(objective.network.model)
    assert_no_more_than_needed(found, objective, stack.gradient)


def test_so_is_a_gradient_with_the_fisher_diagonal(objective: Objective, images: Tensor) -> None:
    found = counted(lambda: objective.value_gradient_and_squares((images, images)))
    stack = LinearStack.of(objective.network.model)
    assert_no_more_than_needed(found, objective, stack.gradient_with_squares)


def test_so_is_a_gauss_newton_product(objective: Objective, images: Tensor) -> None:
    product = Curvature("gauss-newton").at(objective, (images, images))
    vector = torch.randn(objective.parameters.numel)
    found = counted(lambda: product(vector))
    stack = LinearStack.of(objective.network.model)
    assert_no_more_than_needed(found, objective, stack.product)


def test_the_layers_are_found() -> None:
    assert LinearStack.of(autoencoder((12, 8, 3))).weights == (96, 24, 24, 96)


def test_other_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="stack of Linear"):
        LinearStack.of(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))


def test_a_step_by_hand() -> None:
    # 2-3-1: p = (6, 3), Σ = 9. Gradient 2·(27 − 6), squares 2·9, product 2·(36 − 12).
    tiny = LinearStack((6, 3))
    assert (tiny.gradient, tiny.gradient_with_squares, tiny.product) == (42, 60, 48)
    step = StepFlops.of(
        tiny,
        samples=100,
        curvature_samples=20,
        objective_samples=10,
        products=3,
        evaluations=4,
    )
    assert step.by_phase() == {"gradient": 6_000, "basis": 2_880, "search": 1_680}
    assert step.forward_by_phase() == {"gradient": 1_800, "basis": 0, "search": 720}


def test_a_product_on_the_mnist_autoencoder_is_about_1_26_gradients() -> None:
    stack = LinearStack.of(autoencoder((784, 1000, 500, 250, 30)))
    assert stack.product / stack.gradient == pytest.approx(1.266, abs=5e-4)

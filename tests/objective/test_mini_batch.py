"""The gradient of one mini-batch against dense references."""

import pytest
import torch
from torch import Tensor, nn

from krylov_descent.objective.batches import Batch
from krylov_descent.objective.mini_batch import MiniBatch, mini_batch_gradient
from krylov_descent.objective.network import Network
from krylov_descent.objective.objective import Objective
from tests import dense
from tests.problems import SAMPLES, make


def flat(gradients: list[Tensor | None]) -> Tensor:
    return torch.cat([g.reshape(-1) for g in gradients if g is not None])


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("loss", ["cross-entropy", "weighted-cross-entropy", "mean"])
@pytest.mark.parametrize("model", ["mlp", "frozen", "lstm", "tied"])
def test_gradient_and_loss_equal_the_dense_ones(
    model: str, loss: str, micro_batch: int | None
) -> None:
    problem = make(model, loss)
    network = Network(problem.model, problem.loss, None, None)
    found = mini_batch_gradient(network, Batch(*problem.data, SAMPLES), micro_batch)
    torch.testing.assert_close(
        flat(found.gradients), dense.gradient(problem), rtol=1e-10, atol=1e-13
    )
    assert found.loss_sum.dtype == found.normaliser.dtype == torch.float64
    assert float(found.normaliser) == pytest.approx(problem.case.normaliser, rel=1e-14)
    mean = float(found.loss_sum / found.normaliser)
    assert mean == pytest.approx(dense.value(problem), rel=1e-12)


def test_the_work_holds_as_many_samples_at_a_time_as_the_objective_may() -> None:
    seen = list[int]()

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            out: Tensor = super().forward(x)
            return out

    objective = Objective(Watched(4, 3), nn.MSELoss(), micro_batch=2)
    data = torch.randn(5, 4), torch.randn(5, 3)
    expected = objective.value_and_gradient(data)
    seen.clear()
    found = MiniBatch(objective, Batch(*data, 5), usual=True).run()
    assert seen == [2, 2, 1]
    assert float(found.loss_sum / found.normaliser) == pytest.approx(expected.value, rel=1e-6)
    torch.testing.assert_close(flat(found.gradients), expected.gradient)


def test_a_parameter_that_the_loss_does_not_depend_on_has_no_gradient() -> None:
    model = nn.Linear(4, 3)
    model.extra = nn.Parameter(torch.ones(2))
    batch = Batch(torch.randn(5, 4), torch.randn(5, 3), 5)
    for micro_batch in (None, 2):
        found = mini_batch_gradient(Network(model, nn.MSELoss(), None, None), batch, micro_batch)
        names = [name for name, _ in model.named_parameters()]
        nothing = [n for n, g in zip(names, found.gradients, strict=True) if g is None]
        assert nothing == ["extra"]


def test_a_loss_without_any_parameter_is_refused() -> None:
    class Detached(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out.detach()

    batch = Batch(torch.randn(5, 4), torch.randn(5, 3), 5)
    with pytest.raises(ValueError, match="does not depend on any trainable parameter"):
        mini_batch_gradient(Network(Detached(4, 3), nn.MSELoss(), None, None), batch)

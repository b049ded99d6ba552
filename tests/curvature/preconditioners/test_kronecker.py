"""D from Kronecker factors, against dense matrices in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import (
    Evaluation,
    KroneckerFactors,
    Objective,
)
from krylov_descent.curvature.preconditioners import layer_moments
from krylov_descent.curvature.preconditioners.preconditioner import InPlace
from krylov_descent.objective.batches import Batch
from krylov_descent.optimizers.ksd.preconditioner_schedule import (
    KRONECKER_DAMPING,
    make_preconditioner,
)
from krylov_descent.runtime.random_signs import signs_like
from tests import dense
from tests.problems import make


def learnt(
    model: nn.Module, loss: Any, data: tuple[Tensor, Tensor], epsilon: float = 1e-3, **options: Any
) -> KroneckerFactors:
    objective, found = Objective(model, loss, **options), KroneckerFactors(epsilon)
    found.update(objective, data)
    found.learn(objective, [Batch(*data, len(data[0]))])
    return found


def matrix_of(metric: KroneckerFactors, size: int) -> Tensor:
    """D as a dense matrix."""
    return torch.stack([metric.multiply(unit) for unit in torch.eye(size, dtype=torch.float64)])


def test_one_output_and_a_squared_error_give_the_gauss_newton_matrix_itself() -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(4, 1).double(), (torch.randn(9, 4).double(), torch.randn(9, 1).double())
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def loss_at(w: Tensor) -> Tensor:
        return (data[0] @ w[:4] + w[4] - data[1][:, 0]).square().mean()

    exact = torch.autograd.functional.hessian(
        loss_at, weights
    )  # no nonlinearity: it is the Gauss-Newton matrix
    D = matrix_of(learnt(model, nn.MSELoss(), data, 1e-14), 5)
    torch.testing.assert_close(D / D.norm(), exact / exact.norm(), rtol=1e-5, atol=1e-6)


def test_layers_have_the_damped_products_of_their_factors() -> None:
    """With everything by hand: x and δ from the chain rule, π and γ from their definitions."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 3).double(), nn.Linear(3, 2, bias=False).double()
    x, y = torch.randn(7, 4).double(), torch.randn(7, 2).double()
    epsilon, decay = 1e-2, 0.03
    groups = [{"params": [first.weight, first.bias, last.weight], "weight_decay": decay}]
    found = learnt(
        nn.Sequential(first, nn.Tanh(), last), nn.MSELoss(), (x, y), epsilon, params=groups
    )

    hidden = torch.tanh(first(x)).detach()
    # The mean over two outputs of a squared error has the second derivative 2/2 = 1.
    (delta,) = signs_like([y])
    ones = torch.ones(7, 1, dtype=torch.float64)
    rows = [
        (torch.cat([x, ones], 1), (delta @ last.weight.detach()) * (1 - hidden**2)),
        (hidden, delta),
    ]
    factors = [(a.t() @ a / 7, d.t() @ d / 7) for a, d in rows]
    scale = max(float(A.norm() * G.norm()) for A, G in factors)
    blocks = []
    gamma = (epsilon * scale + decay) ** 0.5
    for A, G in factors:
        pi = float((A.trace() / len(A)) / (G.trace() / len(G))) ** 0.5
        damped = G + gamma / pi * torch.eye(len(G)), A + gamma * pi * torch.eye(len(A))
        blocks.append(torch.kron(*damped) / scale)
    # The vector has W row by row and then b; the block has each row of W with its entry of b.
    order = [5 * o + i for o in range(3) for i in range(4)] + [5 * o + 4 for o in range(3)]
    expected = torch.block_diag(blocks[0][order][:, order], blocks[1])
    D = matrix_of(found, 21)
    torch.testing.assert_close(D, expected)
    vector = torch.randn(21, dtype=torch.float64)
    torch.testing.assert_close(found.solve(vector), torch.linalg.solve(expected, vector))


def test_a_layer_that_is_called_often_adds_up_its_calls() -> None:
    """Σ over calls of δδᵀ per sample, and the mean over calls of xxᵀ."""
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(2, 2).double()

        def forward(self, x: Tensor) -> Any:
            return self.cell(torch.tanh(self.cell(x)))

    model, x = Twice(), torch.randn(6, 2).double()
    y = torch.randn(6, 2).double()
    found = learnt(model, nn.MSELoss(reduction="sum"), (x, y), 1e-12)
    weight = model.cell.weight.detach()
    hidden = torch.tanh(model.cell(x)).detach()
    delta = 2**0.5 * signs_like([y])[0]
    before = (delta @ weight) * (1 - hidden**2)
    ones = torch.ones(12, 1, dtype=torch.float64)
    rows = torch.cat([torch.cat([x, hidden]), ones], 1)
    A, G = rows.t() @ rows / 12, (delta.t() @ delta + before.t() @ before) / 6
    order = [0, 1, 3, 4, 2, 5]
    expected = torch.kron(G, A)[order][:, order]
    D = matrix_of(found, 6)
    torch.testing.assert_close(D / D.norm(), expected / expected.norm(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "loss"), [("conv", "mse"), ("embedding", "cross-entropy")])
def test_everything_else_has_the_fisher_diagonal(name: str, loss: str) -> None:
    problem = make(name, loss)
    found = learnt(problem.model, problem.loss, problem.data, 1e-4)
    size = sum(p.numel() for p in problem.model.parameters())
    linear = sum(
        p.numel()
        for m in problem.model.modules()
        if isinstance(m, nn.Linear)
        for p in m.parameters()
    )
    D, rest = matrix_of(found, size), size - linear
    squares = dense.squares(problem)[:rest]
    diagonal = D.diagonal()[:rest]
    assert not D[:rest, rest:].any()
    torch.testing.assert_close(D[:rest, :rest], torch.diag(diagonal))
    largest = squares.argmax()
    expected = (squares * diagonal[largest] / squares[largest]).clamp(min=1e-4)
    torch.testing.assert_close(diagonal, expected)
    assert float(D[rest:, rest:].diagonal().min()) > 0


@pytest.mark.parametrize(("name", "needed"), [("mlp", False), ("conv", True)])
def test_squares_are_found_only_where_they_are_needed(
    name: str, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make(name, "mse")
    objective, asked = Objective(problem.model, problem.loss), list[Any]()
    squares = objective.value_gradient_and_squares

    def counted(data: Any) -> Evaluation:
        asked.append(data)
        return squares(data)

    monkeypatch.setattr(objective, "value_gradient_and_squares", counted)
    found = KroneckerFactors().update(objective, problem.data)
    assert bool(asked) is needed
    torch.testing.assert_close(found.gradient, dense.gradient(problem))
    assert found.squares.numel() == 0
    stream = iter([problem.data])  # of which nothing is known before the walk
    torch.testing.assert_close(
        KroneckerFactors().update(objective, stream).gradient, dense.gradient(problem)
    )
    assert len(asked) == needed + 1


def test_tied_weights_have_the_diagonal() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3, bias=False).double()

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)) @ self.linear.weight

    torch.manual_seed(0)
    x = torch.randn(5, 3).double()
    D = matrix_of(learnt(Tied(), nn.MSELoss(), (x, x)), 9)
    torch.testing.assert_close(D, torch.diag(D.diagonal()))


def test_a_layer_that_is_too_wide_has_the_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_moments, "LARGEST_FACTOR", 3)
    problem = make("mlp", "mse")  # 4 (and a bias) to 3 to 3
    D = matrix_of(learnt(problem.model, problem.loss, problem.data), 27)
    torch.testing.assert_close(D[:15, :15], torch.diag(D[:15, :15].diagonal()))
    assert float((D[15:, 15:] - torch.diag(D[15:, 15:].diagonal())).abs().max()) > 1e-3


def test_two_outputs_of_one_shape_do_not_cancel() -> None:
    torch.manual_seed(0)

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head = nn.Linear(3, 2).double(), nn.Linear(2, 2, bias=False).double()

        def forward(self, x: Tensor) -> list[Tensor]:
            hidden = self.trunk(x)
            return [self.head(hidden), -self.head(hidden)]

    def loss(z: list[Tensor], y: Tensor) -> Tensor:
        return ((z[0] - y) ** 2 + (z[1] - y) ** 2).sum(1)

    model, x, y = TwoHeads(), torch.randn(4000, 3).double(), torch.randn(4000, 2).double()
    G = learnt(model, loss, (x, y), 1e-12).tensors[2]
    exact = 4 * model.head.weight.t() @ model.head.weight  # 2 for each head
    torch.testing.assert_close(G / G.norm(), (exact / exact.norm()).detach(), rtol=0, atol=0.05)


def test_samples_that_are_ignored_do_not_decide_the_form() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(400, 3).double(), torch.randint(4, (400,))
    y[350:] = -100
    model = nn.Linear(3, 4).double()
    objective, found = Objective(model, nn.CrossEntropyLoss()), KroneckerFactors(1e-12)
    found.update(objective, (x, y))
    found.learn(objective, [Batch(x[350:], y[350:], 50), Batch(x[:350], y[:350], 350)])
    p = model(x[:350]).softmax(1).detach()
    exact = torch.diag(p.mean(0)) - p.t() @ p / 350
    G = found.tensors[2]
    torch.testing.assert_close(G / G.norm(), exact / exact.norm(), rtol=0, atol=0.1)


def test_a_dead_layer_is_damped_alone() -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(3, 2).double(), nn.Linear(2, 1).double()
    with torch.no_grad():
        last.weight.zero_()  # nothing comes back to the first
    model, x = nn.Sequential(first, nn.Tanh(), last), torch.randn(20, 3).double()
    found = learnt(model, nn.MSELoss(), (x, torch.randn(20, 1).double()), 1e-2)
    D = matrix_of(found, 11)
    assert D.isfinite().all()
    assert float(torch.linalg.eigvalsh(D).min()) > 0
    vector = torch.randn(11).double()
    torch.testing.assert_close(found.solve(found.multiply(vector)), vector)


def test_no_curvature_at_all() -> None:
    model, x = nn.Linear(3, 2).double(), torch.randn(20, 3).double()
    D = matrix_of(learnt(model, lambda z, y: z.sum(1), (x, x)), 8)
    assert D.isfinite().all()
    assert float(torch.linalg.eigvalsh(D).min()) > 0


def test_weight_decay_of_each_group_is_damping() -> None:
    problem = make("mlp", "mse")
    first, last = (list(problem.model[i].parameters()) for i in (0, 2))  # type: ignore[index]
    groups = [{"params": first, "weight_decay": 1e4}, {"params": last, "weight_decay": 0.0}]
    found = learnt(problem.model, problem.loss, problem.data, 1e-3, params=groups)
    plain = learnt(problem.model, problem.loss, problem.data, 1e-3)
    split = sum(p.numel() for p in first)
    D, without = matrix_of(found, 27), matrix_of(plain, 27)
    torch.testing.assert_close(D[split:, split:], without[split:, split:])
    own = D[:split, :split]
    assert float(torch.linalg.eigvalsh(own).min()) > 0.9e4 * float(without.norm()) * 1e-3


def test_it_follows_the_model_to_another_dtype() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 1))
    data = torch.randn(6, 1, 3), torch.randn(6, 1)
    found = learnt(model, nn.MSELoss(), data)
    model.double()
    data = data[0].double(), data[1].double()
    objective = Objective(model, nn.MSELoss())
    for _ in range(2):
        found.update(objective, data)
        found.learn(objective, [Batch(*data, 6)])
        assert {t.dtype for t in found.tensors} == {torch.float64}
    expected = learnt(model, nn.MSELoss(), data)
    for ours, theirs in zip(found.tensors, expected.tensors, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_in_float32_solving_undoes_multiplying() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 40), nn.Sigmoid(), nn.Linear(40, 60))
    x = torch.rand(300, 60) * torch.logspace(0, -4, 60)  # badly scaled inputs
    found = learnt(model, nn.MSELoss(), (x, x), 1e-5)
    vector = torch.randn(sum(p.numel() for p in model.parameters()))
    for there, back in ((found.solve, found.multiply), (found.multiply, found.solve)):
        assert float((back(there(vector)) - vector).norm() / vector.norm()) < 1e-3


def test_it_is_made_by_name_and_updated_in_place() -> None:
    found = make_preconditioner("kronecker", 1e-2)
    assert isinstance(found, KroneckerFactors)
    assert isinstance(found, InPlace)
    problem = make("mlp", "mse")
    objective = Objective(problem.model, problem.loss)
    inputs, targets = problem.data
    batches = [Batch(inputs, targets, len(inputs))]
    found.update(objective, problem.data)
    found.learn(objective, batches)
    places = [t.data_ptr() for t in found.tensors]
    before = [t.clone() for t in found.tensors]
    objective.parameters.assign(objective.parameters.copy() * 2)
    found.update(objective, problem.data)
    found.learn(objective, batches)
    assert [t.data_ptr() for t in found.tensors] == places
    assert not any(torch.equal(a, b) for a, b in zip(found.tensors[1:], before[1:], strict=True))
    reference = learnt(problem.model, problem.loss, problem.data, 1e-2 * KRONECKER_DAMPING)
    for ours, theirs in zip(found.tensors, reference.tensors, strict=True):
        torch.testing.assert_close(ours, theirs)

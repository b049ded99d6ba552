"""The recurrent nets beside torch's own, and their derivatives beside dense float64 ones."""

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from krylov_descent.curvature.products import Curvature, CurvatureKind
from krylov_descent.laboratory.choices import UnknownNameError
from krylov_descent.laboratory.recurrent import (
    Cell,
    LstmRecurrence,
    Recurrence,
    TanhRecurrence,
    initialize_recurrent,
    recurrent_network,
)
from krylov_descent.objective.objective import Objective

CELLS = get_args(Cell)


def sequences(n: int, steps: int, numbers: int, seed: int = 0) -> Tensor:
    """Random sequences with the 1 that stands for the bias."""
    x = torch.randn(n, steps, numbers, dtype=torch.float64, generator=generator(seed))
    return torch.cat([x, torch.ones(n, steps, 1, dtype=torch.float64)], 2)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(cell: Cell, inputs: int = 4, answers: int = 1) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return recurrent_network(cell, inputs, 3, 2, answers, dtype=torch.float64)


def recurrence(model: nn.Sequential) -> Recurrence:
    assert isinstance(model[0], Recurrence)
    return model[0]


@torch.no_grad()
def copy_into(theirs: nn.RNNBase, ours: Recurrence, order: list[int]) -> None:
    """Copy weights; `order` lists our gates in the order that torch has them in."""
    size = ours.units

    def gates(weight: Tensor) -> Tensor:
        return torch.cat([weight[size * gate : size * (gate + 1)] for gate in order])

    theirs.weight_ih_l0.copy_(gates(ours.inputs.weight[:, :-1]))  # type: ignore[operator]
    theirs.bias_ih_l0.copy_(gates(ours.inputs.weight[:, -1]))  # type: ignore[operator]
    theirs.weight_hh_l0.copy_(gates(ours.recurrent.weight))  # type: ignore[operator]
    theirs.bias_hh_l0.zero_()  # type: ignore[operator]


@pytest.mark.parametrize("answers", [1, 4])
@pytest.mark.parametrize("cell", CELLS)
def test_the_states_are_those_of_torch(cell: Cell, answers: int) -> None:
    theirs: nn.RNNBase
    ours: Recurrence
    if cell == "rnn":
        theirs, ours, order = nn.RNN(3, 5, batch_first=True), TanhRecurrence(4, 5, answers), [0]
    else:
        theirs, ours = nn.LSTM(3, 5, batch_first=True), LstmRecurrence(4, 5, answers)
        order = [0, 1, 3, 2]  # torch has i, f, g, o
    copy_into(theirs.double(), ours.double(), order)
    x = sequences(6, 9, 3)
    states = theirs(x[:, :, :-1])[0][:, -answers:]
    torch.testing.assert_close(ours(x), states[:, 0] if answers == 1 else states)


@pytest.mark.parametrize("answers", [1, 3])
@pytest.mark.parametrize("cell", CELLS)
def test_padding_changes_nothing(cell: Cell, answers: int) -> None:
    """Bit for bit, in outputs and gradients: a batch is as its sequences by themselves."""
    model = network(cell, answers=answers)
    x = sequences(5, 8, 3)
    padded = torch.cat([torch.zeros(5, 4, 4, dtype=torch.float64), x], 1)
    found = []
    for given in (x, padded):
        outputs = model(given)
        gradients = torch.autograd.grad(outputs.square().sum(), list(model.parameters()))
        found.append([outputs, *gradients])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
    assert torch.equal(found[0][0], found[1][0])


def flat_functions(model: nn.Module, x: Tensor, targets: Tensor, loss: Any) -> tuple[Any, ...]:
    """θ, outputs(θ) and per-sample losses(θ), as pure functions of one vector."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    point = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def outputs(vector: Tensor) -> Tensor:
        pieces = vector.split([shape.numel() for shape in shapes])
        given = {n: p.view(s) for n, p, s in zip(names, pieces, shapes, strict=True)}
        result: Tensor = torch.func.functional_call(model, given, (x,))
        return result

    def losses(vector: Tensor) -> Tensor:
        elements: Tensor = loss(outputs(vector), targets)
        return elements.reshape(len(x), -1).sum(1)

    return point, outputs, losses


def reverse_twice(function: Any) -> Any:
    return torch.func.jacrev(torch.func.grad(function))


CASES = [("rnn", 1), ("rnn", 3), ("lstm", 1), ("lstm", 3)]


def case(cell: Cell, answers: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A net with sequences of unequal lengths and classes to tell."""
    model = network(cell, answers=answers)
    x = sequences(7, 6, 3)
    x[2, :2] = 0
    x[5, :1] = 0
    shape = (7,) if answers == 1 else (7, answers)
    return model, x, torch.randint(2, shape, generator=generator(1))


@pytest.mark.parametrize(("cell", "answers"), CASES)
def test_squares_are_those_of_dense_per_sample_gradients(cell: Cell, answers: int) -> None:
    model, x, targets = case(cell, answers)
    point, _, losses = flat_functions(model, x, targets, nn.CrossEntropyLoss(reduction="none"))
    rows = torch.func.jacrev(losses)(point)
    objective = Objective(model, nn.CrossEntropyLoss(reduction="sum"))
    for _ in range(2):  # the second time with layers that are trusted
        found = objective.value_gradient_and_squares((x, targets))
        torch.testing.assert_close(found.squares, rows.square().mean(0), rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(found.gradient, rows.mean(0), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("kind", get_args(CurvatureKind))
@pytest.mark.parametrize(("cell", "answers"), CASES)
def test_products_are_those_of_dense_matrices(
    cell: Cell, answers: int, kind: CurvatureKind
) -> None:
    model, x, targets = case(cell, answers)
    criterion = nn.CrossEntropyLoss(reduction="none")
    point, outputs, losses = flat_functions(model, x, targets, criterion)
    if kind == "hessian":
        matrix = reverse_twice(lambda v: losses(v).mean())(point)
    elif kind == "fisher":
        rows = torch.func.jacrev(losses)(point)
        matrix = rows.T @ rows / len(x)
    else:
        z = outputs(point)
        inner = reverse_twice(lambda z: criterion(z, targets).sum())(z)
        jacobian = torch.func.jacrev(outputs)(point).reshape(z.numel(), -1)
        matrix = jacobian.T @ inner.reshape(z.numel(), -1) @ jacobian / len(x)
    objective = Objective(model, nn.CrossEntropyLoss(reduction="sum"))
    product = Curvature(kind).at(objective, (x, targets))
    for seed in range(2):
        v = torch.randn(len(point), dtype=torch.float64, generator=generator(seed))
        torch.testing.assert_close(product(v), matrix @ v, rtol=1e-9, atol=1e-12)
    assert product.kept


@pytest.mark.parametrize("cell", CELLS)
def test_the_nets_go_through_vmap(cell: Cell) -> None:
    model, x, _ = case(cell, 1)
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def one(values: dict[str, Tensor], row: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, values, (row[None],))
        return out.square().sum()

    rows = torch.vmap(torch.func.grad(one), in_dims=(None, 0))(parameters, x)
    for i in range(len(x)):
        alone = torch.autograd.grad(model(x[i : i + 1]).square().sum(), list(model.parameters()))
        for name, gradient in zip(parameters, alone, strict=True):
            torch.testing.assert_close(rows[name][i], gradient)


def test_the_starting_weights_are_those_of_martens_and_sutskever() -> None:
    model = recurrent_network("rnn", 30, 100, 20)
    initialize_recurrent(model, 3)
    inner = recurrence(model)
    recurrent, inputs = inner.recurrent.weight.detach(), inner.inputs.weight.detach()
    assert bool(recurrent.ne(0).sum(1).eq(15).all())
    assert float(recurrent[recurrent != 0].std()) == pytest.approx(1 / math.sqrt(15), rel=0.1)
    assert float(torch.linalg.eigvals(recurrent).abs().max()) == pytest.approx(1, abs=0.15)
    assert bool(inputs[:, :-1].ne(0).sum(1).eq(15).all())
    assert float(inputs[inputs != 0].std()) == pytest.approx(0.25, rel=0.1)
    assert not inputs[:, -1].any()
    head = model[1]
    assert isinstance(head, nn.Linear)
    assert bool(head.weight.ne(0).sum(1).eq(15).all())
    assert not head.bias.any()


def test_an_lstm_begins_by_remembering() -> None:
    model = recurrent_network("lstm", 4, 10, 2)
    initialize_recurrent(model, 0, forget_bias=3.0)
    biases = recurrence(model).inputs.weight[:, -1].view(4, 10)
    assert biases[1].eq(3).all()
    assert not biases[[0, 2, 3]].any()


@pytest.mark.parametrize("cell", CELLS)
def test_the_seed_decides_in_any_precision(cell: Cell) -> None:
    single, double = network(cell).float(), network(cell)
    for model in (single, double):
        initialize_recurrent(model, 5)
    for p, q in zip(single.parameters(), double.parameters(), strict=True):
        torch.testing.assert_close(p, q.float())
    other = network(cell)
    initialize_recurrent(other, 6)
    assert not torch.equal(recurrence(other).recurrent.weight, recurrence(double).recurrent.weight)


def test_an_unknown_cell_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Unknown cell 'lstn': did you mean 'lstm'"):
        recurrent_network("lstn", 4, 3, 2)  # type: ignore[arg-type]

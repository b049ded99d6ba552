"""The tasks as problems: sets, losses, metrics, and a short one solved."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent.laboratory.choices import UnknownNameError
from krylov_descent.laboratory.contenders import contender
from krylov_descent.laboratory.limits import Ending, Limits
from krylov_descent.laboratory.problems import PROBLEMS, load_problem
from krylov_descent.laboratory.problems.problem import Problem
from krylov_descent.laboratory.problems.sequence_answers import (
    wrong_bit,
    wrong_number,
    wrong_pattern,
)
from krylov_descent.laboratory.problems.sequences import SOLVED, TASKS
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.recurrent import Recurrence
from krylov_descent.laboratory.runs import load, prepare
from krylov_descent.laboratory.settings import RunSettings


def few(name: str, **options: Any) -> Problem:
    return load_problem(name, train=20, validation=10, test=10, length=20, units=6, **options)


def recurrence(problem: Problem, initialization: str | None = None) -> Recurrence:
    inner = problem.make_model(0, initialization)[0]
    assert isinstance(inner, Recurrence)
    return inner


@pytest.mark.parametrize("cell", ["rnn", "lstm"])
@pytest.mark.parametrize("name", TASKS)
def test_loss_metric_and_criterion_fit_the_net(name: str, cell: str) -> None:
    problem = few(name, cell=cell)
    inputs, targets = problem.train
    outputs = problem.make_model()(inputs)
    losses = problem.loss(outputs, targets)
    assert losses.shape == (len(inputs),)
    criterion = problem.criterion(outputs, targets)
    scale = len(inputs) if getattr(problem.criterion, "reduction", "") == "sum" else 1
    torch.testing.assert_close(criterion / scale, losses.mean())
    wrong = problem.metric.per_sample(outputs, targets)
    assert wrong.shape == (len(inputs),)
    assert set(wrong.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("name", TASKS)
def test_the_right_answers_are_right(name: str) -> None:
    problem = few(name)
    _, targets = problem.test
    right: Tensor
    if targets.is_floating_point():
        right = targets if name != "xor" else 20 * targets - 10
    else:
        classes = problem.make_model()(problem.test[0]).shape[1]
        right = 20 * nn.functional.one_hot(targets, classes).float()
        right = right.transpose(1, 2) if targets.dim() == 2 else right
    assert not problem.metric.per_sample(right, targets).any()
    assert float(problem.loss(right, targets).max()) < 1e-3


def test_the_metrics_by_hand() -> None:
    numbers = torch.tensor([[1.0], [0.5], [0.5]])
    assert wrong_number(torch.tensor([[1.03], [0.55], [0.47]]), numbers).tolist() == [0, 1, 0]
    assert wrong_bit(
        torch.tensor([[2.0], [-1.0], [3.0]]), torch.tensor([[1.0], [0.0], [0.0]])
    ).tolist() == [0, 0, 1]
    outputs = torch.zeros(2, 3, 2)
    outputs[:, 1, 0] = outputs[:, 2, 1] = 1.0  # says 1, 2 both times
    assert wrong_pattern(outputs, torch.tensor([[1, 2], [1, 0]])).tolist() == [0, 1]


def test_the_sets_are_different_sequences_of_the_same_kind() -> None:
    problem = load_problem("addition", train=30, validation=30, test=30, length=20)
    assert problem.validation is not None
    sets = [problem.train[0], problem.validation[0], problem.test[0]]
    assert len({float(inputs[:, :, 0].sum()) for inputs in sets}) == 3
    assert not torch.equal(problem.train[0], load_problem("addition", seed=1, train=30).train[0])


def test_five_bits_are_the_same_in_all_sets() -> None:
    problem = load_problem("memorization-5")
    assert problem.validation is not None
    for inputs, targets in (problem.train, problem.validation, problem.test):
        assert inputs.shape == (32, 110, 5)
        assert torch.equal(targets, problem.train[1])
    assert problem.paper is not None
    assert problem.paper.curvature_samples == 32


def test_the_defaults_are_the_published_sizes() -> None:
    problem = load_problem("xor", validation=0)
    assert problem.validation is None
    assert problem.train[0].shape == (40_000, 55, 3)
    assert recurrence(problem).units == 100
    assert problem.title == "Xor, length 50"
    assert TASKS["addition"].length == 100
    assert load_problem("xor", size="small").train[0].shape[1] == 22


def test_every_step_gets_new_sequences_of_the_same_kind() -> None:
    problem = few("temporal-order")
    assert problem.validation is not None
    first, second = problem.samples(0), problem.samples(1)
    sets = [problem.train, problem.validation, problem.test, first, second]
    assert len({inputs.numpy().tobytes() for inputs, _ in sets}) == len(sets)
    assert first[0].shape == second[0].shape == problem.train[0].shape
    assert torch.equal(first[0], few("temporal-order").samples(0)[0])
    assert not torch.equal(first[0], few("temporal-order", seed=1).samples(0)[0])


def test_new_sequences_go_where_the_problem_is_and_are_parted_like_it() -> None:
    problem = few("addition")
    inputs, targets = problem.to("cpu", torch.float64).part(1, 2).samples(3)
    assert inputs.dtype == targets.dtype == torch.float64
    assert torch.equal(inputs, problem.samples(3)[0][10:].double())
    assert torch.equal(targets, problem.samples(3)[1][10:].double())


def test_five_bits_are_never_drawn_anew() -> None:
    problem = load_problem("memorization-5")
    assert problem.samples(7) is problem.train


@pytest.mark.parametrize("cell", ["rnn", "lstm"])
def test_the_starting_weights_are_orthogonal(cell: str) -> None:
    problem = load_problem("memorization-5", cell=cell)
    inner = recurrence(problem)
    for own in inner.recurrent.weight.detach().double().split(inner.units):
        torch.testing.assert_close(
            own @ own.T, torch.eye(inner.units, dtype=torch.float64), rtol=0, atol=1e-5
        )
    if cell == "lstm":
        biases = inner.inputs.weight.detach()[:, -1].view(4, -1)
        assert float(biases[1].min()) == pytest.approx(math.log(100))


def test_the_other_starting_weights_have_a_name() -> None:
    problem = load_problem("memorization-5")
    theirs, own = recurrence(problem, "martens-sutskever"), recurrence(problem)
    assert bool(theirs.recurrent.weight.ne(0).sum(1).eq(15).all())
    ratio = theirs.inputs.weight.detach().std() / own.inputs.weight.detach().std()
    assert float(ratio) == pytest.approx(10, rel=0.3)
    with pytest.raises(UnknownNameError, match="did you mean 'orthogonal'"):
        problem.make_model(initialization="ortogonal")


def test_the_user_s_options_replace_those_that_suit_the_problem() -> None:
    problem = few("addition")
    model = problem.make_model()
    sizes = contender("ksd").make(problem, model, 0, {}).subset_sizes
    other = contender("ksd").make(problem, model, 0, {"subset_size": (0.5, 0.1)}).subset_sizes
    assert (sizes.curvature, sizes.objective) == (other.objective, other.curvature) == (0.1, 0.5)
    assert contender("sgd").make(problem, model, 0, {}).clip_norm == 1.0
    assert contender("sgd").make(problem, model, 0, {"clip_norm": None}).clip_norm is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 9}, "`length` must be a whole number from 10, found 9"),
        ({"length": 20.5}, "`length` must be a whole number or None, found 20.5"),
        ({"units": 0}, "`units` must be a whole number from 1, found 0"),
        ({"train": 0}, "`train` must be a whole number from 1, found 0"),
        ({"validation": -1}, "`validation` must be a whole number from 0, found -1"),
        ({"test": True}, "`test` must be a whole number or None, found True"),
        ({"cell": "gru"}, "Unknown cell 'gru'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_problem("addition", **options)


def test_every_task_is_listed_with_its_options() -> None:
    for name in TASKS:
        options = {option.name: option.meaning for option in PROBLEMS[name].options}
        assert {"length", "cell", "units", "train", "validation", "test"} <= set(options)
        assert all(options.values())


def test_ksd_solves_a_short_task(tmp_path: Path) -> None:
    settings = RunSettings(
        problem="memorization-5",
        problem_options={"length": 10, "units": 15},
        limits=Limits(iterations=30, target=SOLVED, early_stop=None),
    )
    folder = RunFolder(tmp_path / "run")
    training = prepare(settings, load(settings), folder)
    assert training.run() is Ending.SOLVED
    assert folder.rows()[0]["test"] > 0.9
    assert folder.rows()[-1]["test"] == 0.0

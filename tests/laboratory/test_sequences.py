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
from krylov_descent.laboratory.runs import RunSettings, load, prepare
from krylov_descent.laboratory.training import Ending, Limits


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
    assert problem.train[0].shape == (20_000, 55, 3)
    assert recurrence(problem).units == 100
    assert problem.title == "Xor, length 50"
    assert TASKS["addition"].length == 100
    assert load_problem("xor", size="small").train[0].shape[1] == 22


def test_the_starting_weights_have_a_spectral_radius_by_name() -> None:
    problem = load_problem("memorization-5")
    own = recurrence(problem).recurrent.weight.detach()
    assert float(torch.linalg.eigvals(own).abs().max()) == pytest.approx(1.1, rel=1e-4)
    theirs = recurrence(problem, "martens-sutskever")
    ratio = theirs.inputs.weight.detach().std() / recurrence(problem).inputs.weight.detach().std()
    assert float(ratio) == pytest.approx(10, rel=1e-4)
    lstm = recurrence(load_problem("memorization-5", cell="lstm")).inputs.weight.detach()
    assert float(lstm[:, -1].view(4, -1)[1].min()) == pytest.approx(math.log(100))
    with pytest.raises(UnknownNameError, match="did you mean 'recurrent'"):
        problem.make_model(initialization="recurent")


def test_the_user_s_options_replace_those_that_suit_the_problem() -> None:
    problem = few("addition")
    model = problem.make_model()
    assert "Identity" in type(contender("ksd").make(problem, model, 0, {}).preconditioner).__name__
    given = {"preconditioner": "fisher-diagonal"}
    other = contender("ksd").make(problem, model, 0, given).preconditioner
    assert "Fisher" in type(other).__name__
    assert contender("sgd").make(problem, model, 0, {}).clip_norm == 1.0
    assert contender("sgd").make(problem, model, 0, {"clip_norm": None}).clip_norm is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 9}, "`length` must be a whole number from 10, found 9"),
        ({"length": 20.5}, "`length` must be a whole number from 10, found 20.5"),
        ({"units": 0}, "`units` must be a whole number from 1, found 0"),
        ({"train": 0}, "`train` must be a whole number from 1, found 0"),
        ({"validation": -1}, "`validation` must be a whole number from 0, found -1"),
        ({"test": True}, "`test` must be a whole number from 1, found True"),
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
        optimizer_options={"preconditioner": "fisher-diagonal"},
        limits=Limits(iterations=30, target=SOLVED, early_stop=None),
    )
    folder = RunFolder(tmp_path / "run")
    training = prepare(settings, load(settings), folder)
    assert training.run() is Ending.SOLVED
    assert folder.rows()[0]["test"] > 0.9
    assert folder.rows()[-1]["test"] == 0.0

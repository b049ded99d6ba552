from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from krylov_descent.laboratory.contenders import CONTENDERS, competitor
from krylov_descent.laboratory.fitting import fit_yardstick
from krylov_descent.laboratory.limits import Ending
from krylov_descent.laboratory.problems.problem import (
    CLASSIFICATION_ERROR,
    Problem,
    Split,
    softmax_cross_entropy,
)
from krylov_descent.laboratory.record import RunFolder, RunFolderError
from krylov_descent.laboratory.settings import RunSettings
from krylov_descent.laboratory.yardsticks import YARDSTICKS, Candidate, Yardstick
from tests.laboratory.tiny import tiny_problem

NOT_ONE_CLASS = "'logistic-regression' is for classification with one class per sample, 'tiny' is"


def classes_of(inputs: Tensor) -> Split:
    """Three classes by the first input; the second repeats it, the others are noise."""
    return inputs, (inputs[:, 0] / 10).long()


@pytest.fixture
def problem() -> Problem:
    inputs = 30 * torch.rand(150, 5)
    inputs[:, 1] = inputs[:, 0]
    return replace(
        tiny_problem(),
        task="classification",
        train=classes_of(inputs[:90]),
        validation=classes_of(inputs[90:120]),
        test=classes_of(inputs[120:]),
        loss=softmax_cross_entropy,
        criterion=nn.CrossEntropyLoss(),
        metric=CLASSIFICATION_ERROR,
    )


def settings(name: str) -> RunSettings:
    return RunSettings(problem="tiny", optimizer=name)


@pytest.mark.parametrize("name", YARDSTICKS)
def test_it_learns_what_can_be_learnt_and_is_recorded_as_a_run(
    name: str, problem: Problem, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / name)
    assert fit_yardstick(settings(name), problem, folder) is Ending.FITTED
    assert folder.finished
    (row,) = folder.rows()
    outcome = folder.outcome()
    assert outcome is not None
    assert outcome["ending"] == "fitted"
    assert outcome["best"] == outcome["last"] == row
    assert row["test"] < 0.25  # guessing is wrong in two of three
    assert row["seconds"] > 0
    assert list(row["settings"]) in (["C"], ["max_iter"])
    assert folder.config()["optimizer"]["title"] == YARDSTICKS[name].title


@pytest.mark.parametrize("name", YARDSTICKS)
def test_labels_in_a_column_are_classes_too(name: str, problem: Problem) -> None:
    def in_a_column(split: Split) -> Split:
        return split[0], split[1][:, None].float()

    assert problem.validation is not None
    yardstick = YARDSTICKS[name]
    column = replace(
        problem,
        train=in_a_column(problem.train),
        validation=in_a_column(problem.validation),
        test=in_a_column(problem.test),
    )
    yardstick.check(column, {})
    assert yardstick.fit(column, seed=0) == yardstick.fit(problem, seed=0)


def always(answer: int) -> Candidate:
    return {"answer": answer}, lambda rows: np.full(len(rows), answer)


def scripted(*answers: int) -> Yardstick:
    """Candidate i always answers the i-th of these."""
    return Yardstick(
        name="scripted",
        title="Scripted",
        summary="As told.",
        candidates=lambda inputs, classes, seed: map(always, answers),
    )


def test_the_validation_part_chooses_and_the_first_of_equals_wins(problem: Problem) -> None:
    zeros = torch.zeros(30, dtype=torch.int64)
    inputs = problem.test[0]
    told = replace(problem, validation=(inputs, zeros + 1), test=(inputs, zeros + 2))
    fit = scripted(2, 1, 0).fit(told, seed=0)
    assert fit.settings == {"answer": 1}
    assert (fit.validation, fit.test) == (0.0, 1.0)
    assert fit.train == pytest.approx((problem.train[1] != 1).double().mean().item())
    assert scripted(2, 0).fit(told, seed=0).settings == {"answer": 2}


@pytest.mark.parametrize("name", YARDSTICKS)
def test_the_test_part_has_no_say(name: str, problem: Problem) -> None:
    first = YARDSTICKS[name].fit(problem, seed=0)
    other = replace(problem, test=(problem.test[0], problem.test[1].roll(1)))
    second = YARDSTICKS[name].fit(other, seed=0)
    assert second.settings == first.settings
    assert (second.train, second.validation) == (first.train, first.validation)
    assert second.test != first.test


def test_what_it_cannot_be_fitted_to_is_refused_before_anything_is_written(
    problem: Problem, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    asked = settings("logistic-regression")
    with pytest.raises(ValueError, match=NOT_ONE_CLASS):
        fit_yardstick(asked, tiny_problem(), folder)
    inputs, classes = problem.train
    several = replace(problem, train=(inputs, classes[:, None].repeat(1, 2)))
    with pytest.raises(ValueError, match=NOT_ONE_CLASS):
        fit_yardstick(asked, several, folder)
    with pytest.raises(ValueError, match="needs a validation part"):
        fit_yardstick(asked, replace(problem, validation=None), folder)
    with pytest.raises(ValueError, match="has no options, found C"):
        fit_yardstick(replace(asked, optimizer_options={"C": 1.0}), problem, folder)
    assert not folder.started


def test_an_unfinished_fit_begins_again_and_a_folder_is_not_overwritten(
    problem: Problem, tmp_path: Path
) -> None:
    asked, folder = settings("logistic-regression"), RunFolder(tmp_path / "run")
    fit_yardstick(asked, problem, folder)
    with pytest.raises(RunFolderError, match="holds a run already"):
        fit_yardstick(asked, problem, folder)
    (folder.path / "outcome.json").unlink()
    fit_yardstick(asked, problem, folder, resume=True)
    assert len(folder.rows()) == 1
    with pytest.raises(RunFolderError, match="was started with seed = 0, not 1"):
        fit_yardstick(replace(asked, seed=1), problem, folder, resume=True)


def test_yardsticks_stand_beside_the_contenders() -> None:
    assert not set(YARDSTICKS) & set(CONTENDERS)
    for name, yardstick in YARDSTICKS.items():
        assert competitor(name) is yardstick
        assert yardstick.summary.endswith(".")
        assert yardstick.name == name
    assert competitor("ksd") is CONTENDERS["ksd"]

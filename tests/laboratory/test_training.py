import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from krylov_descent import KSD
from krylov_descent.laboratory.checkpoint import CheckpointError
from krylov_descent.laboratory.limits import Ending, Limits
from krylov_descent.laboratory.problems.problem import images_twice
from krylov_descent.laboratory.record import Row, RunFolder
from krylov_descent.laboratory.training import Training
from krylov_descent.optimizers.result import StepResult
from tests.laboratory.tiny import Scripted, scripted_problem, tiny_problem

NO_LIMITS = Limits(early_stop=None)


def scripted(
    path: Path,
    numbers: Sequence[float | None],
    limits: Limits = NO_LIMITS,
    *,
    passes: float = 1.0,
    validation: bool = True,
    checkpoint_seconds: float = 0.0,
) -> Training:
    """A run whose error is 10 at first and then one number after the other."""
    problem = scripted_problem()
    problem = problem if validation else replace(problem, validation=None)
    model = problem.build(device="cpu", dtype=torch.float64)
    with torch.no_grad():
        next(model.parameters()).fill_(10.0)
    folder = RunFolder(path / "run")
    if not folder.started:
        folder.begin({})
    optimizer = Scripted(model, numbers, passes)
    return Training(
        problem, model, optimizer, folder, limits, checkpoint_seconds=checkpoint_seconds
    )


def weight(training: Training) -> float:
    return next(training.model.parameters()).item()


def test_each_step_gets_its_own_samples_also_after_a_pause(tmp_path: Path) -> None:
    """Where a problem draws them anew; the errors are those of its sets."""
    given: list[float] = []
    for limit in (2, 4):
        training = scripted(tmp_path, [5.0] * 4, replace(NO_LIMITS, iterations=limit))
        training.problem = replace(
            training.problem, fresh=lambda step: images_twice(torch.full((1, 1), 100.0 + step))
        )
        assert training.resume() == (limit == 4)
        training.run()
        assert isinstance(training.optimizer, Scripted)
        given += [float(inputs) for inputs, _ in training.optimizer.given]
    assert given == [100.0, 101.0, 102.0, 103.0]
    assert [row["train"] for row in training.folder.rows()] == [10.0, 5.0, 5.0, 5.0, 5.0]


# What is recorded -----------------------------------------------------------------------------


def test_each_iteration_is_a_row_and_the_start_is_one_too(tmp_path: Path) -> None:
    seen: list[tuple[Row, StepResult | None]] = []
    training = scripted(tmp_path, [4.0, 2.0], Limits(iterations=2), passes=1.5)
    training._on_row = lambda row, result: seen.append((row, result))
    assert training.run() is Ending.ITERATIONS
    rows = training.folder.rows()
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert [row["train"] for row in rows] == [10.0, 4.0, 2.0]
    assert [row["validation"] for row in rows] == [10.0, 4.0, 2.0]
    assert [row["test"] for row in rows] == [20.0, 8.0, 4.0]
    assert [row["passes"] for row in rows] == [0.0, 1.5, 3.0]
    assert rows[0]["seconds"] == 0.0 < rows[1]["seconds"] < rows[2]["seconds"]
    assert [row for row, _ in seen] == rows
    assert seen[0][1] is None
    assert seen[1][1] is not None


def test_the_errors_are_means_over_whole_splits_and_the_account_is_the_steps_own(
    tmp_path: Path,
) -> None:
    problem = tiny_problem()
    model = problem.make_model(1)
    folder = RunFolder(tmp_path)
    folder.begin({})
    results: list[StepResult] = []
    training = Training(
        problem,
        model,
        KSD(model, problem.criterion, dimension=3),
        folder,
        Limits(iterations=2),
        on_row=lambda row, result: results.append(result) if result else None,
    )
    training.run()
    row, result = folder.rows()[-1], results[-1]
    for name in ("train", "validation", "test"):
        images = getattr(problem, name)[0]
        error = (model(images).sigmoid() - images).double().square().sum(1).mean()
        assert row[name] == pytest.approx(error.item(), rel=1e-6)
    assert row["loss"] == result.loss
    assert row["rank"] == result.rank == 4
    assert row["ritz_values"] == list(result.ritz_values)
    assert row["evaluations"] == result.evaluations > 0
    assert row["phases"] == result.seconds
    assert row["status"] == "moved"


def test_errors_of_large_splits_are_gathered_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = scripted(tmp_path, [])
    inputs = torch.arange(17, dtype=torch.float64).view(17, 1)
    assert whole._error((inputs, inputs)) == 10 * 8
    monkeypatch.setattr("krylov_descent.laboratory.training.METRIC_BATCH", 5)
    assert whole._error((inputs, inputs)) == 10 * 8


# When it ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "ending", "iterations"),
    [
        (Limits(iterations=3, passes=100), Ending.ITERATIONS, 3),
        (Limits(passes=4.0), Ending.PASSES, 2),
        (Limits(passes=4.1), Ending.PASSES, 3),
        (Limits(seconds=0.0), Ending.SECONDS, 0),
        (Limits(iterations=3, passes=6.0), Ending.ITERATIONS, 3),  # both: the first of the two
        (Limits(target=7.0), Ending.SOLVED, 4),  # below it, not at it
        (Limits(target=7.5, iterations=3), Ending.SOLVED, 3),
        (Limits(target=1.0, iterations=3), Ending.ITERATIONS, 3),
    ],
)
def test_the_limits(tmp_path: Path, limits: Limits, ending: Ending, iterations: int) -> None:
    training = scripted(tmp_path, [9.0, 8.0, 7.0, 6.0, 5.0], limits, passes=2.0)
    assert training.run() is ending
    assert training.folder.rows()[-1]["iteration"] == iterations


def test_the_limit_on_seconds_counts_training_alone(tmp_path: Path) -> None:
    training = scripted(tmp_path, [1.0] * 10_000, Limits(seconds=0.01, early_stop=None))
    assert training.run() is Ending.SECONDS
    before, last = (row["seconds"] for row in training.folder.rows()[-2:])
    assert before < 0.01 <= last


# After 20 steps of one pass each, the lowest error of all counts against the lowest of the first 15
# passes: it must be more than 1% below.
@pytest.mark.parametrize(
    ("numbers", "stops"),
    [
        ([5.0] * 20, True),
        ([5.0] * 15 + [4.96] * 5, True),  # 0.8% lower
        ([5.0] * 15 + [4.94] + [6.0] * 4, False),  # 1.2% lower, if only for a while
        ([5.0] * 14 + [4.94] + [6.0] * 5, True),  # that was in pass 15, which is not the last part
        ([20.0 - i for i in range(20)], False),
        ([20.0 + i for i in range(20)], True),  # it never fell below the start
        ([0.0] * 20, True),  # there is nothing left to fall
        ([5.0] * 15 + [math.nan] * 5, True),
    ],
)
def test_early_stopping_by_hand(tmp_path: Path, numbers: list[float], stops: bool) -> None:
    limits = Limits(iterations=21, fewest_passes=20)
    training = scripted(tmp_path, [*numbers, 1.0], limits)
    assert training.run() is (Ending.EARLY_STOP if stops else Ending.ITERATIONS)
    assert training.folder.rows()[-1]["iteration"] == (20 if stops else 21)


def test_early_stopping_waits_for_the_fewest_passes(tmp_path: Path) -> None:
    training = scripted(tmp_path, [5.0] * 99, Limits(fewest_passes=7))
    assert training.run() is Ending.EARLY_STOP
    assert training.folder.rows()[-1]["iteration"] == 7


def test_nothing_validated_means_no_early_stop_and_no_target(tmp_path: Path) -> None:
    limits = Limits(iterations=40, target=6.0)
    training = scripted(tmp_path, [5.0] * 40, limits, validation=False)
    assert training.run() is Ending.ITERATIONS
    assert all(row["validation"] is None for row in training.folder.rows())


def test_an_optimiser_that_is_stuck_ends_the_run(tmp_path: Path) -> None:
    numbers = [5.0, None, None, 4.0, None, None, None, 3.0]
    training = scripted(tmp_path, numbers, Limits(refusals=3))
    assert training.run() is Ending.STUCK
    assert training.folder.rows()[-1]["iteration"] == 7
    assert training.folder.rows()[-1]["status"] == "no_decrease"


# What is kept ---------------------------------------------------------------------------------


def test_the_best_model_is_that_of_the_lowest_validation_error(tmp_path: Path) -> None:
    training = scripted(tmp_path, [4.0, 2.0, 3.0, 2.0, math.nan], Limits(iterations=5))
    training.run()
    assert math.isnan(weight(training))
    outcome = training.folder.outcome()
    assert outcome is not None
    assert outcome["best"]["iteration"] == 2  # the first of two equals
    assert outcome["last"]["iteration"] == 5
    assert outcome["ending"] == "iterations"
    assert outcome["sentence"] == Ending.ITERATIONS.value
    training.best_model()
    assert weight(training) == 2.0


def test_without_validation_the_best_model_is_the_last(tmp_path: Path) -> None:
    training = scripted(tmp_path, [2.0, 3.0], Limits(iterations=2), validation=False)
    training.run()
    training.best_model()
    assert weight(training) == 3.0
    outcome = training.folder.outcome()
    assert outcome is not None
    assert outcome["best"] == outcome["last"]


def test_the_best_model_survives_resuming(tmp_path: Path) -> None:
    numbers = [2.0, 3.0, 4.0]
    scripted(tmp_path, numbers, Limits(iterations=2)).run()
    training = scripted(tmp_path, numbers, Limits(iterations=3))
    assert training.resume()
    training.run()
    training.best_model()
    assert weight(training) == 2.0


# Going on -------------------------------------------------------------------------------------


def test_interrupted_it_ends_after_the_step_and_goes_on(tmp_path: Path) -> None:
    numbers = [4.0, None, 2.0, 1.0]
    training = scripted(tmp_path, numbers, Limits(iterations=4))
    training._on_row = lambda row, _: vars(training).update(interrupted=row["iteration"] == 2)
    assert training.run() is Ending.INTERRUPTED
    assert not training.folder.finished
    again = scripted(tmp_path, numbers, Limits(iterations=4))
    assert again.resume()
    assert weight(again) == 4.0
    assert again._refused == 1
    assert again.run() is Ending.ITERATIONS
    assert [row["train"] for row in again.folder.rows()] == [10.0, 4.0, 4.0, 2.0, 1.0]


def test_checkpoints_come_at_their_time_and_at_the_end(tmp_path: Path) -> None:
    kept: list[int] = []
    training = scripted(tmp_path, [4.0, 3.0, 2.0], Limits(iterations=3), checkpoint_seconds=60.0)
    training._on_row = lambda row, _: kept.append(
        torch.load(training.folder.checkpoint)["iteration"] if row["iteration"] else -1
    )
    training.run()
    assert kept == [-1, 0, 0, 0]
    assert torch.load(training.folder.checkpoint)["iteration"] == 3


def test_a_run_ended_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    training = scripted(tmp_path, [4.0], Limits(iterations=1))
    training._record(None, 0.0)  # and then it was killed
    again = scripted(tmp_path, [4.0], Limits(iterations=1))
    assert not again.resume()
    again.run()
    assert [row["train"] for row in again.folder.rows()] == [10.0, 4.0]


def test_a_lost_checkpoint_is_told_and_the_metrics_stay(tmp_path: Path) -> None:
    training = scripted(tmp_path, [4.0, 3.0], Limits(iterations=2))
    training.run()
    training.folder.checkpoint.unlink()
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        scripted(tmp_path, [4.0, 3.0]).resume()
    assert len(training.folder.rows()) == 3


@pytest.mark.parametrize(
    "state",
    [
        {"iteration": 1},
        {"iteration": 1, "model": {}, "optimizer": {}, "best": {}, "refused": 0},
        {
            "iteration": 1,
            "model": {"0.weight": torch.ones(2, 2)},
            "optimizer": {},
            "best": {},
            "refused": 0,
        },
    ],
)
def test_a_checkpoint_of_something_else_is_told(tmp_path: Path, state: dict[str, object]) -> None:
    training = scripted(tmp_path, [4.0, 3.0], Limits(iterations=2))
    training.run()
    torch.save(state, training.folder.checkpoint)
    with pytest.raises(CheckpointError, match="is not one of this network and optimiser"):
        scripted(tmp_path, [4.0, 3.0]).resume()
    assert len(training.folder.rows()) == 3

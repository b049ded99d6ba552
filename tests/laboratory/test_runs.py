import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from krylov_descent.laboratory.checkpoint import CheckpointError
from krylov_descent.laboratory.choices import UnknownNameError
from krylov_descent.laboratory.description import another_environment
from krylov_descent.laboratory.devices import find_device
from krylov_descent.laboratory.environment import commit, cpu_name
from krylov_descent.laboratory.limits import Ending, Limits
from krylov_descent.laboratory.record import Row, RunFolder, RunFolderError
from krylov_descent.laboratory.runs import check_same, load, prepare, settings_in
from krylov_descent.laboratory.settings import RunSettings
from tests.laboratory.tiny import tiny_problem

SETTINGS = RunSettings(
    problem="tiny",
    optimizer="ksd",
    optimizer_options={"dimension": 3, "subset_size": (0.5, 0.25)},
    seed=5,
    dtype="float64",
    limits=Limits(iterations=4),
)


def run(path: Path, settings: RunSettings = SETTINGS, **more: Any) -> RunFolder:
    folder = RunFolder(path)
    problem = tiny_problem().to("cpu", torch.float64)
    prepare(settings, problem, folder, **more).run()
    return folder


def numbers(folder: RunFolder) -> list[Row]:
    rows = folder.rows()
    clocks = ("seconds", "cpu_seconds", "phases")
    return [{k: v for k, v in row.items() if k not in clocks} for row in rows]


# The settings ---------------------------------------------------------------------------------


def test_the_configuration_is_complete_and_leads_back_to_the_settings(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    config = folder.config()
    assert settings_in(folder) == replace(SETTINGS, initialization="glorot")
    assert config["problem"]["title"] == "Tiny"
    assert config["problem"]["samples"] == {"train": 40, "validation": 16, "test": 16}
    assert config["problem"]["metric"] == {"name": "squared error per image", "unit": ""}
    assert config["optimizer"]["title"] == "KSD"
    settings = config["optimizer"]["settings"]
    assert (settings["dimension"], settings["subset_size"]) == (3, [0.5, 0.25])
    assert settings["curvature"] == "gauss-newton"
    assert (settings["bfgs_iterations"], settings["weight_decay"]) == ("auto", 1e-4)
    assert config["optimizer"]["options"] == {"dimension": 3, "subset_size": [0.5, 0.25]}
    found = config["environment"]
    assert (found["torch"], found["threads"]) == (torch.__version__, torch.get_num_threads())
    assert datetime.fromisoformat(found["date"]) <= datetime.now(UTC)
    assert found["commit"] == commit()
    assert found["cpu"] == cpu_name() != ""
    assert config["command"] == (
        "ksd train tiny --optimizer ksd --set dimension=3 --set 'subset_size=(0.5, 0.25)' "
        "--initialization glorot --seed 5 --device cpu --dtype float64 --iterations 4 "
        f"--folder {tmp_path / 'run'}"
    )


def test_a_command_has_only_what_was_asked_for() -> None:
    settings = RunSettings(problem="curves", limits=Limits(early_stop=None, iterations=2_000_000))
    assert settings.command(Path("a b")) == (
        "ksd train curves --optimizer ksd --seed 0 --device cpu --iterations 2000000 "
        "--no-early-stop --folder 'a b'"
    )


@pytest.mark.parametrize("missing", ["problem", "seed", "limits"])
def test_a_configuration_that_is_not_whole_is_told(tmp_path: Path, missing: str) -> None:
    folder = run(tmp_path / "run")
    config = folder.config()
    del config[missing]
    path = folder.path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{path} is damaged or of another.*{missing}"):
        settings_in(folder)


def test_problem_options_reach_the_problem() -> None:
    options = {"size": "small", "train": 30, "validation": 0, "test": 7, "code_size": 6}
    problem = load(RunSettings(problem="curves", problem_options=options, dtype="float64"))
    assert problem.train[0].shape == (30, 784)
    assert problem.train[0].dtype is torch.float64
    assert problem.validation is None
    assert len(problem.test[0]) == 7
    assert problem.title == "CURVES (re-created), small, 30 images"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problem": "curve"}, "Unknown problem 'curve': did you mean 'curves'"),
        ({"problem_options": {"trains": 3}}, "did you mean 'train'"),
        ({"problem_options": {"train": 0}}, "`train` must be at least 1"),
        ({"problem_options": {"train": "x"}}, "`train` must be a whole number or None, found 'x'"),
        ({"problem_options": {"code_size": 5.0}}, "`code_size` must be a whole number, found 5.0"),
        ({"problem_options": {"test": True}}, "`test` must be a whole number or None, found True"),
        ({"problem_options": {"size": "large"}}, "`size` must be 'small'"),
        ({"problem_options": {"folder": "x"}}, "'curves' cannot be made with"),
        ({"dtype": "float23"}, "Unknown dtype 'float23': did you mean 'float32'"),
        ({"device": "gpu"}, "`device` must be like 'cpu' or 'cuda:0', found 'gpu'"),
        ({"device": "cuda:99"}, "there is no 'cuda:99' here, torch sees .* use --device cpu"),
        ({"device": "meta"}, "there is no 'meta' here"),
    ],
)
def test_what_cannot_be_loaded_is_told(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(replace(RunSettings(problem="curves"), **change))


def test_the_cpu_is_there() -> None:
    assert find_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "kds"}, "did you mean 'ksd'"),
        ({"optimizer_options": {"dimensio": 3}}, "did you mean 'dimension'"),
        ({"optimizer_options": {"dimension": 0}}, "`dimension` must be at least 1"),
        ({"initialization": "gloro"}, "did you mean 'glorot'"),
        ({"dtype": "float16"}, "Unknown dtype 'float16'"),
    ],
)
def test_wrong_settings_are_told_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", replace(SETTINGS, **change))
    assert os.listdir(tmp_path) == []


# Going on -------------------------------------------------------------------------------------


def test_two_sittings_give_the_numbers_of_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    parts = run(tmp_path / "parts", replace(SETTINGS, limits=Limits(iterations=2)))
    run(parts.path, resume=True)
    assert numbers(parts) == numbers(whole)
    assert settings_in(parts) == settings_in(whole)


def test_a_finished_run_resumed_ends_as_it_was(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    before = numbers(folder), folder.outcome()
    run(folder.path, resume=True)
    assert (numbers(folder), folder.outcome()) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problem": "other"}, 'started with problem = "tiny", not "other"'),
        ({"problem_options": {"train": 3}}, r'problem_options = {}, not {"train": 3}'),
        ({"optimizer": "hf", "optimizer_options": {}}, 'optimizer = "ksd", not "hf"'),
        ({"optimizer_options": {"dimension": 3}}, r"optimizer_options = .*\[0.5, 0.25\]"),
        ({"seed": 6}, "seed = 5, not 6"),
        ({"initialization": "sparse"}, 'initialization = "glorot", not "sparse"'),
        ({"dtype": "float32"}, 'dtype = "float64", not "float32"'),
    ],
)
def test_another_configuration_is_refused_and_the_run_stays(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = run(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    with pytest.raises(RunFolderError, match=message) as caught:
        run(folder.path, replace(SETTINGS, **change), resume=True)
    assert "ask for the same settings, or choose another --folder" in str(caught.value)
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


def test_another_kind_of_device_is_refused_to_go_on_but_not_to_look(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    elsewhere = replace(SETTINGS, device="cuda:1")
    with pytest.raises(RunFolderError, match='device = "cpu", not "cuda"'):
        check_same(folder, elsewhere)
    check_same(folder, elsewhere, device=False)
    config = folder.config() | {"device": "cuda"}
    (folder.path / "config.json").write_text(json.dumps(config))
    check_same(folder, elsewhere)  # another of the same kind


def test_a_new_run_in_the_folder_of_another_is_refused_at_once(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    before = numbers(folder)
    with pytest.raises(RunFolderError, match="holds a run already"):
        run(folder.path, replace(SETTINGS, initialization="rbm"), on_pretraining=pytest.fail)
    assert numbers(folder) == before


def test_a_run_that_goes_on_elsewhere_keeps_both_environments(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", replace(SETTINGS, limits=Limits(iterations=1)))
    here = folder.config()["environment"]
    assert another_environment(folder, SETTINGS) is None
    run(folder.path, replace(SETTINGS, limits=Limits(iterations=2)), resume=True)
    assert folder.config()["environment"] == here  # with the date on which it was begun
    assert "earlier_environments" not in folder.config()

    there = here | {"torch": "1.0", "threads": 64}
    (folder.path / "config.json").write_text(json.dumps(folder.config() | {"environment": there}))
    said = another_environment(folder, SETTINGS)
    assert said is not None
    assert f"begun with torch 1.0 (now {here['torch']}), threads 64 (now {here['threads']})" in said
    run(folder.path, resume=True)
    config = folder.config()
    assert config["earlier_environments"] == [there | {"until_iteration": 2}]
    assert config["environment"] | {"date": 0} == here | {"date": 0}
    assert another_environment(folder, SETTINGS) is None


def test_a_truncated_checkpoint_is_told_and_nothing_else_is_lost(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    folder.checkpoint.write_bytes(folder.checkpoint.read_bytes()[:-100])
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt is damaged"):
        run(folder.path, resume=True)
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


def test_no_run_to_go_on_with_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a run folder"):
        run(tmp_path / "run", resume=True)
    assert os.listdir(tmp_path) == []


# Pretraining ----------------------------------------------------------------------------------


def test_pretraining_is_reported_and_not_done_again(tmp_path: Path) -> None:
    settings = replace(SETTINGS, initialization="rbm", limits=Limits(iterations=1))
    epochs: list[object] = []
    folder = run(tmp_path / "run", settings, on_pretraining=epochs.append)
    assert len(epochs) == 4  # two layers, two epochs each
    run(folder.path, replace(settings, limits=Limits(iterations=2)), resume=True)
    assert len(epochs) == 4
    whole = run(tmp_path / "whole", replace(settings, limits=Limits(iterations=2)))
    assert numbers(folder) == numbers(whole)
    assert numbers(whole)[0] != numbers(run(tmp_path / "other"))[0]


def test_a_run_killed_while_pretraining_begins_again(tmp_path: Path) -> None:
    settings = replace(SETTINGS, initialization="rbm")

    def kill(epoch: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", settings, on_pretraining=kill)
    folder = RunFolder(tmp_path / "run")
    assert folder.started
    run(folder.path, settings, resume=True)
    assert numbers(folder) == numbers(run(tmp_path / "whole", settings))


# TensorBoard ----------------------------------------------------------------------------------


def events(folder: RunFolder) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder.path / "events")).Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


def test_events_are_the_rows(tmp_path: Path) -> None:
    seen: list[Row] = []
    folder = run(tmp_path / "run", tensorboard=True, on_row=lambda row, _: seen.append(row))
    found = events(folder)
    assert [row["iteration"] for row in seen] == [0, 1, 2, 3, 4]
    for name in ("train", "validation", "test", "seconds", "passes", "loss", "rank"):
        rows = [row for row in seen if name in row]
        steps, values = zip(*found[name], strict=True)
        assert steps == tuple(row["iteration"] for row in rows)
        assert values == pytest.approx([row[name] for row in rows])
    assert len(found["loss"]) == len(found["train"]) - 1  # the start is no step


def test_a_resumed_run_has_each_event_once(tmp_path: Path) -> None:
    first = replace(SETTINGS, limits=Limits(iterations=3))
    folder = run(tmp_path / "run", first, tensorboard=True)
    state = torch.load(folder.checkpoint)
    # As if it had been killed after iteration 3, with its checkpoint at iteration 1.
    before = run(tmp_path / "other", replace(SETTINGS, limits=Limits(iterations=1)))
    folder.checkpoint.write_bytes(before.checkpoint.read_bytes())
    assert state["iteration"] == 3
    run(folder.path, tensorboard=True, resume=True)
    assert [step for step, _ in events(folder)["train"]] == [0, 1, 2, 3, 4]


def test_the_ending_is_returned(tmp_path: Path) -> None:
    problem = tiny_problem().to("cpu", torch.float64)
    assert prepare(SETTINGS, problem, RunFolder(tmp_path)).run() is Ending.ITERATIONS


def test_unknown_names_are_value_errors() -> None:
    assert issubclass(UnknownNameError, ValueError)  # which the command line tells in one sentence

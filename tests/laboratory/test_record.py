import json
import math
from pathlib import Path

import pytest

from krylov_descent.laboratory.checkpoint import CheckpointError
from krylov_descent.laboratory.limits import Ending
from krylov_descent.laboratory.record import RunFolder, RunFolderError

CONFIG = {"problem": {"name": "tiny"}, "limits": {"iterations": 3}}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with the rows of iterations 0 to 3."""
    folder = RunFolder(tmp_path / "deep" / "run")
    folder.begin(CONFIG)
    for iteration in range(4):
        folder.append({"iteration": iteration, "train": 0.1 * iteration})
    return folder


def iterations(folder: RunFolder) -> list[int]:
    return [row["iteration"] for row in folder.rows()]


def test_it_gives_back_what_was_written(folder: RunFolder) -> None:
    assert folder.started
    assert folder.config() == CONFIG
    assert folder.rows()[3] == {"iteration": 3, "train": 0.1 * 3}  # to the last bit
    assert folder.outcome() is None
    folder.finish({"ending": "iterations"})
    assert folder.outcome() == {"ending": "iterations"}
    names = sorted(path.name for path in folder.path.iterdir())
    assert names == ["config.json", "metrics.jsonl", "outcome.json"]


def test_an_empty_place_has_no_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not folder.started
    assert not folder.finished
    assert folder.rows() == []
    with pytest.raises(RunFolderError, match=r"is not a run folder: there is no config\.json"):
        folder.config()


def test_a_second_run_does_not_begin_over_the_first(folder: RunFolder) -> None:
    with pytest.raises(RunFolderError, match=f"holds a run already.*--resume {folder.path}"):
        folder.begin(CONFIG)
    assert iterations(folder) == [0, 1, 2, 3]


@pytest.mark.parametrize("ending", Ending)
def test_every_ending_but_an_interruption_finishes_the_run(
    folder: RunFolder, ending: Ending
) -> None:
    folder.finish({"ending": ending.name.lower()})
    assert folder.finished == (ending is not Ending.INTERRUPTED)
    folder.go_on(CONFIG)
    assert not folder.finished


def test_a_run_that_goes_on_has_not_ended_and_has_its_new_limits(folder: RunFolder) -> None:
    folder.finish({"ending": "iterations"})
    folder.go_on({**CONFIG, "limits": {"iterations": 9}})
    assert folder.outcome() is None
    assert folder.config()["limits"] == {"iterations": 9}
    assert iterations(folder) == [0, 1, 2, 3]


@pytest.mark.parametrize("rest", ['{"iteration": 4, "tra', "{", '{"iteration": 4}{', "\0"])
def test_a_line_cut_short_does_not_count(folder: RunFolder, rest: str) -> None:
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write(rest)
    assert iterations(folder) == [0, 1, 2, 3]
    assert len(folder.rewind(3)) == 4
    folder.append({"iteration": 4})
    assert iterations(folder) == [0, 1, 2, 3, 4]


def test_a_whole_line_without_its_end_counts(folder: RunFolder) -> None:
    metrics = folder.path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().rstrip("\n"))
    assert len(folder.rewind(3)) == 4
    folder.append({"iteration": 4})
    assert iterations(folder) == [0, 1, 2, 3, 4]


def test_rewinding_drops_what_came_later(folder: RunFolder) -> None:
    assert [row["iteration"] for row in folder.rewind(1)] == [0, 1]
    assert iterations(folder) == [0, 1]
    assert folder.rewind(-1) == []
    assert iterations(folder) == []


def test_metrics_that_end_before_the_checkpoint_are_told(folder: RunFolder) -> None:
    with pytest.raises(CheckpointError, match="has 4 whole lines, and the checkpoint at iter"):
        folder.rewind(4)
    assert iterations(folder) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["config.json", "outcome.json"])
def test_a_damaged_file_is_named(folder: RunFolder, name: str) -> None:
    folder.finish({"ending": "iterations"})
    (folder.path / name).write_text('{"ending": "ite')
    with pytest.raises(ValueError, match=f"{name} is damaged: it is not JSON"):
        _ = folder.config() and folder.finished


@pytest.mark.parametrize("content", ["[]", "3", '"config"', "null"])
def test_what_is_no_object_is_told(folder: RunFolder, content: str) -> None:
    (folder.path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json is damaged: it is not a JSON object"):
        folder.config()


def test_what_is_no_text_is_told(folder: RunFolder) -> None:
    for name, read in (("metrics.jsonl", folder.rows), ("config.json", folder.config)):
        path = folder.path / name
        path.write_bytes(path.read_bytes()[:5] + b"\xff\xfe")
        with pytest.raises(ValueError, match=f"{path} is damaged: it is not a text in UTF-8"):
            read()


def test_every_file_is_strict_json_and_gives_back_every_number(folder: RunFolder) -> None:
    odd = {"iteration": 4, "train": -math.inf, "ritz_values": [1.0, math.inf], "terms": {"a": 2.0}}
    folder.append(odd | {"test": math.nan})
    folder.go_on(CONFIG | {"options": {"damping": math.inf, "pair": (1, math.inf)}})
    folder.finish({"ending": "diverged", "last": odd})
    for row in (folder.rows()[4], folder.rewind(4)[4], folder.rows()[4]):
        assert math.isnan(row.pop("test"))
        assert row == odd
    assert folder.outcome() == {"ending": "diverged", "last": odd}
    assert folder.config()["options"] == {"damping": math.inf, "pair": [1, math.inf]}
    for path in folder.path.iterdir():
        for text in [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines():
            json.loads(text, parse_constant=pytest.fail)


def test_a_file_in_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunFolderError, match=f"the run folder {path} cannot be written: "):
            RunFolder(path).begin(CONFIG)


def test_metrics_that_cannot_be_written_are_told(folder: RunFolder) -> None:
    (folder.path / "metrics.jsonl").unlink()
    (folder.path / "metrics.jsonl").mkdir()
    with pytest.raises(RunFolderError, match=r"metrics.jsonl cannot be written, the last checkp"):
        folder.append({"iteration": 4})

from pathlib import Path

import matplotlib.image
import numpy as np

from krylov_descent.laboratory.figures import draw_convergence
from krylov_descent.laboratory.record import RunFolder
from tests.laboratory.example_runs import rows, write_run


def drawn(path: Path, runs: dict[str, RunFolder]) -> np.ndarray:
    draw_convergence(runs, path, title="Figure 2", error="training error")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    picture: np.ndarray = matplotlib.image.imread(path)
    return picture


def ink(picture: np.ndarray) -> int:
    return int((picture[..., :3].min(axis=2) < 0.9).sum())


def test_each_run_leaves_ink(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one")
    two = write_run(tmp_path / "two", metrics=rows(seconds=60.0, floor=2.0))
    picture = drawn(tmp_path / "deep" / "figure.png", {"KSD": one})
    assert picture.shape[0] > 500
    assert picture.shape[1] > 900
    assert ink(drawn(tmp_path / "both.png", {"KSD": one, "HF": two})) > ink(picture) > 5_000


def test_runs_that_are_missing_unstarted_or_unfinished_are_drawn_as_they_are(
    tmp_path: Path,
) -> None:
    runs = {
        "KSD": write_run(tmp_path / "one", ending=None),
        "HF": RunFolder(tmp_path / "nothing"),
        "L-BFGS": write_run(tmp_path / "start", metrics=rows()[:1], ending=None),
    }
    drawn(tmp_path / "figure.png", runs)


def test_nothing_at_all_is_a_figure_too(tmp_path: Path) -> None:
    drawn(tmp_path / "figure.png", {"KSD": RunFolder(tmp_path / "nothing")})


def test_an_error_of_zero_has_no_logarithm_and_is_left_out(tmp_path: Path) -> None:
    metrics = [row | {"train": 0.0} if row["iteration"] > 60 else row for row in rows()]
    drawn(tmp_path / "figure.png", {"KSD": write_run(tmp_path / "one", metrics=metrics)})

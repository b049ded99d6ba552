"""The examples run as a person runs them, and reach what they promise."""

import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from examples import demo

FOLDER = Path(demo.__file__).parent
SCRIPTS = ("classification", "autoencoder", "physics_informed")


def run(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_is_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 60


def test_the_classifier_tells_the_spirals_apart() -> None:
    assert run("classification")["accuracy"] > 0.98


def test_the_autoencoder_is_far_better_than_pca() -> None:
    found = run("autoencoder")
    assert found["error"] < 0.25 * found["pca_error"]


def test_the_physics_informed_net_solves_its_equation_and_adam_does_not() -> None:
    found = run("physics_informed")
    error = found["error"]
    assert error(found["net"]) < 1e-3
    assert error(found["net"]) < 0.1 * error(found["adam_net"])


def test_the_demo_trains_all_three_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = demo.main(1.0, tmp_path / "demo")
    printed = capsys.readouterr().out
    assert [run.name for run in runs] == ["KSD", "L-BFGS", "Adam"]
    for run in runs:
        assert run.seconds[-1] >= 1.0
        assert run.errors[0] == runs[0].errors[0]
        assert run.errors[-1] < 0.5 * run.errors[0]
        assert f"{run.errors[-1]:.3f}" in printed
    for name in ("loss.png", "reconstructions.png"):
        assert (tmp_path / "demo" / name).read_bytes().startswith(b"\x89PNG")
        assert name in printed

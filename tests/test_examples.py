"""The examples run as a person runs them, and reach what they promise."""

import runpy
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = ("classification", "autoencoder", "physics_informed", "burgers", "inverse")


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
    assert error(found["net"]) < 1e-5
    assert error(found["net"]) < 0.1 * error(found["adam_net"])


def test_burgers_shock_is_followed() -> None:
    assert run("burgers")["error"] < 2e-2


def test_the_conductivity_is_found() -> None:
    assert abs(run("inverse")["rod"].conductivity.item() - 0.3) < 0.01

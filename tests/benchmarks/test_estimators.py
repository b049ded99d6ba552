"""The estimators beside scikit-learn's own, in the benchmark."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import estimators
from benchmarks.environment import describe
from benchmarks.parts import Setting

CPU = torch.device("cpu")


@pytest.mark.parametrize("data", ["linnerud", "wine"])
def test_all_methods_have_the_same_objective(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick: dict[str, Any] = {
        "lbfgs": {"solver": "lbfgs", "max_iter": 1, "max_fun": 1},
        "ksd": {"max_iter": 5},
    }
    monkeypatch.setattr(estimators, "METHODS", quick)
    monkeypatch.setattr(estimators, "SEEDS", (0,))
    found = estimators.measure(data, Setting(device=CPU, repeats=1, folder=Path()))
    assert found["classes"] == (data == "wine")
    (lbfgs,), (ksd,) = found["runs"].values()
    assert ksd["loss"] < lbfgs["loss"]  # steps do more than an evaluation
    assert ksd["to_peer"] > 0
    table = estimators.table({data: {"environment": describe(CPU), **found}}, CPU)
    assert f"| {estimators.DATA[data]} | {found['samples']} | {lbfgs['loss']:.2g}, " in table
    assert table.count(f" {ksd['to_peer']:.2f} |\n") == 1


def test_all_data_come_with_scikit_learn() -> None:
    for name in estimators.names(CPU):
        X, y = estimators._load(name)
        assert len(X) == len(y)


def test_large_tables_leave_out_the_long_run() -> None:
    assert estimators._methods("digits") == list(estimators.METHODS)
    assert estimators._methods("friedman-large") == ["lbfgs", "ksd"]

"""Rates are tuned by epochs, and the laboratory has those that were found."""

import math
from typing import Any

import pytest
import torch

from benchmarks import tuning
from benchmarks.environment import describe
from benchmarks.pages import RESULTS
from benchmarks.parts import Setting
from benchmarks.records import read_all
from krylov_descent.laboratory.problems.tuned_rates import RATES

CPU = torch.device("cpu")


@pytest.mark.parametrize(("optimum", "tried"), [(0.002, 4), (0.03, 7), (0.0002, 7), (1e9, 10)])
def test_the_search_goes_on_until_the_best_is_between_two_others(
    optimum: float, tried: int
) -> None:
    errors = tuning.search(0.001, lambda rate: abs(math.log(rate / optimum)))
    assert list(errors) == sorted(errors)
    assert len(errors) == tried
    if tried < tuning.MOST_RATES:
        assert abs(math.log2(tuning.best(errors) / optimum)) <= 0.5
        assert min(errors) < tuning.best(errors) < max(errors)


def test_a_form_is_measured_and_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = {"size": "small", "train": 20, "validation": 10, "test": 10}
    form = tuning.Form(problem="curves", epochs=2, methods=("sgd",), options=options)
    monkeypatch.setattr(tuning, "FORMS", {"few": form})
    monkeypatch.setitem(tuning.FIRST_RATES, "sgd", 1e-6)
    monkeypatch.setattr(tuning, "MOST_RATES", 5)
    assert tuning.sections(CPU) == ["few-sgd"]
    setting = Setting(device=CPU, repeats=1, folder=tmp_path_factory.mktemp("results"))
    found = tuning.measure("few-sgd", setting)
    errors = [row["validation"] for row in found["errors"]]
    assert errors == sorted(errors, reverse=True)  # larger rates are better, so small are these
    assert found["best"] == found["errors"][-1]["rate"] == 1.6e-5
    row = tuning.table({"few-sgd": {"environment": describe(CPU), **found}}, CPU).splitlines()[2]
    assert row.startswith("| few | sgd | 2 | 1.6e-05 | 1e-06: ")


def test_the_laboratory_has_the_rates_that_were_found() -> None:
    found: dict[str, dict[str, Any]] = {}
    for record in read_all(RESULTS / "tuning-x86_64").values():
        found.setdefault(record["form"], {})[record["method"]] = (
            record["best"],
            len(record["errors"]),
            record["epochs"],
        )
    assert found == {
        form: {name: (rate.rate, rate.tried, rate.epochs) for name, rate in rates.items()}
        for form, rates in RATES.items()
    }
    assert {form: tuning.FORMS[form].epochs for form in found} == {
        form: epochs for form, rates in found.items() for _, _, epochs in rates.values()
    }

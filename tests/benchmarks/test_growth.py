"""A step's seconds and memory over its sizes, at tiny ones."""

import pytest
import torch

from benchmarks import growth, peak
from benchmarks.environment import describe
from benchmarks.parts import Setting

CPU = torch.device("cpu")


@pytest.mark.skipif(not peak.CLEAR.exists(), reason="peak memory on the CPU is read from /proc")
def test_a_point_is_measured_in_a_process_of_its_own() -> None:
    point = growth.Point(n=2_000_000, N=20, K=3, B=5, C=5)
    found = growth.measure_point(point, CPU, 2)
    assert found["parameters"] == 4 * (point.width**2 + point.width)
    assert point.width**2 == pytest.approx(500_000, rel=0.01)
    assert 0 < found["seconds"]["low"] <= found["seconds"]["high"]
    # The basis is K + 1 vectors, and all together at most K + 8 and a few activations.
    assert 4 <= found["bytes"] / (4 * point.n) < 3 + 8 + 2


def test_an_axis_is_walked_and_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = growth.Point(n=64, N=40, K=3, B=10, C=10)
    monkeypatch.setitem(growth.BASES, "cpu", base)
    monkeypatch.setitem(growth.AXES, "cpu", {"K": (2, 4), "N": (40,)})
    monkeypatch.setattr(growth, "measure_point", growth.steps_of)
    setting = Setting(device=CPU, repeats=1, folder=tmp_path_factory.mktemp("results"))
    found = growth.measure("K", setting)
    assert [row["K"] for row in found["rows"]] == [2, 4]
    assert all(row["N"] == 40 for row in found["rows"])
    lines = growth.table({"K": {"environment": describe(CPU), **found}}, CPU).splitlines()
    assert [line.split(" | ")[1] for line in lines[2:5]] == ["2", "4", "*not measured yet*"]

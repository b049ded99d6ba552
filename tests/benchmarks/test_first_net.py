"""The README's net beside other methods."""

from typing import Any

import pytest
import torch

from benchmarks import first_net
from benchmarks.physics.methods import METHODS

CPU = torch.device("cpu")


def test_the_readme_makes_a_net_and_terms() -> None:
    before = torch.get_default_dtype()
    net, terms = first_net.net_and_terms()
    assert torch.get_default_dtype() == before
    assert set(terms) == {"equation", "boundary"}
    assert next(net.parameters()).dtype == torch.float64
    assert 0.1 < first_net.error(net) < 10


@pytest.mark.parametrize("method", first_net.CHOSEN)
def test_a_method_trains_it(method: str) -> None:
    choice = METHODS[method].settings[0]
    curve = first_net.run(method, choice, CPU, 0.5)
    seconds, errors = zip(*curve, strict=True)
    assert list(seconds) == sorted(seconds)
    assert seconds[-1] >= 0.5
    assert errors[-1] != errors[0]


def test_the_table_has_the_last_step_before_a_mark() -> None:
    environment: dict[str, Any] = {
        "cpu": "a CPU",
        "device": "a CPU",
        "threads": 2,
        "versions": {"torch": "2.13"},
        "date": "2026-01-01",
    }
    curve = [[0.0, 1.0], [0.9, 0.5], [1.1, 0.01], [9.0, 1e-6]]
    sections = {
        "ksd": {"environment": environment, "setting": {}, "curve": curve},
        "adam": {"environment": environment, "setting": {"rate": 0.003}, "curve": curve[:2]},
    }
    found = first_net.table(sections, CPU)
    assert "| error after | KSD | Adam |" in found
    assert "| 1 s | 5e-01 | 5e-01 |" in found
    assert "| 10 s | 1e-06 | 5e-01 |" in found
    assert "the best of four rates, 0.003," in found

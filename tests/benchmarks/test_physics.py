"""The comparison on physics-informed nets: losses, runs and the table."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.environment import UnavailableError
from benchmarks.parts import Setting
from benchmarks.physics import PART, running
from benchmarks.physics.levenberg_marquardt import LevenbergMarquardt, jacobian_of
from benchmarks.physics.methods import METHODS, Method
from benchmarks.physics.objective import loss_of
from benchmarks.physics.tables import table
from benchmarks.records import write
from krylov_descent import KSD, Term
from krylov_descent.laboratory.physics.equations import EQUATIONS

CPU = torch.device("cpu")


def test_the_loss_of_all_methods_is_that_of_ksd() -> None:
    problem = EQUATIONS["wave"]
    net, terms = problem.make_net(0), problem.make_terms()
    expected = loss_of(net, terms).item()
    assert KSD(net, terms).step().loss == pytest.approx(expected, rel=1e-10)


def test_the_jacobian_of_levenberg_and_marquardt_is_autograds() -> None:
    problem = EQUATIONS["wave"]
    net, terms = problem.make_net(0), problem.make_terms()
    for term in terms.values():
        term.points = term.points[:3]
    found, residuals = jacobian_of(net, terms)
    assert float(residuals @ residuals) / 2 == pytest.approx(loss_of(net, terms).item())
    parameters, rows = list(net.parameters()), []
    for term in terms.values():
        for row in term.outputs(net, term.batch.inputs).flatten():
            gradient = torch.autograd.grad(
                row, parameters, retain_graph=True, materialize_grads=True
            )
            rows.append(torch.cat([g.flatten() for g in gradient]) * (2 * term.weight / 3) ** 0.5)
    torch.testing.assert_close(found, torch.stack(rows))


def test_levenberg_and_marquardt_solve_a_linear_problem_at_once() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1, dtype=torch.float64)
    net = torch.nn.Sequential(layer)
    points = torch.randn(20, 3, dtype=torch.float64)
    terms = {"fit": Term(lambda net, x: net(x) - x.sum(1, keepdim=True) - 2, points)}
    method = LevenbergMarquardt(net, terms)
    for _ in range(3):
        method.step()
    assert loss_of(net, terms).item() < 1e-20
    torch.testing.assert_close(layer.bias.detach(), torch.tensor([2.0], dtype=torch.float64))


def test_a_net_that_is_too_large_for_a_dense_matrix_is_left_out() -> None:
    with pytest.raises(UnavailableError, match="needs a matrix of 40000² numbers"):
        replace(METHODS["ssbfgs"], distribution=None).require(40_000)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_runs_until_the_last_mark(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        METHODS[method].require(257)
    except UnavailableError as missing:
        pytest.skip(str(missing))
    monkeypatch.setitem(running.MARKS, "cpu", (0.2, 0.6))
    setting = METHODS[method].settings[0] | ({"cg_max_iters": 5} if method == "nncg" else {})
    found = running.run(EQUATIONS["poisson-2d-small"], method, setting, 0, CPU)
    assert len(found["errors"]) == 2
    assert all(error is None or 0 < error < 100 for error in found["errors"])
    assert found["steps"] >= 1


def test_a_method_that_fails_keeps_what_it_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(net: Any, terms: Any, setting: Any) -> Any:
        def step(left: float) -> None:
            raise RuntimeError("not positive definite\nat row 3")

        return step

    monkeypatch.setitem(METHODS, "lm", Method("fails", fails))
    problem = EQUATIONS["poisson-2d-small"]
    found = running.run(problem, "lm", {}, 0, CPU)
    start = pytest.approx(problem.error(problem.make_net(0)), rel=0.01)
    assert found["errors"] == [start, start]
    assert found["failure"] == "not positive definite"


def test_the_first_seed_chooses_the_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Any] = []

    def pretend(problem: Any, method: str, choice: Any, seed: int, device: torch.device) -> Any:
        made.append((choice["rate"], seed))
        error = {1e-3: 0.5, 3e-3: None, 1e-2: 0.1, 3e-2: 0.7}[choice["rate"]]
        return {"setting": choice, "seed": seed, "steps": 1, "errors": [1.0, error]}

    monkeypatch.setattr(running, "run", pretend)
    setting = Setting(device=CPU, repeats=1, folder=tmp_path)
    with pytest.raises(UnavailableError, match=r"wave\.adam\.seed-0 chooses the setting"):
        PART.measure("wave.adam.seed-1", setting)
    found = PART.measure("wave.adam.seed-0", setting)
    assert found["setting"] == {"rate": 1e-2}
    assert found["errors"] == [1.0, 0.1]
    assert len(found["others"]) == 3
    write(tmp_path / "wave.adam.seed-0.json", found)
    PART.measure("wave.adam.seed-1", setting)
    assert made == [(1e-3, 0), (3e-3, 0), (1e-2, 0), (3e-2, 0), (1e-2, 1)]


def test_the_table_says_who_is_first() -> None:
    environment = {
        "cpu": "a CPU",
        "device": "a CPU",
        "threads": 2,
        "versions": {"torch": "2.13"},
        "date": "2026-01-01",
    }

    def section(*errors: float | None) -> Any:
        return {"environment": environment, "setting": {}, "errors": errors}

    found = table(
        {
            "wave.ksd.seed-0": section(0.1, 1e-4),
            "wave.ksd.seed-1": section(0.2, 1e-4),
            "wave.ksd.seed-2": section(0.1, None),
            "wave.lbfgs.seed-0": section(0.05, None),
            "reaction.ksd.seed-0": section(0.4, 0.2),
        },
        CPU,
    )
    assert "| wave | 1.0e-01 → 1.0e-04 | 5.0e-02 → – |" in found
    assert "after 10 s KSD is first on 0 of 1 and within a factor of 3 of the first on 1" in found
    assert "after 30 s KSD is first on 1 of 1" in found
    assert "(3 × seed 0, 1 × seed 1, 1 × seed 2)" in found
    assert len(PART.sections(CPU)) == 3 * 8 * len(METHODS)
    assert len(PART.sections(torch.device("cuda"))) == 3 * 15 * len(METHODS)

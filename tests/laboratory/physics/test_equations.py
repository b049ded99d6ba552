"""The solutions solve the equations, and the spectral ones agree with finer and with other ones."""

import numpy as np
import pytest
import torch

from krylov_descent import KSD
from krylov_descent.laboratory.physics.closed_forms import CLOSED_FORMS, burgers_solution
from krylov_descent.laboratory.physics.equations import EQUATIONS, equation_named
from krylov_descent.laboratory.physics.spectral import ALLEN_CAHN, KDV, SPECTRAL, Evolution


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_the_formula_meets_every_term(name: str) -> None:
    """The residuals of the solution, by autograd, beside those of a solution that is 1% larger."""
    problem = equation_named(name)
    for term_name, term in problem.make_terms().items():
        if name == "burgers" and term_name == "start":
            continue  # the formula divides by the time
        few = term.batch.spread(200)
        right, wrong = (
            term.losses(term.outputs(u, few.inputs), None, few.size).mean().item()
            for u in (problem.solution, lambda x: 1.01 * problem.solution(x) + 1e-3)
        )
        assert right < 1e-16 if name == "burgers" else right < 1e-22
        assert right <= wrong


@pytest.mark.parametrize(("name", "count"), [
    ("poisson-2d-small", 257),
    ("poisson-2d-medium", 9873),
    ("poisson-2d-large", 116_097),
    ("poisson-5d", 10_065),
    ("convection-30", 5301),
    ("burgers", 3021),
])  # fmt: skip
def test_nets_have_the_published_sizes(name: str, count: int) -> None:
    assert sum(p.numel() for p in equation_named(name).make_net(0).parameters()) == count


def test_fifteen_problems_have_nets_terms_and_errors() -> None:
    assert len(EQUATIONS) == 15
    for problem in EQUATIONS.values():
        net = problem.make_net(0)
        assert 0.1 < problem.error(net) < 10
        assert problem.error(problem.solution) < 1e-12
        terms = problem.make_terms()
        assert "equation" in terms
        again = problem.make_terms()
        for name, term in terms.items():
            for a, b in zip(*(t.batch.inputs if isinstance(t.batch.inputs, tuple) else [
                t.batch.inputs
            ] for t in (term, again[name])), strict=True):  # fmt: skip
                assert torch.equal(a, b)
    with pytest.raises(ValueError, match="allen-cahn"):
        equation_named("alen-cahn")


@pytest.mark.parametrize(("name", "evolution"), [("allen-cahn", ALLEN_CAHN), ("kdv", KDV)])
def test_a_spectral_solution_is_that_of_a_finer_grid(name: str, evolution: Evolution) -> None:
    coarse = evolution.solve(evolution.modes // 2, evolution.steps // 2, 100)
    fine = evolution.solve(evolution.modes, evolution.steps, 100)[:, ::2]
    error = np.linalg.norm(coarse - fine) / np.linalg.norm(fine)
    # Halving the modes makes the error of Allen-Cahn four times, and that of KdV much larger.
    assert error < {"allen-cahn": 3e-7, "kdv": 1e-6}[name]


def test_the_spectral_method_agrees_with_cole_and_hopf() -> None:
    viscosity = 0.05 / np.pi
    burgers = Evolution(
        start=lambda x: -np.sin(np.pi * x),
        linear=lambda k: (-viscosity * k**2).astype(np.complex128),
        nonlinear=lambda u, k: -0.5j * k * np.fft.rfft(u**2),
    )
    found = burgers.solve(512, 100, 10)
    x = torch.linspace(-1, 1, 513, dtype=torch.float64)[:-1]
    for row in (1, 5, 10):
        points = torch.stack([x, torch.full_like(x, row / 10)], 1)
        exact = burgers_solution(points, viscosity)[:, 0].numpy()
        assert np.abs(found[row] - exact).max() < 1e-9


def test_kdv_keeps_its_integrals() -> None:
    found = KDV.solve(512, 1000, 10)
    assert np.abs(found.mean(1)).max() < 1e-12
    energy = (found**2).mean(1)
    assert np.abs(energy / energy[0] - 1).max() < 1e-8


@pytest.mark.parametrize("name", SPECTRAL)
def test_the_equations_of_the_net_are_those_of_the_grid(name: str) -> None:
    """Fit a net to nothing: the residual of a plane wave, against derivatives by hand."""
    problem = SPECTRAL[name]
    points = torch.rand(50, 2, dtype=torch.float64).requires_grad_()

    def wave(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(2 * x[:, :1] + 3 * x[:, 1:])

    phase = (2 * points[:, 0] + 3 * points[:, 1]).detach()
    s, c = phase.sin(), phase.cos()
    by_hand = {
        "allen-cahn": 3 * c + 4e-4 * s - 5 * (s - s**3),
        "kdv": 3 * c + 2 * s * c - 0.022**2 * 8 * c,
    }[name]
    found = problem.make_terms()["equation"].outputs(wave, points)
    torch.testing.assert_close(found.detach(), by_hand, rtol=1e-10, atol=1e-12)


def test_a_problem_is_trained() -> None:
    problem = equation_named("poisson-2d-small")
    net = problem.make_net(0)
    optimizer = KSD(net, problem.make_terms())
    before = problem.error(net)
    for _ in range(8):
        optimizer.step()
    assert problem.error(net) < 0.3 * before


def test_the_conditions_on_a_circle_leave_no_gap() -> None:
    """Any moving wave satisfies the equation, so in a gap nothing would determine it."""
    terms = EQUATIONS["convection-40"].make_terms()
    left, right = terms["periodic"].points
    for points in (terms["start"].points[:, 0] / (2 * torch.pi), left[:, 1]):
        assert float(points.min()) == 0.0
        assert float(points.max()) == pytest.approx(1.0)
        distances = points.diff()
        assert float(distances.max()) == pytest.approx(float(distances.min()))
    assert torch.equal(left[:, 1], right[:, 1])
    assert left[:, 0].eq(0).all()
    torch.testing.assert_close(right[:, 0], torch.full_like(right[:, 0], 2 * torch.pi))

"""Equations as problems: their nets, errors, runs and pictures."""

from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch

from krylov_descent.laboratory.contenders import CONTENDERS, PAPER
from krylov_descent.laboratory.devices import precision_of
from krylov_descent.laboratory.gallery import has_picture, pictures
from krylov_descent.laboratory.limits import Limits
from krylov_descent.laboratory.physics.equation import PICTURE
from krylov_descent.laboratory.physics.equations import EQUATIONS
from krylov_descent.laboratory.problems import PROBLEMS, load_problem
from krylov_descent.laboratory.record import Row, RunFolder
from krylov_descent.laboratory.report import Field, write_report
from krylov_descent.laboratory.report.fields import BOTH_SIGNS, FROM_ZERO, field_figure
from krylov_descent.laboratory.report.pictures import png
from krylov_descent.laboratory.runs import load, prepare
from krylov_descent.laboratory.settings import RunSettings

SMALL = "poisson-2d-small"


def run(path: Path, steps: int = 3, **more: Any) -> RunFolder:
    settings = RunSettings(problem=SMALL, seed=2, limits=Limits(iterations=steps))
    folder = RunFolder(path)
    prepare(settings, load(settings), folder, **more).run()
    return folder


def numbers(folder: RunFolder) -> list[Row]:
    rows = folder.rows()
    clocks = ("seconds", "cpu_seconds", "phases")
    return [{k: v for k, v in row.items() if k not in clocks} for row in rows]


@pytest.mark.parametrize("name", ["poisson-5d", "heat-1d", "burgers", "kdv"])
def test_a_problem_has_the_net_and_the_errors_of_its_equation(name: str, tmp_path: Path) -> None:
    equation, problem = EQUATIONS[name], load_problem(name)
    model = problem.make_model(seed=4, dtype=torch.float64)
    for ours, its in zip(model.parameters(), equation.make_net(4).parameters(), strict=True):
        assert torch.equal(ours, its)
    settings = RunSettings(problem=name, seed=4, limits=Limits(iterations=0))
    training = prepare(settings, load(settings), RunFolder(tmp_path / "run"))
    training.run()
    (start,) = training.folder.rows()
    points = equation.test_points()
    assert len(problem.test[0]) + len(problem.validation[0] if problem.validation else []) == len(
        points
    )
    both = (start["test"] ** 2 + start["validation"] ** 2) / 2
    assert both**0.5 == pytest.approx(equation.error(model), rel=1e-3)


def test_every_equation_is_a_problem_in_float64() -> None:
    for name in EQUATIONS:
        assert PROBLEMS[name].dtype == "float64"
        assert precision_of(RunSettings(problem=name)) is torch.float64
    assert precision_of(RunSettings(problem="curves")) is torch.float32


def test_a_run_records_its_terms_and_goes_on_exactly(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 4)
    assert whole.config()["dtype"] == "float64"
    assert [set(row["terms"]) for row in whole.rows()[1:]] == [{"equation", "boundary"}] * 4
    parts = run(tmp_path / "parts", 2)
    settings = RunSettings(problem=SMALL, seed=2, limits=Limits(iterations=4))
    prepare(settings, load(settings), parts, resume=True).run()
    assert numbers(parts) == numbers(whole)


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name != PAPER])
def test_every_optimiser_trains_an_equation(name: str) -> None:
    problem = load_problem(SMALL)
    model = problem.make_model(dtype=torch.float64)
    optimizer = CONTENDERS[name].make(problem, model, 0, {})
    first = optimizer.step()
    for _ in range(2):
        last = optimizer.step()
    assert last.loss < first.loss


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float32"}, r"`dtype`: poisson-2d-small is trained in torch\.float64"),
        ({"problem_options": {"size": "small"}}, "one size and one set of points: leave out --sma"),
        ({"problem_options": {"seed": 3}}, "leave out the seed of the problem"),
    ],
)
def test_what_an_equation_does_not_have_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(RunSettings(problem=SMALL, **settings))


def test_the_picture_of_a_run_shows_the_solution_and_the_net(tmp_path: Path) -> None:
    folder, problem = run(tmp_path / "run"), load_problem(SMALL)
    assert has_picture(folder)
    (found,) = pictures(problem, [folder]).values()
    assert isinstance(found, Field)
    assert found.plane == "x to the right, y upwards"
    points = EQUATIONS[SMALL].plane().view(*PICTURE, 2)
    assert points[0, 0].tolist() == [0.0, 0.0]
    assert points[-1, 0].tolist() == [0.0, 1.0]
    exact = torch.sin(torch.pi * points).prod(-1)
    torch.testing.assert_close(found.solution, exact)
    best = min(row["validation"] for row in folder.rows())
    off = (found.outputs - exact).norm() / exact.norm()
    assert float(off) == pytest.approx(best, rel=0.2)
    page = tmp_path / "report.html"
    write_report([folder], page, pictures={folder.path: found})
    text = page.read_text()
    assert "Solution</h2>" in text
    assert text.count('<img src="data:image/png;base64,') == 3
    assert "The mean of each term over its points" in text


def test_a_plane_of_many_dimensions_lies_in_the_middle_of_the_others() -> None:
    points = EQUATIONS["heat-4d"].plane()
    assert points[:, 1:4].eq(0.5).all()
    assert points[:, -1].min() == 0.0
    assert points[:, -1].max() == 1.0


def test_a_solution_on_a_grid_has_the_points_of_its_picture() -> None:
    equation = EQUATIONS["kdv"]
    start = equation.plane()[: PICTURE[1]]
    torch.testing.assert_close(equation.solution(start), torch.cos(torch.pi * start[:, :1]))


def test_colours_go_from_the_lowest_to_the_highest_and_up_the_picture() -> None:
    solution = torch.tensor([[-2.0, 0.0], [1.0, 2.0]])
    figure = field_figure(
        [("colour-0 dash-0", "KSD", Field(solution, solution + torch.eye(2), "here"))]
    )
    sources = [part.partition('"')[0] for part in figure.split("base64,")[1:]]
    read = [
        np.round(255 * matplotlib.image.imread(BytesIO(b64decode(source)), format="png"))
        for source in sources
    ]
    assert [tuple(int(c) for c in read[0][row, column]) for row, column in ((1, 0), (0, 1))] == [
        BOTH_SIGNS[0],
        BOTH_SIGNS[-1],
    ]
    assert tuple(int(c) for c in read[2][1, 0]) == FROM_ZERO[-1]  # the error there is the largest
    assert tuple(int(c) for c in read[2][0, 0]) == FROM_ZERO[0]
    assert "at most 1" in figure


def test_a_png_in_colour_is_read_back_by_another_decoder() -> None:
    colours = torch.arange(7 * 5 * 3).view(7, 5, 3) % 256
    decoded = matplotlib.image.imread(BytesIO(png(colours)), format="png")
    assert np.array_equal(np.round(decoded * 255), colours.numpy())


def test_a_field_of_two_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one shape \[rows, columns\], found \(2, 3\) and \(6,\)"):
        Field(torch.zeros(2, 3), torch.zeros(6), "here")

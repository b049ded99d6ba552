"""The lines of a table of the paper, with the runs that are there."""

import math
import statistics
from pathlib import Path

import pytest

from krylov_descent.laboratory.exhibit_lines import MISSING, lines
from krylov_descent.laboratory.reproduce import DEFAULTS, HF, exhibit
from tests.laboratory.example_runs import write_seeds

CURVES = exhibit("table2").only(["curves"])


def test_several_seeds_are_a_mean_with_its_interval(tmp_path: Path) -> None:
    errors = write_seeds(tmp_path, DEFAULTS, 3)
    found = {name: columns for name, *columns in lines(CURVES, tmp_path)}
    mean, half_width = (float(part) for part in found[DEFAULTS][1].split(" ± "))
    # 4.3027 is Student's t of 2 degrees of freedom.
    assert half_width == float(f"{4.3027 * statistics.stdev(errors) / math.sqrt(3):.2g}")
    assert mean == pytest.approx(sum(errors) / 3, abs=half_width / 20)
    assert found[HF] == [MISSING]


def test_a_line_with_one_of_its_runs_says_so(tmp_path: Path) -> None:
    (error,) = write_seeds(tmp_path, HF, 1)
    found = {name: columns for name, *columns in lines(CURVES, tmp_path)}
    assert found[f"{HF} (1 of 3)"][1] == f"{error:.3g}"

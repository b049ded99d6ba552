"""The tests of kernels that Triton's interpreter can run, in a process of their own."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Short ones, of which each kernel is in one at least.
CHOSEN = (
    "has_its_digits and shape1 and tf32",
    "functions_of_products and tanh and none",
    "sums_over_rows and shape1",
    "rows_of_a_span and 12-ends1",
    "a_row_is_written",
    "all_inner_products and 9",
    "losses_and_their_derivative and shape1 and float32",
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_by_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.cuda.triton.interpreter"]
    command += ["-m", "interpreted", "-k", " or ".join(f"({name})" for name in CHOSEN)]
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [*command, "tests/cuda/triton"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None
    assert int(found[1]) >= len(CHOSEN)

"""No number has changed since the traces were recorded.

Where a recorded file is of this environment (architecture, processor, instructions that torch uses,
versions of torch and NumPy, BLAS), every step of every case must have the recorded bits: all fields
of its result except wall-clock times, and all parameters after it. A field that results have gained
since then is not compared.

Elsewhere another processor rounds differently, and steps amplify that: a step's search decides by
comparing numbers. So only the first step is compared there, with every recorded file: its status is
the same, and its loss before and after is, relative to the recorded one, within 1e-6 in float64 and
1e-3 in float32. Nothing after the first step is compared.

`python -m tests.golden.record` records the file of another processor.
"""

import pytest
import torch

from tests.golden.environment import this_environment
from tests.golden.recordings import all_recordings, recording_of_this_environment
from tests.golden.traces import CASES, Case, Record, trace_of

ALL = all_recordings()
OWN = recording_of_this_environment()
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_training_is_as_recorded(case: Case) -> None:
    found = trace_of(case)
    if OWN is None:
        for recording in ALL:
            for steps, recorded_steps in zip(found, recording.traces[case.name], strict=True):
                check_nearly(steps[0], recorded_steps[0], TOLERANCE[case.dtype])
        return
    for rank, (steps, recorded_steps) in enumerate(zip(found, OWN.traces[case.name], strict=True)):
        assert len(steps) == len(recorded_steps)
        for number, (step, recorded) in enumerate(zip(steps, recorded_steps, strict=True)):
            compared = {name: step.get(name, "not there") for name in recorded}
            assert compared == recorded, f"step {number} of rank {rank}"


def check_nearly(step: Record, recorded: Record, tolerance: float) -> None:
    """Status and losses agree, as far as rounding on another processor allows."""
    assert step.get("status") == recorded.get("status")
    for name in ("loss", "loss_after"):
        if name in recorded:
            value = float.fromhex(recorded[name])
            assert float.fromhex(step[name]) == pytest.approx(
                value, rel=tolerance, abs=0.0, nan_ok=True
            ), name


def test_there_is_a_recorded_file_for_this_environment() -> None:
    assert ALL, "no recorded file: python -m tests.golden.record"
    if OWN is None:
        here = this_environment()
        pytest.skip(
            f"no traces are recorded for {here['processor']} with torch {here['torch']}, so only "
            "first steps were compared: python -m tests.golden.record records them"
        )


def test_every_recorded_file_has_all_cases_and_no_other() -> None:
    names = [case.name for case in CASES]
    assert all(sorted(recording.traces) == sorted(names) for recording in ALL)

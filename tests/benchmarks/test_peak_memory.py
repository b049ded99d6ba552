"""Peak memory of a KSD step in a process of its own."""

import pytest

from benchmarks import memory, peak

needs_proc = pytest.mark.skipif(
    not peak.CLEAR.exists(), reason="peak memory on the CPU is read from /proc"
)


@needs_proc
def test_memory_is_measured_and_within_its_bound() -> None:
    row = memory.measure_case(memory.Case(3, "gauss-newton", width=1000))
    assert row["parameters"] == 4 * (1000 * 1000 + 1000)
    # The basis alone is K + 3 vectors: a figure below it would mean that nothing was measured.
    assert 3 + 3 < row["vectors"] <= row["bound"] == 3 + 12


@needs_proc
def test_a_case_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="dimension"):
        memory.measure_case(memory.Case(0, "gauss-newton", width=4))

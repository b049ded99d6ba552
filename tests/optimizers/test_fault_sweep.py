"""A step that fails anywhere leaves nothing behind, and errors stay what they are."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.fault_sweep import OPTIMIZERS, sweep
from krylov_descent import KSD
from krylov_descent.optimizers.snapshot import Snapshot
from krylov_descent.runtime.messages import is_out_of_memory
from tests.optimizers.unchanged import samples, unchanged

MORE_THAN_THERE_IS = 1 << 50  # numbers: beyond the addresses that a process has


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_error_at_any_call_leaves_nothing_behind(name: str) -> None:
    failures, found = sweep([name], points=3)
    assert failures == 6
    assert not found, found[0]


def test_what_is_left_behind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Snapshot, "restore_groups", lambda self: None)
        _, found = sweep(["KSD"], points=2)
    assert {"set_fingerprint of group 0 changed"} <= {difference.what for difference in found}
    with monkeypatch.context() as patched:
        patched.setattr(Snapshot, "restore_knowledge", lambda self: None)
        _, found = sweep(["KSD, a user's preconditioner"], points=2)
    assert {"updates changed", "diagonal changed"} <= {difference.what for difference in found}


class Hungry(nn.Module):
    """A net that wants more memory than there is at one of its calls.

    With a layer that is not Linear, and a buffer, for which there are probes of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
        self.register_buffer("shift", torch.ones(2))
        self.calls, self.hungry_at = 0, -1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.hungry_at:
            torch.empty(MORE_THAN_THERE_IS)
        outputs: Tensor = self.layers(x) + self.shift
        return outputs


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean, which the library takes apart by vmap."""
    return (outputs - targets).square().mean()


def test_memory_that_is_missing_in_any_forward_pass_is_told_as_such() -> None:
    whole = Hungry()
    expected = KSD(whole, mean_square, dimension=2)
    expected.step(samples())
    assert whole.calls > 15  # most of them by probes
    model = Hungry()
    optimizer: Any = KSD(model, mean_square, dimension=2)
    for call in range(1, whole.calls + 1):
        model.calls, model.hungry_at = 0, call
        with unchanged(optimizer), pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
            optimizer.step(samples())
    model.hungry_at = -1
    optimizer.step(samples())
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("not enough memory"), False),
    ],
)
def test_which_errors_say_that_memory_is_missing(problem: Exception, expected: bool) -> None:
    assert is_out_of_memory(problem) is expected


def test_torch_says_so_on_this_machine() -> None:
    with pytest.raises(RuntimeError, match=re.escape("DefaultCPUAllocator")) as caught:
        torch.empty(MORE_THAN_THERE_IS)
    assert is_out_of_memory(caught.value)

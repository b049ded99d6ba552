"""Where a search by BFGS will look next, found out by the GPU itself.

Between two evaluations of a search the GPU would wait for the host, which decides where to look
next: 0.05 to 0.15 ms, where an evaluation takes 0.3. It decides by a few numbers of the line search
and, if the trial is accepted, by a few products with small matrices. So the GPU has all of that
state, too, and goes on with the point that BFGS will choose. The host decides all the same, in its
own arithmetic, and takes what is there if that is the point it chose.
"""

import math
from contextlib import suppress

import torch
from torch import Tensor

from krylov_descent.bfgs import Trying, Vector
from krylov_descent.exchanges import Ahead, write
from krylov_descent.line_search import Point
from krylov_descent.tensor_cores import foresight_kernels as kernels
from krylov_descent.tensor_cores.launching import launch

# Rows of a basis to a kernel, which holds matrices of so many in registers.
LEAST, MOST = 32, 64
# How many evaluations the numbers of which are kept: one that is read, one that follows it on the
# GPU, and the same again where that was not what the search asked for.
PLACES = 4
SCALARS = int(kernels.SCALARS.value)
BLOCK = 1024
# Where no step was too far yet.
NOT_THERE = Point(math.inf, math.nan, math.nan)


class Foresight:
    """An `Exchange`, with the state of the search on the GPU.

    Args:
        rows: of the basis, `MOST` at most.
        device: the GPU.
    """

    foresees = True

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows, self._device = rows, device
        size = SCALARS + 3 * rows + 2 * rows * rows
        self._coefficients = torch.zeros(rows, dtype=torch.float32, device=device)
        self._state = torch.zeros(size, dtype=torch.float64, device=device)
        self._sent = torch.zeros(rows + size, dtype=torch.float64, pin_memory=True)
        self._results = torch.zeros(PLACES, 1 + 2 * rows, dtype=torch.float64, pin_memory=True)

    def __del__(self) -> None:
        # What was launched and not asked for still writes to the host's memory.
        with suppress(Exception):  # when Python ends, much is gone
            torch.cuda.synchronize(self._device)

    def coefficients(self) -> Tensor:
        return self._coefficients

    def bring(self, value: Tensor, projected: Tensor) -> None:
        """With the next point; one kernel."""
        args = value, projected, self._state, self._coefficients, self._results, self._rows, PLACES
        width = max(LEAST, 1 << (self._rows - 1).bit_length())
        launch(kernels.look_ahead, (1, 1), args, (width,), num_warps=width // 8)

    def send(self, number: int, coefficients: Vector, ahead: Ahead | None) -> None:
        """By a kernel, which is launched."""
        sent, rows, rank = self._sent.numpy(), self._rows, len(coefficients)
        write(coefficients, sent[:rows])
        state = sent[rows:]
        state[0] = number
        if ahead is not None:
            trying = ahead.trying
            state[1:SCALARS] = _scalars(trying)
            vectors = state[SCALARS : SCALARS + 3 * rows].reshape(3, rows)
            matrices = state[SCALARS + 3 * rows :].reshape(2, rows, rows)
            if rank < rows:
                state[SCALARS:] = 0
            for place, vector in zip(
                vectors, (trying.point, trying.direction, trying.gradient), strict=True
            ):
                place[:rank] = vector
            matrices[0, :rank, :rank] = trying.inverse_hessian
            matrices[1, :rank, :rank] = ahead.to_coordinates.T
        args = self._sent, self._coefficients, self._state, rows, len(sent)
        with torch.cuda.device(self._device):  # this is not recorded, and may be another
            launch(kernels.fetch, (-(-len(sent) // BLOCK), 1), args, (BLOCK,))

    def numbers(self, number: int) -> Tensor:
        return self._results[number % PLACES, : 1 + self._rows]

    def next_point(self, number: int) -> Vector:
        found: Vector = self._results[number % PLACES, 1 + self._rows :].numpy()
        return found


def _scalars(trying: Trying) -> tuple[float, ...]:
    """Of a state, in the order that the kernel has them in."""
    shorter, low, high = trying.bracket
    line = trying.is_identity, trying.noise, trying.step, trying.value, trying.slope
    return (*line, *shorter, *low, *(high or NOT_THERE))

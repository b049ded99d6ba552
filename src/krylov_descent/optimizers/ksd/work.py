"""What the parts of a step cost, counted in gradients of one sample.

Choices of a step follow from counted work and never from the clock, so that the same seed gives the
same run, on every machine of a kind and on all ranks.
"""

from krylov_descent.objective.objective import Objective
from krylov_descent.objective.parameters import FlatParameters

# A product of the Gauss-Newton matrix takes 1.1 to 1.3 gradients (`python -m benchmarks product`).
PRODUCT = 1.25
# Where the Jacobian is kept: making it, and a direction by it (results/trials/kept_jacobian.json).
JACOBIAN, PRODUCT_BY_JACOBIAN = 3.0, 0.25
# A pass over few samples takes as long as over this many, divided by the number of parameters:
# launching its operations takes longer than running them. On a CPU this is measured in
# results/trials/small_sets.json (`product_by_samples`), on a GPU in results/trials/spending.json.
CPU_OVERHEAD, GPU_OVERHEAD = 25_000_000, 2_000_000_000
# Reading a row of the basis takes as long as the gradients of so many samples. On a CPU estimated
# from the speed of memory, by which reading is bound, and that of arithmetic; on a GPU measured
# with tf32 (`basis_by_rows` in results/trials/spending.json).
CPU_ROW, GPU_ROW = 3, 25
# How often a row is read: for each later direction, and for each evaluation.
FOR_DIRECTION, FOR_EVALUATION = 3, 2


def overhead_in_samples(parameters: FlatParameters) -> float:
    """The samples whose gradients take as long as the overhead of a pass over them."""
    overhead = CPU_OVERHEAD if parameters.device.type == "cpu" else GPU_OVERHEAD
    return overhead / parameters.numel


class Work:
    """Counts the work of passes over the samples of all ranks.

    It does not depend on the number of ranks, because their result must not.

    Args:
        objective: f.
    """

    def __init__(self, objective: Objective) -> None:
        self._overhead = overhead_in_samples(objective.parameters)
        self._row = CPU_ROW if objective.parameters.device.type == "cpu" else GPU_ROW

    def gradient(self, samples: int) -> float:
        """Of a gradient over so many samples."""
        return samples + self._overhead

    def evaluation(self, samples: int, rows: int) -> float:
        """Of an evaluation over so many samples, with a basis of so many rows."""
        return self.gradient(samples) + FOR_EVALUATION * rows * self._row

    def basis(self, samples: int, rows: int, *, by_jacobian: bool = False) -> float:
        """Of a basis of so many rows, by products over so many samples.

        Args:
            samples: |B|.
            rows: of the basis.
            by_jacobian: whether products are by a kept Jacobian.
        """
        orthogonalization = FOR_DIRECTION * self._row * rows * (rows - 1) / 2
        products = PRODUCT * rows
        if by_jacobian:
            products = JACOBIAN + PRODUCT_BY_JACOBIAN * rows
        return products * self.gradient(samples) + orthogonalization

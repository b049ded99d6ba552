"""The settings of KSD, and the state that it keeps between steps."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from krylov_descent.algorithms.basis_storage import Storage
from krylov_descent.curvature.krylov_basis import BasisKind, BasisLayout
from krylov_descent.curvature.preconditioners.preconditioner import Preconditioner
from krylov_descent.curvature.products import Curvature, CurvatureKind
from krylov_descent.objective.network import Forward
from krylov_descent.objective.subsets import Size, SubsetSizes
from krylov_descent.objective.term import LossOrTerms
from krylov_descent.optimizers.base import DataOptimizer
from krylov_descent.optimizers.ksd import (
    damped_phase,
    escalation,
    preconditioner_schedule,
    subset_growth,
)
from krylov_descent.optimizers.ksd import dimension as directions
from krylov_descent.optimizers.ksd.dimension import Dimension
from krylov_descent.optimizers.ksd.preconditioner_schedule import (
    PreconditionerSchedule,
    is_classifier,
)
from krylov_descent.optimizers.snapshot import Snapshot
from krylov_descent.runtime.descriptions import described
from krylov_descent.runtime.precision import tf32_suggests_itself
from krylov_descent.runtime.process_group import ProcessGroup
from krylov_descent.runtime.validation import (
    check_counts,
    check_counts_or_auto,
    check_not_negative,
)

PREVIOUS_STEP = "previous_step"  # the newest step; older steps have a number appended


class KSDState(DataOptimizer):
    """The settings and the state of `KSD`, whose docstring describes the arguments."""

    data_parallel = True
    learnt = (
        *subset_growth.ENTRIES,
        *escalation.ENTRIES,
        *directions.ENTRIES,
        *damped_phase.ENTRIES,
        *preconditioner_schedule.ENTRIES,
    )

    def __init__(
        self,
        model: nn.Module,
        loss: LossOrTerms,
        params: Any = None,
        *,
        dimension: Dimension = "auto",
        curvature: CurvatureKind = "gauss-newton",
        preconditioner: str | Preconditioner = "auto",
        subset_size: Size | tuple[Size, Size] = "auto",
        previous_steps: int = 3,
        bfgs_iterations: int | Literal["auto"] = "auto",
        epsilon: float = 1e-4,
        weight_decay: float = 0.0,
        lr: float = 1.0,
        seed: int = 0,
        forward: Forward | None = None,
        micro_batch: int | None = None,
        activation_memory: int | None = None,
        cuda_graphs: bool = True,
        tf32: bool | Literal["auto"] = "auto",
        basis: BasisKind = "replicated",
        basis_dtype: torch.dtype | None = None,
        basis_device: torch.device | str | None = None,
        process_group: ProcessGroup = None,
    ) -> None:
        check_counts(previous_steps=previous_steps)
        check_counts_or_auto(dimension=dimension, bfgs_iterations=bfgs_iterations)
        if tf32 != "auto" and not isinstance(tf32, bool):
            raise TypeError(f"`tf32` must be True, False or 'auto', found {tf32!r}")
        check_not_negative(epsilon=epsilon)
        if not 0 < epsilon < 1:
            raise ValueError(f"`epsilon` must lie between 0 and 1, found {epsilon}")
        super().__init__(
            model,
            loss,
            params,
            {"lr": lr, "weight_decay": weight_decay},
            seed=seed,
            forward=forward,
            micro_batch=micro_batch,
            activation_memory=activation_memory,
            cuda_graphs=cuda_graphs,
            process_group=process_group,
        )
        self.dimension = dimension
        self.curvature = Curvature(curvature)
        self._schedule = PreconditionerSchedule(
            preconditioner,
            epsilon,
            sharded=basis == "sharded",
            plain_start=is_classifier(self.objective.network),
        )
        least = subset_growth.least_samples(self.objective.parameters)
        self.subset_sizes = SubsetSizes.checked(subset_size, directions.usual(dimension), least)
        self._create_entries()
        self._last_data = subset_growth.LastData()
        self.bfgs_iterations = bfgs_iterations
        self.epsilon = epsilon
        self.tf32 = tf32
        like = self.objective.parameters.tensors[0]
        self.layout = BasisLayout(basis, Storage.checked(basis_dtype, basis_device, like))
        self.layout.check(self.preconditioner)
        numbered = (f"{PREVIOUS_STEP}_{i}" for i in range(2, previous_steps + 1))
        self._previous = [PREVIOUS_STEP, *numbered]  # keys in the state, newest first
        self._steps_kept: int | None = None  # how many of these steps exist; None if not known

    @property
    def preconditioner(self) -> Preconditioner:
        """D as asked for, or as chosen. Kronecker factors are empty until a step uses them."""
        return self._schedule.chosen(self.param_groups[0])

    @property
    def _dimension(self) -> int:
        """K of the current step."""
        group = self.param_groups[0]
        return int(max(group[directions.DIRECTIONS], group[escalation.LONGER_BASIS]))

    def _create_entries(self) -> None:
        """Create the missing entries of the first parameter group, which steps learn."""
        group = self.param_groups[0]
        if self.subset_sizes.grow:
            subset_growth.begin(group)
        escalation.begin(group)
        directions.begin(group, self.dimension)
        damped_phase.begin(group)
        preconditioner_schedule.begin(group)

    @property
    def _may_be_damped(self) -> bool:
        """Whether damped steps fit: terms that are residuals, in float64, with the defaults.

        Readings may have noise, which damped steps would meet at once.
        """
        objective, terms = self.objective, self.objective.terms
        by_default = self.dimension == "auto" and self.subset_sizes.grow and self.layout.is_plain
        residuals = terms is not None and all(
            term.is_residual and term.subset_size is None for term in terms.values()
        )
        return (
            by_default
            and residuals
            and self.curvature.kind == "gauss-newton"
            and objective.parameters.dtype is torch.float64
            and not any(objective.parameters.weight_decay)
            and not objective.ranks.together
        )

    @property
    def _is_in_tf32(self) -> bool:
        if self.tf32 == "auto":
            parameters = self.objective.parameters
            return tf32_suggests_itself(parameters.device, parameters.dtype)
        return self.tf32

    def _previous_steps(self) -> list[Tensor]:
        """Copies of the existing previous steps [n], newest first."""
        if self._steps_kept is None:
            kept = [bool(self._flat_state(key).any()) for key in self._previous]
            self._steps_kept = sum(kept)
        return [self._flat_state(key) for key in self._previous[: self._steps_kept]]

    def _last_step(self) -> Tensor:
        """The last step [n] that was taken; zeros if there is none."""
        return self._flat_state(PREVIOUS_STEP)

    def _keep_step(self, pieces: Sequence[Tensor]) -> None:
        """Store a step that was taken, in pieces like the parameters, as the newest one."""
        self._push_pieces(self._previous, pieces)
        if self._steps_kept is not None:
            self._steps_kept = min(self._steps_kept + 1, len(self._previous))

    def _options(self) -> dict[str, Any]:
        return {
            "`dimension`": self.dimension,
            "`curvature`": self.curvature.kind,
            **described("`preconditioner`", self.preconditioner),
            "`subset_size`": self.subset_sizes,
            "`previous_steps`": len(self._previous),
            "`bfgs_iterations`": self.bfgs_iterations,
            "`epsilon`": self.epsilon,
            "`tf32`": self.tf32,
            "`basis`": self.layout.kind,
            "`basis_dtype`": self.layout.storage.dtype,
            "`basis_device`": self.layout.storage.device,
        }

    def _learners(self) -> list[object]:
        return [*super()._learners(), self.curvature, *self._schedule.learners, self._last_data]

    def _foreign(self) -> list[object]:
        return self._schedule.foreign

    def _restore(self, before: Snapshot) -> None:
        super()._restore(before)
        self._steps_kept = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict.

        Raises:
            ValueError: the state is of another kind of optimiser. The optimiser is unchanged then.
        """
        super().load_state_dict(state_dict)
        self._steps_kept = None

    def _create_state(self) -> None:
        self._zero_state(*self._previous)

"""Which preconditioner D a step of KSD uses.

Kronecker factors are used only after some steps with the Fisher diagonal. Used from the first step
on, they lead a deep net to a point where it hardly learns any more (CURVES; see the method's page).
The presumed reason is the mean of the targets. Until the mean is learnt, all samples have the same
error, and each layer alone could correct it. The factors ignore other layers, so D⁻¹g makes all
layers correct the error at once.
"""

from collections.abc import Sequence

from krylov_descent.curvature.preconditioners.kronecker import KroneckerFactors
from krylov_descent.curvature.preconditioners.preconditioner import (
    FisherDiagonal,
    FromCurvatureSet,
    Identity,
    Preconditioner,
)
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.objective import Objective

# The damping of Kronecker factors relative to ε: a floor affects few entries of a diagonal, damping
# affects all.
KRONECKER_DAMPING = 0.1
# The library's own preconditioners, which every step computes from scratch.
OWN = (FisherDiagonal, Identity, KroneckerFactors)


class PreconditionerSchedule:
    """The preconditioners of a training, one after another.

    Args:
        given: a name, or the preconditioner itself.
        epsilon: the paper's ε.

    Attributes:
        last: the preconditioner that was asked for.
        current: the preconditioner of the current step.
    """

    def __init__(self, given: str | Preconditioner, epsilon: float) -> None:
        self.last = self.current = make_preconditioner(given, epsilon)
        self._epsilon = epsilon

    @property
    def can_be_made_again(self) -> bool:
        """Whether D depends on one step's samples alone, so that a step may compute it twice."""
        return type(self.current) in OWN

    @property
    def learners(self) -> list[object]:
        """The objects whose attributes a step may change."""
        return [self, self.last, self.current]

    @property
    def foreign(self) -> list[object]:
        """The user's preconditioner, which may keep state between steps; empty if D is our own."""
        return [] if type(self.last) in OWN else [self.last]

    def begin(self, steps: int) -> bool:
        """Choose D for the step after `steps` steps. Returns whether D changes."""
        first = isinstance(self.last, KroneckerFactors) and steps < self.last.after
        if first == (self.current is not self.last):
            return False
        self.current = FisherDiagonal(self._epsilon) if first else self.last
        return True

    def learn(self, objective: Objective, batches: Sequence[Batch]) -> bool:
        """Complete D with this rank's batches of B. Returns whether D took their gradient."""
        if isinstance(self.current, FromCurvatureSet):
            self.current.learn(objective, batches)
            return True
        if isinstance(self.last, KroneckerFactors):
            # Refuse unsuitable models at the first step, not when the factors are first used.
            self.last.check(objective, batches)
        return False


def make_preconditioner(given: str | Preconditioner, epsilon: float) -> Preconditioner:
    """The preconditioner of a name, or the given object; raises ValueError for anything else."""
    if given == "fisher-diagonal":
        return FisherDiagonal(epsilon)
    if given == "kronecker":
        return KroneckerFactors(KRONECKER_DAMPING * epsilon)
    if given == "identity":
        return Identity()
    if isinstance(given, Preconditioner) and not isinstance(given, str | type):
        return given
    raise ValueError(
        "`preconditioner` must be 'fisher-diagonal', 'kronecker', 'identity' or an object with "
        f"update(objective, data), solve(vector) and multiply(vector), found {given!r}"
    )

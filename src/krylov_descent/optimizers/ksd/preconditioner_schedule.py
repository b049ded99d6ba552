"""Which preconditioner D a step of KSD has.

Kronecker factors come after some steps with the Fisher diagonal. From the first step on they lead
a deep net to where it learns little more (CURVES; see the method's page). We take it that the
reason is the mean of the targets: as long as it is not learnt, all samples are wrong in the same
way, and each layer could mend that alone. The factors know nothing of other layers, so D⁻¹g has
all of them do it.
"""

from krylov_descent.curvature.preconditioners.kronecker import KroneckerFactors
from krylov_descent.curvature.preconditioners.preconditioner import (
    FisherDiagonal,
    FromCurvatureSet,
    Identity,
    Preconditioner,
)
from krylov_descent.curvature.products import CurvatureProduct

# Of ε: a floor under the entries of a diagonal is felt by few of them, damping by all.
KRONECKER_DAMPING = 0.1
# Made anew by every step.
OWN = (FisherDiagonal, Identity, KroneckerFactors)


class PreconditionerSchedule:
    """The preconditioners of a training, one after another.

    Args:
        given: a name, or the object itself.
        epsilon: the paper's ε.

    Attributes:
        last: the one that was asked for.
        current: that of the step under way.
    """

    def __init__(self, given: str | Preconditioner, epsilon: float) -> None:
        self.last = self.current = make_preconditioner(given, epsilon)
        self._epsilon = epsilon

    @property
    def can_be_made_again(self) -> bool:
        """Whether D is made of one step's samples alone, so that a step may make it twice."""
        return type(self.current) in OWN

    @property
    def learners(self) -> list[object]:
        """What a step may change. Of D itself nothing is left to the next step."""
        return [self, self.last, self.current]

    @property
    def foreign(self) -> list[object]:
        """The preconditioner, where it is the user's, and may go on from one step to the next."""
        return [] if type(self.last) in OWN else [self.last]

    def begin(self, steps: int) -> bool:
        """Choose D for the step that follows so many; whether it is another than before."""
        first = isinstance(self.last, KroneckerFactors) and steps < self.last.after
        if first == (self.current is not self.last):
            return False
        self.current = FisherDiagonal(self._epsilon) if first else self.last
        return True

    def learn(self, product: CurvatureProduct) -> int:
        """Complete D with the samples of B; how many of them it took the gradient of."""
        if isinstance(self.current, FromCurvatureSet):
            self.current.learn(product.objective, product.batches)
            return product.samples
        if isinstance(self.last, KroneckerFactors):
            # Its time will come: what it cannot work with is told at the first step.
            self.last.check(product.objective, product.batches)
        return 0


def make_preconditioner(given: str | Preconditioner, epsilon: float) -> Preconditioner:
    """The preconditioner of a name, or the object itself."""
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

"""Which preconditioner D a step of KSD uses.

Kronecker factors are used only after some steps with the Fisher diagonal. Used from the first step
on, they lead a deep net to a point where it hardly learns any more (CURVES; see the method's page).
The presumed reason is the mean of the targets. Until the mean is learnt, all samples have the same
error, and each layer alone could correct it. The factors ignore other layers, so D⁻¹g makes all
layers correct the error at once.

With "auto" a classifier of Linear layers has no preconditioner in these steps: the diagonal may
saturate its hidden units (`before the factors` in `results/trials/exponents.json`).

"auto" chooses Kronecker factors where most parameters have them, and where they are cheap beside
the products of a step and fit the memory for activations; elsewhere the diagonal, its square root
for a forward pass that differentiates, or its fourth root for convolutional and recurrent nets. It
chooses in the first step, and the choice is an entry of a parameter group.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from krylov_descent.curvature.preconditioners.kronecker import KroneckerFactors
from krylov_descent.curvature.preconditioners.preconditioner import (
    FisherDiagonal,
    FromCurvatureSet,
    Identity,
    Preconditioner,
)
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network
from krylov_descent.objective.objective import Objective
from krylov_descent.optimizers.ksd.work import PRODUCT
from krylov_descent.runtime.messages import is_out_of_memory

# The damping of Kronecker factors relative to ε: a floor affects few entries of a diagonal, damping
# affects all.
KRONECKER_DAMPING = 0.1
# The library's own preconditioners, which every step computes from scratch.
OWN = (FisherDiagonal, Identity, KroneckerFactors)

# Of the parameters, which must have factors for "auto" to choose them.
LEAST_PART = 0.5
# "auto" compares the cost of factors with that of so many products.
USUAL_DIRECTIONS = 20
MULTIPLICATIONS = 3  # of a gradient, for each parameter and sample
# Times the multiplications of the products. Those of factors are of large matrices, and run faster.
MOST_COST = 4

# Nets with fewer parameters in Linear layers than this part, as convolutional and recurrent nets
# have, get the fourth root of the diagonal.
FEW_LINEAR = 0.4

CHOICE = "preconditioner_choice"
# What "auto" chose.
NOT_YET, KRONECKER, DIAGONAL, ROOT_OF_DIAGONAL, FOURTH_ROOT = range(5)
# Of the diagonal. Between the paper's 1 and the identity's 0 none is best everywhere
# (`results/trials/spending.json`, `results/trials/exponents.json`).
EXPONENTS = {DIAGONAL: 1.0, ROOT_OF_DIAGONAL: 0.5, FOURTH_ROOT: 0.25}
ENTRIES = (CHOICE,)


def begin(group: dict[str, Any]) -> None:
    """Create a missing entry in a parameter group."""
    group.setdefault(CHOICE, NOT_YET)


class PreconditionerSchedule:
    """The preconditioners of a training, one after another.

    Args:
        given: a name, or the preconditioner itself.
        epsilon: the paper's ε.
        sharded: whether D must act entry by entry.
        plain_start: whether "auto" has no preconditioner before Kronecker factors.

    Attributes:
        last: the preconditioner that was asked for; Kronecker factors for "auto".
        current: the preconditioner of the current step.
    """

    def __init__(
        self,
        given: str | Preconditioner,
        epsilon: float,
        *,
        sharded: bool = False,
        plain_start: bool = False,
    ) -> None:
        self._epsilon, self._chooses = epsilon, given == "auto" and not sharded
        self._first_exponent = 0.0 if plain_start and self._chooses else 1.0
        if given == "auto":
            given = "fisher-diagonal" if sharded else "kronecker"
        self.last = self.current = make_preconditioner(given, epsilon)

    @property
    def can_be_made_again(self) -> bool:
        """Whether D depends on one step's samples alone, so that a step may compute it twice."""
        return type(self.current) in OWN

    def awaits_factors(self, group: dict[str, Any]) -> bool:
        """Whether later steps will have Kronecker factors in place of the diagonal.

        Args:
            group: the parameter group with the choice of "auto".
        """
        has_factors = isinstance(self.last, KroneckerFactors) and self.current is not self.last
        return has_factors and (not self._chooses or group[CHOICE] == KRONECKER)

    @property
    def learners(self) -> list[object]:
        """The objects whose attributes a step may change."""
        return [self, self.last, self.current]

    @property
    def foreign(self) -> list[object]:
        """The user's preconditioner, which may keep state between steps; empty if D is our own."""
        return [] if type(self.last) in OWN else [self.last]

    def chosen(self, group: dict[str, Any]) -> Preconditioner:
        """The preconditioner of most steps, as far as it is known.

        Args:
            group: the parameter group with the choice of "auto".
        """
        diagonal = self._chooses and group[CHOICE] in EXPONENTS
        return self.current if diagonal else self.last

    def begin(self, group: dict[str, Any], steps: int) -> bool:
        """Choose D for the step after `steps` steps. Returns whether D changes.

        Args:
            group: the parameter group with the choice of "auto".
            steps: made so far.
        """
        before, exponent = self.current, self._exponent(group, steps)
        if exponent is None:
            self.current = self.last
        elif exponent == 0:
            self.current = before if isinstance(before, Identity) else Identity()
        elif not (isinstance(before, FisherDiagonal) and before.exponent == exponent):
            self.current = FisherDiagonal(self._epsilon, exponent=exponent)
        return self.current is not before

    def _exponent(self, group: dict[str, Any], steps: int) -> float | None:
        """Of a diagonal in place of the last preconditioner; None if that is in use."""
        if self._chooses and group[CHOICE] in EXPONENTS:
            return EXPONENTS[group[CHOICE]]
        early = isinstance(self.last, KroneckerFactors) and steps < self.last.after
        return self._first_exponent if early else None

    def learn(self, group: dict[str, Any], objective: Objective, batches: Sequence[Batch]) -> bool:
        """Complete D with this rank's batches of B. Returns whether D took their gradient."""
        if isinstance(self.current, FromCurvatureSet):
            self.current.learn(objective, batches)
            return True
        if isinstance(self.last, KroneckerFactors):
            if not self._chooses:
                # Refuse unsuitable models at the first step, not when the factors are first used.
                self.last.check(objective, batches)
            elif group[CHOICE] == NOT_YET:
                group[CHOICE] = _choice(self.last, objective, batches)
                # At once: after a first step with exponent 1 an LSTM stays behind.
                if group[CHOICE] == FOURTH_ROOT and isinstance(self.current, FisherDiagonal):
                    self.current.raise_to(EXPONENTS[FOURTH_ROOT])
        return False


def is_classifier(network: Network) -> bool:
    """Whether the network is a stack of several Linear layers that tells classes apart.

    Several classes have a softmax, two of them one output with a sigmoid.
    """
    layers = [module for module in network.eager.modules() if isinstance(module, nn.Linear)]
    if not network.is_stack or len(layers) < 2:
        return False
    loss = network.loss.module
    two_classes = isinstance(loss, nn.BCEWithLogitsLoss) and layers[-1].out_features == 1
    return two_classes or isinstance(loss, nn.CrossEntropyLoss)


def _choice(factors: KroneckerFactors, objective: Objective, batches: Sequence[Batch]) -> int:
    """What "auto" chooses for a model; the same on all ranks."""
    ranks, own = objective.ranks, sum(batch.size for batch in batches)
    samples = int(ranks.sum_numbers(torch.tensor([own], dtype=torch.float64)))
    votes = [0.0, 0.0, 0.0]  # against Kronecker factors, for the root and for the fourth root
    with ranks.own_work():
        if own:  # a rank without samples has no vote
            suit = _suit(factors, objective, batches, samples)
            root = objective.findings.forward_differentiates
            linear = _in_linear_layers(factors, objective)
            fourth = linear < FEW_LINEAR * objective.parameters.numel
            votes = [float(not suit), float(root), float(fourth)]
    found = ranks.sum_numbers(torch.tensor(votes, dtype=torch.float64)).tolist()
    against, for_root, for_fourth = found
    if for_root:
        return ROOT_OF_DIAGONAL
    if for_fourth:
        return FOURTH_ROOT
    return DIAGONAL if against else KRONECKER


def _in_linear_layers(factors: KroneckerFactors, objective: Objective) -> int:
    """How many weights can have factors."""
    return sum(place.inputs * place.outputs for place in factors.trusted_places(objective))


def _suit(
    factors: KroneckerFactors, objective: Objective, batches: Sequence[Batch], samples: int
) -> bool:
    """Whether factors can be had for most parameters, fit the memory, and are cheap.

    Cheap means few multiplications beside the products of a step.

    Args:
        factors: to be made.
        objective: f.
        batches: this rank's samples of B.
        samples: |B|, over all ranks.
    """
    parameters, places = objective.parameters, factors.trusted_places(objective)
    sides = [(place.inputs, place.outputs) for place in places]
    squares = sum(p**2 + q**2 for p, q in sides)
    cubes = sum(p**3 + q**3 for p, q in sides)
    directions = sum(p * q * (p + q) for p, q in sides)
    # Moments, two factorisations with their inverses, and a solution for each direction.
    cost = squares * samples + 2 * cubes + 2 * USUAL_DIRECTIONS * directions
    products = MULTIPLICATIONS * PRODUCT * USUAL_DIRECTIONS * samples * parameters.numel
    numbers = USUAL_DIRECTIONS * parameters.numel + 4 * squares
    memory = numbers * torch.finfo(parameters.dtype).bits // 8
    if _in_linear_layers(factors, objective) < LEAST_PART * parameters.numel:
        return False
    if cost > MOST_COST * products:
        return False
    if memory > objective.activation_memory:
        return False
    try:
        factors.check(objective, batches)
    except (ValueError, RuntimeError) as problem:  # the loss has no root in closed form
        if is_out_of_memory(problem):
            raise
        return False
    return True


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
        "`preconditioner` must be 'auto', 'fisher-diagonal', 'kronecker', 'identity' or an object "
        f"with update(objective, data), solve(vector) and multiply(vector), found {given!r}"
    )

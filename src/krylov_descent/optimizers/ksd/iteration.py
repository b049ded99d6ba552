"""The parts of one iteration of Algorithm 3, and the account of its cost."""

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from krylov_descent.algorithms.bfgs import BFGS, BFGSResult
from krylov_descent.algorithms.coordinates import Coordinates, subspace_is_known
from krylov_descent.algorithms.damped_directions import DampedDirections
from krylov_descent.algorithms.diminishing_returns import DiminishingReturns
from krylov_descent.algorithms.minimizer import minimize
from krylov_descent.algorithms.subspace import Subspace
from krylov_descent.curvature.damped_basis import DampedBasis
from krylov_descent.curvature.krylov_basis import Basis, KrylovBasis
from krylov_descent.curvature.preconditioners.preconditioner import FisherDiagonal
from krylov_descent.curvature.products import CurvatureProduct
from krylov_descent.objective.batches import Nothing, Samples
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.loss_scale import has_squares, length
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.search_objective import Search, SearchObjective
from krylov_descent.optimizers.account import MOST_FITS, Account
from krylov_descent.optimizers.ksd import damped_phase, escalation, subset_growth
from krylov_descent.optimizers.ksd import dimension as directions
from krylov_descent.optimizers.ksd.ksd_state import KSDState
from krylov_descent.optimizers.ksd.step_sets import StepSets
from krylov_descent.optimizers.ksd.work import JACOBIAN, Work
from krylov_descent.optimizers.result import SCALED_AWAY, Status, StepResult
from krylov_descent.runtime.engine import Launched

# The paper floors the eigenvalues of H̄ at ε times the largest one, like those of D. Late in
# training, directions that still matter have less curvature than that. So semidefinite curvatures
# have a hundredth of that floor, or less where the arithmetic can tell smaller eigenvalues from
# rounding: an eigenvalue of r rows has an error of up to about r units of rounding. The Hessian
# keeps the whole floor: where its eigenvalues are negative, the floor alone determines the step
# length.
SEMIDEFINITE_FLOOR, ROUNDINGS = 0.01, 100.0
# Of a search that ends by itself: it hardly ever makes as many.
MOST_ITERATIONS = 1000
OUT_OF_RANGE = (
    "the gradient's length in the preconditioner, gᵀD⁻¹g, is infinite or zero in its precision: "
    "scale the loss, or a preconditioner of your own"
)
OUT_OF_RANGE_ONCE = (
    "squares of the gradient are infinite or zero in its precision, and `data` is a stream, which "
    "is not walked over again; the next step scales the loss"
)


class RescaledError(Exception):
    """The scale of the objective has changed, so the iteration must be repeated."""


class Iteration:
    """The variables of one iteration.

    Args:
        optimizer: that makes the step.
        objective: f.
        sets: A, B and C.
    """

    def __init__(self, optimizer: KSDState, objective: Objective, sets: StepSets) -> None:
        self._optimizer, self._objective, self._sets = optimizer, objective, sets
        self._ranks, self._engine = objective.ranks, objective.engine
        self._schedule = optimizer._schedule
        if self._schedule.begin(optimizer.param_groups[0], optimizer.steps):
            self._engine.change_basis()
        self._account, self._work = Account(objective), Work(objective)
        self._fits_left = MOST_FITS
        self._evaluations = 0
        self._samples: Samples = Nothing()
        self._curvature_set: Samples = Nothing()
        self._objective_set: Samples = Nothing()
        self._damped: CurvatureProduct | None = None
        self._basis: Basis
        self._coordinates: Coordinates

    def gradient(self) -> Evaluation:
        """Compute g and D on A, and draw B and C. A damped step needs no D, and has B = C = A."""
        self._ranks.enter("gradient")
        self._samples = self._sets.to_walk_over()
        self._engine.repeatable = self._can_be_made_again()
        self._damped = self._product_of_damped_step()
        if self._damped is not None:
            self._curvature_set = self._objective_set = self._samples
            return self._objective.value_and_gradient(self._samples)
        found = self._schedule.current.update(self._objective, self._samples)
        self._curvature_set, self._objective_set = self._sets.draw()
        return found

    def _can_be_made_again(self) -> bool:
        """Whether a second attempt at this step would have the same samples and the same D."""
        again = self._sets.in_memory and self._schedule.can_be_made_again
        return again and not self._ranks.together

    def basis(self, gradient: Evaluation) -> Launched[Basis]:
        """Launch Algorithm 2 on B. The gradient has not been checked to be finite yet."""
        if self._damped is not None:
            return self._engine.launch(self._damped_basis(self._damped, gradient))
        optimizer = self._optimizer
        work = KrylovBasis(
            objective=self._objective,
            curvature=optimizer.curvature,
            samples=self._curvature_set,
            preconditioner=self._schedule.current,
            learn=partial(self._schedule.learn, optimizer.param_groups[0]),
            gradient=gradient.gradient,
            previous_steps=optimizer._previous_steps(),
            most_previous=len(optimizer._previous),
            dimension=optimizer._dimension,
            provided_for=self._provided_for(),
            layout=optimizer.layout,
        )
        return self._engine.launch(work)

    def _product_of_damped_step(self) -> CurvatureProduct | None:
        """The Gauss-Newton matrix on A if this step is a damped one, for which it must fit."""
        optimizer, objective = self._optimizer, self._objective
        if not damped_phase.is_under_way(optimizer.param_groups[0]):
            return None
        allowed = self._sets.drawn and optimizer._may_be_damped
        if allowed and objective.single_batch(self._samples) is not None:
            product = optimizer.curvature.at(objective, self._samples)
            if damped_phase.suits(product):
                return product
        damped_phase.end(optimizer.param_groups[0])
        return None

    def _damped_basis(self, product: CurvatureProduct, gradient: Evaluation) -> DampedBasis:
        """The work that takes the place of Algorithm 2 in a damped step."""
        optimizer, group = self._optimizer, self._optimizer.param_groups[0]
        batch = self._objective.single_batch(self._samples)
        assert batch is not None
        return DampedBasis(
            product=product,
            batch=batch,
            gradient=gradient.gradient,
            damping=group[damped_phase.DAMPING],
            first=group[damped_phase.STEPS] == 0,
            provided_for=self._provided_for() + len(optimizer._previous),
        )

    def _provided_for(self) -> int:
        """For how many directions to provide memory: K, and more if K may grow."""
        K = self._optimizer._dimension
        if self._optimizer.dimension != "auto" or self._ranks.together:
            return K
        return max(K, min(directions.provided_for(K), longest_basis(self._objective)))

    def refusal(self, gradient: Evaluation) -> StepResult | None:
        """The result of a step that cannot continue with its gradient; None if it can.

        Raises:
            RescaledError: the scale of f was changed, and the step can continue with the new scale.
        """
        account, objective, g = self._account, self._objective, gradient.gradient
        value, norm = gradient.value, self._ranks.agreed_number(gradient.norm)
        self._engine.verify()
        account.lap("gradient")
        if not has_squares(norm, g.dtype):
            norm = self._ranks.agreed_number(length(g))
        account.note(loss=value, samples=gradient.samples, gradient_norm=norm)
        account.count(gradient.samples)
        scale = objective.scale
        if self._fits_left and objective.fit_scale(value, norm):
            self._fits_left -= 1
            if self._sets.indexed:
                raise RescaledError
            change = objective.scale / scale
            account.note(loss=value * change, gradient_norm=norm * change)
            return account.refused(Status.NOT_FINITE, OUT_OF_RANGE_ONCE)
        if not math.isfinite(value):
            return account.refused(
                Status.NOT_FINITE,
                f"the loss on A, all the data, is {value}: look for NaN and infinity in the "
                "data and the parameters",
            )
        if not math.isfinite(norm):
            return account.refused(Status.NOT_FINITE, "the gradient on A is not finite")
        if norm == 0:
            return account.refused(Status.STATIONARY)
        self._ranks.enter("basis")
        return None

    def search(self) -> Launched[SearchObjective]:
        """Launch f_C around θ. The subspace need not be known yet."""
        return self._engine.launch(Search(self._objective, self._objective_set, self.last_step))

    def refusal_of(self, basis: Basis) -> StepResult | None:
        """The result of a step that cannot continue with its basis; None if it can."""
        account, found = self._account, basis.subspace
        account.lap("basis")
        account.note(
            rank=found.rank,
            products=basis.products,
            curvature_samples=basis.samples,
            graphs_kept=basis.graphs_kept,
        )
        account.count(basis.samples_for_metric)
        account.count((basis.products or int(JACOBIAN)) * basis.samples)
        if not np.isfinite(found.curvature.numpy()).all():
            return account.refused(Status.NOT_FINITE, "a curvature product on B is not finite")
        if not subspace_is_known(found.gram):
            return account.refused(Status.NOT_FINITE, OUT_OF_RANGE)
        self._basis = basis
        self._ranks.enter("search")
        return None

    def coordinates(self, subspace: Subspace) -> Coordinates:
        """The coordinates in which H̄ with floored eigenvalues is the identity."""
        floor = self._optimizer.epsilon
        if self._optimizer.curvature.kind != "hessian":
            rounding = subspace.rank * torch.finfo(subspace.gram.dtype).eps
            floor = min(SEMIDEFINITE_FLOOR * floor, ROUNDINGS * rounding)
        self._coordinates = Coordinates(subspace.curvature, subspace.gram, floor)
        return self._coordinates

    def minimize(self, f: SearchObjective, coordinates: Coordinates) -> BFGSResult | None:
        """BFGS on C from a = 0; None if the value or the gradient at a = 0 is not finite."""
        account = self._account
        start, gradient = f.start()
        self._evaluations += 1
        account.note(loss_before=start, objective_samples=f.samples, evaluations=self._evaluations)
        is_finite = math.isfinite(start) and bool(np.isfinite(gradient).all())
        scale = self._objective.scale
        ritz_values = coordinates.ritz_values.div(scale)
        if self._optimizer.curvature.kind == "fisher":  # quadratic in gradients: the scale squared
            ritz_values.div_(scale)
        account.note(ritz_values=tuple(ritz_values.tolist()))
        if not is_finite:
            return None
        noise = f.noise(start, gradient)
        most, returns = self._optimizer.bfgs_iterations, None
        if most == "auto" and self._basis.damped is not None:
            most = damped_phase.ITERATIONS
        elif most == "auto":
            each = self._work.evaluation(f.samples, account["rank"])
            # As if by autograd: after a cheap basis searches would end before BFGS knows f.
            basis = self._work.basis(account["curvature_samples"], account["rank"])
            returns = DiminishingReturns(start, (self._work_of_gradient() + basis) / each)
            most = MOST_ITERATIONS
        bfgs = BFGS(
            np.zeros_like(gradient),
            start,
            gradient,
            max_iterations=most,
            noise=noise,
            returns=returns,
        )
        best = minimize(bfgs, f)
        self._evaluations += best.evaluations
        account.note(noise=noise, iterations=best.iterations, evaluations=self._evaluations)
        account.count(f.samples_seen)
        return best

    def fitted_its_points(self, f: SearchObjective, best: BFGSResult | None) -> bool:
        """Whether the search lowered the loss of its own points alone; then C becomes all points.

        Searches of terms are long enough to fit the points that they have, and would do so again on
        twice as many. Cost: one forward pass over A, where C is a part of it.
        """
        account, optimizer, terms = self._account, self._optimizer, self._objective.terms
        may_grow = optimizer.subset_sizes.grow and f.samples < account["samples"]
        if terms is None or not may_grow or any(term.subset_size for term in terms.values()):
            return False
        if best is None or not best.value < account["loss_before"]:
            return False
        f.take(best.point)
        value = self._objective.value(self._samples)
        account.count(account["samples"])
        if value < account["loss"]:
            return False
        f.restore()
        subset_growth.take_all(optimizer.param_groups[0])
        _, self._objective_set = self._sets.draw()
        return True

    def take(self, f: SearchObjective, best: BFGSResult | None) -> StepResult | None:
        """Move to θ + d, where d = V̄a* scaled by `lr`; None if that is no decrease."""
        account, optimizer = self._account, self._optimizer
        start = account["loss_before"]
        if best is None or not best.value < start:
            return None
        self._ranks.enter("step")
        value = best.value
        if optimizer._takes_whole_steps:
            taken = f.take(best.point)
        else:
            step = self._ranks.agreed(f.direction(best.point))
            optimizer._scale_by_learning_rate(step)
            taken = f.take_step(step)
            value = f.value()
            account.count(f.samples)
            # Values with and without autograd may differ by rounding: lr = 0 is no decrease.
            if not (value < start and bool(step.any())):
                return None
        # ‖d‖² may underflow to 0; `length` avoids that.
        account.note(step_norm=taken.norm or math.hypot(*map(length, taken.pieces)))
        self._ranks.settle()
        optimizer._keep_step(taken.pieces)
        if self._basis.damped is None:
            self._choose_dimension(f, start - value)
        else:
            self._choose_damping(self._basis.damped, best, value)
        return account.moved(str(best.reason), loss_after=value)

    def _choose_damping(self, damped: DampedDirections, best: BFGSResult, after: float) -> None:
        """Choose the damping of the next step, or that Krylov steps follow."""
        damping = damped.best_damping(self._coordinates.to_basis(best.point))
        group, before = self._optimizer.param_groups[0], self._account["loss_before"]
        reason = damped_phase.learn(group, damping, before, after)
        self._account.note(damping=damping, dimension_reason=reason)

    def _choose_dimension(self, f: SearchObjective, decrease: float) -> None:
        """Choose K of the next step, unless it is given, or this step had a longer basis."""
        optimizer, account = self._optimizer, self._account
        group = optimizer.param_groups[0]
        if optimizer.dimension != "auto" or group[escalation.LONGER_BASIS]:
            return
        work, rows = self._work, range(1, self._basis.subspace.rank + 1)
        fixed, evaluations = self._work_of_gradient(), account["evaluations"]
        samples, searched = account["curvature_samples"], f.samples
        reason = directions.learn(
            group,
            self._basis.subspace,
            decrease,
            [
                fixed
                + work.basis(samples, k, by_jacobian=self._basis.by_jacobian)
                + evaluations * work.evaluation(searched, k)
                for k in rows
            ],
            comparable=self._sets.drawn
            and samples == account["samples"]
            and optimizer.curvature.kind == "gauss-newton",
            most=longest_basis(self._objective),
            enough=directions.USUAL if self._schedule.awaits_factors(group) else math.inf,
        )
        account.note(dimension_reason=reason)

    def _work_of_gradient(self) -> float:
        """Of the gradient on A, and of the squares on A, which take about as long."""
        walks = 2 if isinstance(self._schedule.current, FisherDiagonal) else 1
        return walks * self._work.gradient(self._account["samples"])

    def no_decrease(self, f: SearchObjective, best: BFGSResult | None) -> StepResult:
        """The result of a step whose search found no decrease; the parameters are θ again."""
        account = self._account
        if best is None:
            return account.refused(Status.NOT_FINITE, "the loss or its gradient on C is not finite")
        if best.value < account["loss_before"]:
            return account.refused(Status.NO_DECREASE, SCALED_AWAY)
        generator = self._optimizer._generator()
        return account.no_decrease(str(best.reason), self._objective_set, f.theta, generator)

    def last_step(self) -> Tensor:
        """The last step [n] before `lr` scaled it; zeros if there is none.

        It is divided by the current `lr`, which a schedule changes only little from step to step.
        """
        step = self._optimizer._last_step()
        self._optimizer._scale_by_learning_rate(step, back=True)
        return step


def longest_basis(objective: Objective) -> int:
    """The most directions of a lengthened basis: n, or as many as fit `activation_memory`."""
    parameters = objective.parameters
    vector = parameters.numel * torch.finfo(parameters.dtype).bits // 8
    fitting = min(parameters.numel, objective.activation_memory // vector)
    return int(objective.ranks.agreed_number(fitting))

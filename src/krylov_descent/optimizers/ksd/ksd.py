"""Krylov Subspace Descent (Vinyals & Povey 2011), Algorithm 3."""

import functools
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from krylov_descent.algorithms.basis_storage import Storage
from krylov_descent.algorithms.bfgs import BFGS, BFGSResult, Vector
from krylov_descent.algorithms.minimizer import minimize
from krylov_descent.algorithms.subspace import Coordinates, LaunchedSubspace, subspace_is_known
from krylov_descent.cuda.graphs.host_transfer import OnTheWay
from krylov_descent.cuda.graphs.record_basis import basis_is_recorded
from krylov_descent.cuda.graphs.record_search import Taken
from krylov_descent.cuda.graphs.side_stream import beside_what_follows
from krylov_descent.curvature.preconditioners.preconditioner import Preconditioner
from krylov_descent.curvature.products import Curvature, CurvatureKind, CurvatureProduct
from krylov_descent.objective.batches import InMemory, Nothing, Samples
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.loss_scale import has_squares, length
from krylov_descent.objective.losses import Loss
from krylov_descent.objective.network import Forward
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.subsets import LEAST_FIXED, Reservoir, Size, SubsetSizes, draw
from krylov_descent.optimizers.account import MOST_FITS, Account
from krylov_descent.optimizers.base import Closure, DataOptimizer
from krylov_descent.optimizers.ksd import escalation
from krylov_descent.optimizers.ksd import subset_growth as growing_sets
from krylov_descent.optimizers.ksd.preconditioner_schedule import Stages
from krylov_descent.optimizers.ksd.spaces import (
    AnySubspace,
    BasisKind,
    Function,
    Spaces,
    awaited,
    objective_in,
)
from krylov_descent.optimizers.result import SCALED_AWAY, Status, StepResult
from krylov_descent.runtime.descriptions import described
from krylov_descent.runtime.precision import derivatives_in_tf32
from krylov_descent.runtime.ranks import ProcessGroup, Shard
from krylov_descent.runtime.validation import check_counts, check_flags, check_not_negative

PREVIOUS_STEP = "previous_step"  # the last one; those before have a number behind it
# The paper floors H̄ at ε of its largest eigenvalue, as it does D. Late in training the directions
# that still matter have less curvature than that, and the search must find out what the floor hid:
# 15 evaluations where 6 do. Where the Hessian's are negative, the floor alone says how far to go.
SEMIDEFINITE_FLOOR = 0.01
OUT_OF_RANGE = (
    "the gradient's length in the preconditioner, gᵀD⁻¹g, is infinite or zero in its precision: "
    "scale the loss, or a preconditioner of your own"
)
OUT_OF_RANGE_ONCE = (
    "squares of the gradient are infinite or zero in its precision, and `data` is a stream, which "
    "is not walked over again; the next step scales the loss"
)


class KSD(DataOptimizer):
    """Krylov Subspace Descent: second-order training without learning rate or damping.

    Each step builds a Krylov subspace of dimension K from the gradient and curvature products,
    adds previous steps, and minimises the objective itself inside it with BFGS. Three sets of
    samples serve a step: A (all the data) for the gradient, random B for the curvature, random C
    for the search.

    Args:
        model: the module to train.
        loss: one of torch's losses, a callable `(outputs, targets) -> one number per sample`, or
            one that returns their mean.
        params: the parameters to train, as torch.optim takes them (tensors, named tensors, or
            groups with `weight_decay` and `lr`); all of the model's by default. Those with
            `requires_grad=False` are left alone.
        dimension: K, the dimension of the Krylov subspace.
        curvature: "gauss-newton", "hessian" or "fisher".
        preconditioner: "fisher-diagonal", "kronecker" (see `KroneckerFactors`; after 20 steps with
            the diagonal), "identity", or an object with the `Preconditioner` protocol.
        subset_size: size of B and C: "fixed" (N/K, at least 1,000), "auto" (the same, but where all
            steps have the same data in memory it begins with less for large models on a CPU, down
            to 250, and is doubled when less than half of a step's worth on C is seen on A), "paper"
            (N/K), a number of samples, a fraction of them, or a pair of these for B and C. The
            first two are all samples where two disjoint sets of that size do not fit.
        previous_steps: m, how many of the last steps join the subspace. The paper has 1; more of
            them let the deviations of single steps, each for its own C, cancel.
        bfgs_iterations: the most iterations of the search.
        epsilon: floor of the preconditioner, relative to its largest entry (a tenth of it is the
            damping of Kronecker factors), and of the Hessian's eigenvalues in the subspace; those
            of the other curvatures have a hundredth of it.
        weight_decay: λ of the L2 term ½λ‖θ‖², which belongs to the objective.
        lr: scales the step that the search found; for schedulers. Leave it at 1.
        seed: of the random sets.
        forward: `forward(model, inputs) -> outputs`, where calling the model is not enough.
        micro_batch: the most samples handled at a time; by default as many as fit
            `activation_memory`.
        activation_memory: bytes that activations may take; 1 GiB on a CPU and a quarter of the
            free memory on a GPU by default.
        cuda_graphs: on a GPU, record products and evaluations once and replay them; False to run
            them as they are.
        tf32: on a GPU, backward passes and curvature products in TensorFloat-32: several times as
            fast for large layers, with three digits. Forward passes keep torch's own setting, so
            what is minimised stays exact. (The squares for "fisher-diagonal" may be in
            TensorFloat-32 in any case: see `precision.rough_products`.)
        basis: "replicated" keeps the whole basis on every rank; "sharded" keeps a slice of each
            vector, and sends vectors in each evaluation (see below).
        basis_dtype: torch.bfloat16 to keep the basis in half the memory of float32.
        basis_device: "cpu" to keep the basis in the host's (pinned) memory, from where it is
            fetched in blocks.
        process_group: whose ranks train together: a torch.distributed.ProcessGroup or a DeviceMesh
            of one dimension; all processes by default.

    Under an initialised process group (`torchrun`) each rank gives its own part of the data to
    `step`, of any size, and gets the result of one process on all of them (with Kronecker factors
    one that is as good); B and C are drawn from all of them. Every rank must call `step`, with the
    same model and options.

    Cost of a step, in gradients over one sample: |A|·4/3 + (K + m)·|B|·4/3 + evaluations·|C|,
    with about K evaluations.

    Memory beyond the model, the data and activations, in vectors of n numbers:

    | what | vectors |
    | --- | --- |
    | basis | K + m |
    | previous steps (kept between steps); copies of them when the basis begins | m; m |
    | preconditioner (kept between steps; Kronecker factors see there) | 1 |
    | gradient on A (basis); copy of the parameters and gradient on C (search) | 1 to 2 |
    | working vectors | 2 to 3 |
    | together at most, if the preconditioner is a diagonal | K + 8 with m = 1, else K + 3m + 3 |

    The basis is what grows with K. It takes, in bytes for float32 parameters:

    | how it is kept | where | bytes |
    | --- | --- | --- |
    | by default | with the parameters | 4(K + m)n |
    | `basis="sharded"`, R ranks | with the parameters, on each rank | 4(K + m)n/R |
    | `basis_dtype=torch.bfloat16` | with the parameters | 2(K + m)n |
    | `basis_device="cpu"` | with the host | 4(K + m)n |

    and the last three can be combined. With a preconditioner that does not act entry by entry, as
    "kronecker", the first takes that twice: D times the basis is kept, too. In bfloat16 and on the
    host, blocks of a sixteenth of it, of 64 MiB at most, come on top. A sharded basis sends about
    2n numbers per evaluation, where the replicated one sends K + m + 1.

    The table is for steps that are taken. A step that finds no decrease takes a few vectors more,
    for the noise of its gradient, and the steps after it may have up to `activation_memory` of
    basis (see `optimizers.escalation`).

    Activations: those of one micro-batch; for curvature products the graphs of all of B while
    they fit `activation_memory`, else they are rebuilt for each product (`graphs_kept`). With CUDA
    graphs, which are for models up to 16 MiB, the basis, activations (of A up to 1 GiB) and each
    recording's own working vectors stay allocated between steps, beyond the table.

    Example:
        >>> optimizer = KSD(model, torch.nn.CrossEntropyLoss())
        >>> for _ in range(30):
        ...     result = optimizer.step((inputs, targets))
        ...     print(result)
    """

    data_parallel = True
    learnt = (*growing_sets.ENTRIES, *escalation.ENTRIES)

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        params: Any = None,
        *,
        dimension: int = 20,
        curvature: CurvatureKind = "gauss-newton",
        preconditioner: str | Preconditioner = "fisher-diagonal",
        subset_size: Size | tuple[Size, Size] = "auto",
        previous_steps: int = 3,
        bfgs_iterations: int = 30,
        epsilon: float = 1e-4,
        weight_decay: float = 0.0,
        lr: float = 1.0,
        seed: int = 0,
        forward: Forward | None = None,
        micro_batch: int | None = None,
        activation_memory: int | None = None,
        cuda_graphs: bool = True,
        tf32: bool = False,
        basis: BasisKind = "replicated",
        basis_dtype: torch.dtype | None = None,
        basis_device: torch.device | str | None = None,
        process_group: ProcessGroup = None,
    ) -> None:
        check_counts(
            dimension=dimension, previous_steps=previous_steps, bfgs_iterations=bfgs_iterations
        )
        check_flags(tf32=tf32)
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
        self._stages = Stages(preconditioner, epsilon)
        least = growing_sets.least_samples(self.objective.parameters)
        self.subset_sizes = SubsetSizes.checked(subset_size, dimension, least)
        if self.subset_sizes.grow:
            growing_sets.begin(self.param_groups[0])
        escalation.begin(self.param_groups[0])
        self._last_data = growing_sets.LastData()
        self.bfgs_iterations = bfgs_iterations
        self.epsilon = epsilon
        self.tf32 = tf32
        like = self.objective.parameters.tensors[0]
        storage = Storage.checked(basis_dtype, basis_device, like)
        self.spaces = Spaces(basis, storage, dimension)
        self.spaces.check(self.preconditioner)
        numbered = (f"{PREVIOUS_STEP}_{i}" for i in range(2, previous_steps + 1))
        self._previous = [PREVIOUS_STEP, *numbered]  # in the state, newest first

    @overload  # type: ignore[override]
    def step(self, data: None = None, *, closure: None = None) -> None: ...
    @overload
    def step(
        self,
        data: Any,
        *,
        closure: Closure | None = None,
        curvature_data: Any = None,
        objective_data: Any = None,
    ) -> StepResult: ...

    def step(
        self,
        data: Any = None,
        *,
        closure: Closure | None = None,
        curvature_data: Any = None,
        objective_data: Any = None,
    ) -> StepResult | None:
        """One iteration of Algorithm 3.

        Args:
            data: the set A: `(inputs, targets)`, a Dataset, a DataLoader or an iterable of
                batches. Batches are moved to the parameters' device.
            closure: called once before the step, with its result and its gradients left alone;
                for frameworks that wrap an optimiser and pass one.
            curvature_data: the set B, where it is not to be drawn from `data`.
            objective_data: the set C, likewise.

        Returns:
            What the step did. None for a call without data, with which checkpoint tools create
            the optimiser's state.

        The parameters change only if the objective on C went down; otherwise they are bit for bit
        as before. After any error so are the optimiser's state and what it knows of the model.
        """
        if not self._begins(data, closure):
            return None
        group = self.param_groups[0]
        escalation.begin(group)  # a state that was loaded may be older
        # With few digits a refused step may be refused for want of them.
        tf32 = self.tf32 and not escalation.is_under_way(group)
        given = {"curvature_data": curvature_data, "objective_data": objective_data}
        with self._working(**given) as objective, derivatives_in_tf32(tf32):
            drawn = curvature_data is None and objective_data is None
            if self.subset_sizes.grow:
                self._compare_data(data, drawn=drawn)
            result = _Step(self, objective).run(data, curvature_data, objective_data)
            if self.subset_sizes.grow:
                growing_sets.learn(group, result)
            if result.status is Status.MOVED:
                escalation.take_back(group, self.dimension)
            elif escalation.is_refusal(result):
                result = escalation.escalate(
                    group, result, self.dimension, self._longest_basis(), by_hand=not drawn
                )
        return result

    @property
    def preconditioner(self) -> Preconditioner:
        """D as it was asked for. Kronecker factors are there after the first step that has them."""
        return self._stages.last

    def _compare_data(self, data: Any, *, drawn: bool) -> None:
        """Note whether the step has the data of the step before, and draws its sets from them."""
        group = self.param_groups[0]
        growing_sets.begin(group)  # a state that was loaded may be from sets that did not grow
        fingerprint = self._last_data.fingerprint(self._samples(data), self.objective.ranks)
        group[growing_sets.SAME_DATA] = drawn and growing_sets.same_data(group, fingerprint)
        group[growing_sets.FINGERPRINT] = fingerprint

    @property
    def _sizes(self) -> SubsetSizes:
        """Of B and C at this step."""
        group = self.param_groups[0]
        sizes = replace(self.subset_sizes, growth=escalation.set_growth(group))
        if not (self.subset_sizes.grow and group[growing_sets.SAME_DATA]):
            return replace(sizes, least=LEAST_FIXED)
        return replace(sizes, doublings=int(group[growing_sets.DOUBLINGS]))

    def _longest_basis(self) -> int:
        """How many directions a basis may have, if it is made longer than asked for."""
        parameters = self.objective.parameters
        vector = parameters.numel * parameters.dtype.itemsize
        fitting = min(parameters.numel, self.objective.activation_memory // vector)
        return int(self.objective.ranks.agreed_number(fitting))

    @property
    def _dimension(self) -> int:
        """K of this step."""
        return max(self.dimension, int(self.param_groups[0][escalation.LONGER_BASIS]))

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
            "`basis`": self.spaces.basis,
            "`basis_dtype`": self.spaces.storage.dtype,
            "`basis_device`": self.spaces.storage.device,
        }

    def _learners(self) -> list[object]:
        return [*super()._learners(), self.curvature, *self._stages.learners, self._last_data]

    def _foreign(self) -> list[object]:
        return self._stages.foreign

    def _create_state(self) -> None:
        self._zero_state(*self._previous)


class _Step:
    """One step under way: the algorithm's variables and the account of what it cost."""

    def __init__(self, optimizer: KSD, objective: Objective) -> None:
        self.optimizer, self.objective, self.ranks = optimizer, objective, objective.ranks
        self.stages = optimizer._stages
        self.stages.begin(optimizer.steps, objective)
        self.account = Account(objective)
        self.before_basis: torch.cuda.Event | None = None  # the moment of its launch
        self.fits_left = MOST_FITS
        self.indexed = False  # whether A can be walked over again, on all ranks

    def run(self, data: Any, curvature_data: Any, objective_data: Any) -> StepResult:
        """Algorithm 3, lines 3 to 13."""
        account, recordings = self.account, self.objective.recordings
        # Lines 3-5. The sets; gradient g and preconditioner D on A.
        self.ranks.enter("gradient")
        samples = self.optimizer._samples(data)
        ahead = self.may_go_ahead(samples, curvature_data)
        # θ, for later; copied while a GPU is busy with the basis.
        copied, basis = functools.cache(self.copy_of_theta), None
        refuted = recordings.refuted
        with recordings.postponed() if ahead else nullcontext():
            found, curvature_set, objective_set = self.gradient_and_sets(
                samples, curvature_data, objective_data
            )
            g = found.gradient
            found = replace(found, gradient=g.new_empty(0))  # which is let go before the search
            sent = OnTheWay(g.norm()) if found.later is None else None
            numbers = functools.cache(functools.partial(self.numbers, found, sent))
            if ahead and self.basis_is_recorded:
                # Launched while the GPU is busy with the gradient, of which nothing is known yet.
                with recordings.meanwhile(lambda: (copied(), numbers())):
                    basis = self.basis(curvature_set, g)
        value, norm = numbers()
        recordings.answer()  # of B, where the few samples of A told nothing
        if ahead and (recordings.refuted > refuted or not self.basis_is_recorded):
            # The recordings were not what the model does: all of it again, without them.
            return self.run(data, curvature_data, objective_data)
        if not has_squares(norm, g.dtype):
            norm = self.ranks.agreed_number(length(g))
        account.note(loss=value, samples=found.samples, gradient_norm=norm)
        account.count(found.samples)
        scale = self.objective.scale
        if self.fits_left and self.objective.fit_scale(value, norm):
            self.fits_left -= 1
            del g, basis
            if self.indexed:  # all of it again at that scale
                return self.run(data, curvature_data, objective_data)
            change = self.objective.scale / scale
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

        # Lines 6-9. Basis V and projected curvature on B; coordinates in which it is round.
        self.ranks.enter("basis")
        with recordings.meanwhile(copied):
            launched = self.noted(basis or self.basis(curvature_set, g))
        del g, basis
        theta, result = copied(), None
        try:
            # On a GPU the search begins behind the basis, before anything is known of that.
            # C of the user's may come to the GPU only now.
            since = self.before_basis if objective_data is None else None
            subspace, recorded = awaited(
                launched, self.objective, objective_set, theta, self.previous_step, since
            )
            account.lap("basis")
            account.note(rank=subspace.rank)
            if not np.isfinite(subspace.curvature.numpy()).all():
                return account.refused(Status.NOT_FINITE, "a curvature product on B is not finite")
            if not subspace_is_known(subspace.gram):
                return account.refused(Status.NOT_FINITE, OUT_OF_RANGE)
            coordinates = Coordinates(subspace.curvature, subspace.gram, self.curvature_floor)

            # Lines 10-13. The best point a* of the subspace on C; d_prev ← V̄a*, θ ← θ + d_prev.
            self.ranks.enter("search")
            function = objective_in(
                subspace, coordinates, self.objective, objective_set, theta, recorded
            )
            start, gradient = function.start()
            best = self.search(function, start, gradient, coordinates)
            taken = None
            if best is not None and best.value < start:
                taken = self.take(function, theta, best, start)
            if best is not None and taken is not None:
                result = account.moved(str(best.reason), loss_after=taken)
        finally:
            if result is None:
                self.objective.parameters.assign(theta)
                recordings.finish()
        if result is not None:
            return result
        if best is None:
            return account.refused(Status.NOT_FINITE, "the loss or its gradient on C is not finite")
        if best.value < start:
            return account.refused(Status.NO_DECREASE, SCALED_AWAY)
        generator = self.optimizer._generator()
        return account.no_decrease(str(best.reason), objective_set, theta, generator)

    def gradient_and_sets(
        self, samples: Samples, curvature_data: Any, objective_data: Any
    ) -> tuple[Evaluation, Samples, Samples]:
        """Walk over A once; B and C by index, or from the stream on its way through."""
        optimizer, ranks = self.optimizer, self.ranks
        by_hand = curvature_data is not None and objective_data is not None
        shard = ranks.shard_if_known(len(samples) if samples.indexed else None)
        self.indexed = shard is not None
        if not by_hand and shard is None:
            # Each rank draws keys of its own for the samples that flow by it.
            generator = optimizer._generator(ranks.rank)
            samples = Reservoir(samples, optimizer._sizes, generator, ranks)

        @functools.cache
        def drawn() -> list[Samples]:
            return [Nothing(), Nothing()] if by_hand else self.draw(samples, shard)

        # By index, they are drawn while a GPU is busy with the gradient.
        early = self.objective.recordings.meanwhile(drawn)
        with nullcontext() if shard is None else early:
            found = self.stages.current.update(self.objective, samples)
        sets = drawn()
        if curvature_data is not None:
            sets[0] = optimizer._samples(curvature_data, "curvature_data")
        if objective_data is not None:
            sets[1] = optimizer._samples(objective_data, "objective_data", repeatable=True)
        return found, sets[0], sets[1]

    def draw(self, samples: Samples, shard: Shard | None) -> list[Samples]:
        """B and C, on the device; from a stream once it is over."""
        sets: list[Samples] = [Nothing(), Nothing()]
        if isinstance(samples, Reservoir):
            sets = list(samples.draw())
        with self.ranks.own_work():
            if shard is not None:
                optimizer = self.optimizer
                sets = list(draw(samples, optimizer._sizes, optimizer._generator(), shard))
            device = self.objective.parameters.device
            sets = [held.to(device) if isinstance(held, InMemory) else held for held in sets]
        return sets

    def numbers(self, found: Evaluation, sent: OnTheWay | None) -> tuple[float, float]:
        """f and ‖g‖ on A, which are waited for, and with them whether the recordings hold.

        Args:
            found: on A.
            sent: ‖g‖; None where it comes with the value.
        """
        self.objective.recordings.answer()
        found = found.there()
        norm = self.ranks.agreed_number(found.norm if sent is None else sent.read())
        self.account.lap("gradient")
        return found.value, norm

    def may_go_ahead(self, samples: Samples, curvature_data: Any) -> bool:
        """Whether the basis may be launched before anything is known of the gradient.

        That takes a recording of it, and samples and a D to do it all again if need be.
        """
        there_again = isinstance(samples, InMemory) and curvature_data is None
        return there_again and self.stages.can_be_made_again and self.basis_is_recorded

    @property
    def basis_is_recorded(self) -> bool:
        """Whether the whole basis is one recording, that has not been forgotten."""
        longer = self.optimizer._dimension > self.optimizer.dimension
        recorded = basis_is_recorded(self.objective.recordings, self.optimizer.curvature.kind)
        return recorded and not longer

    def basis(
        self, curvature_set: Samples, gradient: Tensor
    ) -> tuple[AnySubspace | LaunchedSubspace, CurvatureProduct, int]:
        """Algorithm 2; with the product, and how many samples D took beside it."""
        optimizer = self.optimizer
        product = optimizer.curvature.at(self.objective, curvature_set)
        learned = self.stages.learn(self.objective, product)
        previous = [optimizer._flat_state(key) for key in optimizer._previous]
        self.before_basis = self.objective.recordings.now()
        subspace = optimizer.spaces.subspace(
            product,
            self.stages.current,
            gradient,
            previous,
            optimizer._dimension,
            lasting=self.stages.lasting,
        )
        return subspace, product, learned

    def noted(
        self, basis: tuple[AnySubspace | LaunchedSubspace, CurvatureProduct, int]
    ) -> AnySubspace | LaunchedSubspace:
        """The subspace, once its cost is on the account."""
        subspace, product, learned = basis
        self.account.count(learned)
        self.account.note(
            products=product.products,
            curvature_samples=product.samples,
            graphs_kept=product.kept,
        )
        self.account.count(product.products * product.samples)
        return subspace

    def copy_of_theta(self) -> Tensor:
        """θ [n]; a GPU copies it beside the basis, which only reads the parameters."""
        parameters = self.objective.parameters
        with beside_what_follows(self.before_basis, parameters.device):
            return parameters.copy()

    def previous_step(self) -> Tensor:
        """The last step [n] as its search found it, before `lr` scaled it; zeros if there is none.

        With the `lr` of now: a schedule changes that by little from step to step.
        """
        step = self.optimizer._flat_state(PREVIOUS_STEP)
        self.optimizer._scale_by_learning_rate(step, back=True)
        return step

    @property
    def curvature_floor(self) -> float:
        """Of H̄'s eigenvalues, relative to the largest."""
        semidefinite = self.optimizer.curvature.kind != "hessian"
        return self.optimizer.epsilon * (SEMIDEFINITE_FLOOR if semidefinite else 1.0)

    def search(
        self, function: Function, start: float, gradient: Vector, coordinates: Coordinates
    ) -> BFGSResult | None:
        """BFGS from a = 0, given value and gradient there; None where they are not finite."""
        self.account.note(loss_before=start, objective_samples=function.samples, evaluations=1)
        is_finite = math.isfinite(start) and bool(np.isfinite(gradient).all())
        noise = function.noise(start, gradient, self.previous_step) if is_finite else math.nan
        # Here, where a GPU is busy with the first trial.
        scale = self.objective.scale
        ritz_values = coordinates.ritz_values.div(scale)
        if self.optimizer.curvature.kind == "fisher":  # of squared gradients
            ritz_values.div_(scale)
        self.account.note(ritz_values=tuple(ritz_values.tolist()))
        if not is_finite:
            return None
        bfgs = BFGS(
            np.zeros_like(gradient),
            start,
            gradient,
            max_iterations=self.optimizer.bfgs_iterations,
            noise=noise,
        )
        best = minimize(bfgs, function)
        self.account.note(noise=noise, iterations=best.iterations, evaluations=best.evaluations + 1)
        self.account.count(function.samples_seen)
        return best

    def take(
        self, function: Function, theta: Tensor, best: BFGSResult, start: float
    ) -> float | None:
        """Write θ + d into the parameters and return the objective on C there.

        With lr ≠ 1 it is evaluated once more; None if the scaled step is no decrease.
        """
        self.ranks.enter("step")
        optimizer, parameters, value = self.optimizer, self.objective.parameters, best.value
        taken = function.take(best.point) if optimizer._takes_whole_steps else None
        if taken is None:
            step = self.ranks.agreed(function.direction(best.point))
            scaled = optimizer._scale_by_learning_rate(step)
            sent = OnTheWay(step.norm())
            parameters.assign(theta + step)
            if scaled:
                value = function.value()
                self.account.count(function.samples)
                # Values with and without autograd may differ by rounding: lr = 0 is no decrease.
                if not (value < start and bool(step.any())):
                    return None
            taken = Taken(parameters.copied_pieces(step), sent)
            optimizer._create_state()
        # Squares of a step may be out of range as well.
        norm = taken.norm.read()
        self.account.note(step_norm=norm or math.hypot(*map(length, taken.pieces)))
        self.ranks.settle()
        optimizer._push_pieces(optimizer._previous, taken.pieces)
        return value

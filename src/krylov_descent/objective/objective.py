"""The function that is minimised: model, loss and L2, over any set of samples.

    f(θ) = Σᵢ nᵢ(θ) / Σᵢ wᵢ  +  ½ Σ λ‖p‖²        (a mean over samples; see `losses`)

`Objective` processes the samples in micro-batches. The result does not depend on the sizes of the
batches. Per-sample losses are summed in float64, because progress that matters can be 1e-8 of the
value. f is evaluated at the module's current parameters; to evaluate it at another point, write
that point into the parameters first (`FlatParameters.assign`).

Under a process group each rank processes its own samples, and sums are over the samples of all
ranks (see `ranks`).
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from krylov_descent.objective import contract_probe as probes
from krylov_descent.objective.batches import Batch, InMemory, Samples, as_samples
from krylov_descent.objective.evaluation import Evaluation, Sums, Whole
from krylov_descent.objective.layers.squared_gradients import SquaredGradients
from krylov_descent.objective.loss_scale import fitting_scale, has_squares
from krylov_descent.objective.network import Forward, Network, Params
from krylov_descent.objective.parameters import FlatParameters
from krylov_descent.objective.term import LossOrTerms, Term
from krylov_descent.objective.term_batches import TermBatch
from krylov_descent.objective.terms import Terms
from krylov_descent.runtime.engine import Engine
from krylov_descent.runtime.process_group import ProcessGroup
from krylov_descent.runtime.ranks import Ranks
from krylov_descent.runtime.validation import check_counts

CPU_ACTIVATION_MEMORY = 1 << 30


class MadeOfSquares(Protocol):
    """A consumer of mean squared gradients that needs no decision on the host."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that hold its result: the same at every step, updated in place."""

    def take_squares(self, parameters: FlatParameters, squares: Tensor) -> None:
        """Compute the result from squares [n], which may be overwritten."""


class Objective:
    """Model, loss and L2 as a function of one flat vector over a stream of batches.

    Args:
        model: any module. A compiled model runs compiled for values and gradients. It runs eagerly
            for second derivatives and per-sample gradients, which compiled code does not support.
        loss: see `krylov_descent.objective.losses`; or a dict of `Term`s, whose weighted sum is f.
        forward: `forward(model, inputs) -> outputs`. The default calls `model(inputs)`,
            `model(*inputs)` for a tuple or list, `model(**inputs)` for a dict. It may itself
            compute derivatives, as a physics-informed net does.
        params: the parameters to train, as torch.optim takes them (tensors, or groups with a
            `weight_decay` each); by default all parameters of the model.
        micro_batch: the most samples per forward pass; by default as many as fit
            `activation_memory`, measured on a few samples.
        activation_memory: bytes for activations; by default 1 GiB on a CPU and a quarter of the
            free memory on a GPU.
        process_group: the ranks to sum over: a torch.distributed.ProcessGroup or a DeviceMesh of
            one dimension; by default all processes.

    Attributes:
        network: model, loss and parameters, for one batch at a time.
        terms: the terms of f with their samples; None if the samples come with each call.
        engine: runs the work of a step.
        squared_gradients: computes squared per-sample gradients, and caches how to for this model.
        scale: the factor on f and its derivatives in a step; see `loss_scale`.
        ranks: the processes that train together.

    Cost: a value takes one forward pass over the samples, a gradient one forward and one backward
    pass. The squares take about one third more for stacks of Linear layers. Memory: activations
    of one micro-batch and two vectors of n numbers for each of gradient and squares.

    Under an initialised process group every rank passes its own part of the samples, which may be
    empty, and gets the result over all samples. So all ranks must make the same calls. Terms are
    the same on all ranks, and `terms.samples` are a rank's part of their samples.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossOrTerms,
        *,
        forward: Forward | None = None,
        params: Params | None = None,
        micro_batch: int | None = None,
        activation_memory: int | None = None,
        process_group: ProcessGroup = None,
    ) -> None:
        limits = {"micro_batch": micro_batch, "activation_memory": activation_memory}
        check_counts(**{name: limit for name, limit in limits.items() if limit is not None})
        self.terms: Terms | None = None
        given: Any = loss
        if isinstance(given, Term) or (
            isinstance(given, list | tuple) and all(isinstance(term, Term) for term in given)
        ):
            raise TypeError('`loss` must be a dict of terms by name, as {"equation": Term(...)}')
        if isinstance(loss, Mapping):
            if forward is not None:
                raise TypeError(
                    "`forward` has no meaning beside a dict of terms: a term has a residual, "
                    "which calls the model"
                )
            self.terms = Terms(loss)
            loss, forward = self.terms.loss, self.terms.forward
        self.network = Network(model, loss, forward, params)
        self.engine = Engine()
        self.squared_gradients = SquaredGradients(self.network)
        self._micro_batch = micro_batch
        self._activation_memory = activation_memory
        self._findings: probes.Findings | None = None
        self._look_again = True
        self.scale = 1.0
        self.ranks = Ranks(self.parameters.device, process_group)

    @property
    def learners(self) -> list[object]:
        """The objects that cache facts about model and loss."""
        return [self, self.network, self.network.loss, self.squared_gradients]

    @property
    def parameters(self) -> FlatParameters:
        """The trainable parameters as a flat vector."""
        return self.network.parameters

    def refresh(self, groups: list[dict[str, Any]]) -> None:
        """At the start of a step, update which parameters are trained and their weight decay."""
        self._look_again = True
        if self.network.refresh(groups):
            self._findings = None
            self.engine.clear()
        self.ranks.device = self.parameters.device

    @contextmanager
    def scaled(self) -> Iterator[None]:
        """Context manager in which f is multiplied by `scale`."""
        self.network.rescale(self.scale)
        try:
            yield
        finally:
            self.network.rescale(1.0)

    def fit_scale(self, value: float, norm: float) -> bool:
        """Within a step, change the scale if squares of gradients are out of range.

        Args:
            value: f under the current scale.
            norm: ‖g‖ under the current scale; equal on all ranks.

        Returns:
            Whether the scale changed. If so, earlier results have the old scale.
        """
        dtype = self.parameters.dtype
        scale = fitting_scale(value, norm, self.scale, dtype)
        if not has_squares(norm, dtype):  # all ranks take the same branch
            scale = self.ranks.agreed_number(scale)
        if scale == self.scale:
            return False
        self.scale = scale
        self.network.rescale(scale)
        self.engine.clear()
        return True

    @property
    def activation_memory(self) -> int:
        """The number of bytes for activations."""
        if self._activation_memory is None:
            # Measured once: a limit that follows the free memory would make runs differ.
            device = self.parameters.device
            self._activation_memory = (
                free_memory(device) // 4 if device.type == "cuda" else CPU_ACTIVATION_MEMORY
            )
        return self._activation_memory

    # Values and gradients -----------------------------------------------------------------

    def value(self, data: Any) -> float:
        """f over the data of all ranks."""
        sums = self.sums()
        with self.ranks.own_work():
            for batch in self.micro_batches(data):
                with self.value_mode():
                    sums.add(batch, self.network.sample_losses(batch))
        return sums.value()

    def losses(self, data: Any) -> Tensor:
        """nᵢ of each of this rank's N samples: [N], float64, on the CPU, without L2."""
        found = []
        for batch in self.micro_batches(data):
            with self.value_mode():
                found.append(self.network.sample_losses(batch).detach().double())
        if not found:
            if self.ranks.together:
                return torch.empty(0, dtype=torch.float64)
            raise ValueError("`data` is empty: it must hold at least one sample")
        return torch.cat(found).cpu()

    def losses_by_term(self, whole: TermBatch) -> dict[str, Tensor]:
        """The losses of this rank's share of the samples, with their factors.

        Args:
            whole: the samples of all ranks.

        Returns:
            [m], float64, on the CPU, for each term that the share has samples of.
        """
        # All ranks probe the same samples, so they find out the same of the model.
        self.probe(whole)
        found: dict[str, list[Tensor]] = {}
        for piece in whole.share(self.ranks.rank, self.ranks.size).split(self.micro_batch):
            batch = piece.to(self.parameters.device)
            with self.value_mode():
                losses = self.network.sample_losses(batch).detach().double().cpu()
            for name, part in batch.parts():
                found.setdefault(name, []).append(losses[: part.size])
                losses = losses[part.size :]
        return {name: torch.cat(pieces) for name, pieces in found.items()}

    def comparable_losses(self, samples: Samples) -> Tensor:
        """Losses that can be compared between passes: [N] in a fixed order, or their sum [1].

        The sum is used if the samples are not in memory, because a loader may change their order.
        """
        losses = self.losses(samples)
        return losses if isinstance(samples, InMemory) else losses.sum().reshape(1)

    def value_and_gradient(self, data: Any) -> Evaluation:
        """f and its gradient over the data, run by the engine."""
        return self.engine.launch(MeanGradient(self, data)).result()

    def part_of_value_and_gradient(self, data: Any, normaliser: float) -> Evaluation:
        """This rank's summand of f and its gradient; see `Sums.part`.

        Args:
            data: this rank's samples.
            normaliser: Σ wᵢ over the samples of all ranks.
        """
        sums = self.sums()
        total: Tensor | None = None
        with self.ranks.own_work():
            total = self._add_gradients(sums, data)
        return sums.part(total, normaliser)

    def sums(self) -> Sums:
        """New, empty sums for one pass over samples."""
        return Sums(self.network.loss, self.parameters, self.ranks)

    def _add_gradients(self, sums: Sums, data: Any) -> Tensor | None:
        total: Tensor | None = None
        for batch in self.micro_batches(data):
            losses = self.network.sample_losses(batch)
            sums.add(batch, losses)
            total = self.parameters.add(total, self.network.gradients(losses))
        return total

    def value_gradient_and_squares(
        self, data: Any, into: MadeOfSquares | None = None
    ) -> Evaluation:
        """f, its gradient and the mean of squared per-sample gradients, in one pass over the data.

        Args:
            data: the samples.
            into: consumes the squares; if given, the squares are not returned.
        """
        return self.engine.launch(MeanSquares(self, data, into)).result()

    def walk(self, data: Any) -> Evaluation:
        """f and its gradient, accumulated over micro-batches here and now."""
        sums = self.sums()
        total: Tensor | None = None
        with self.ranks.own_work():
            total = self._add_gradients(sums, data)
        return sums.evaluation(total, None)

    def walk_with_squares(self, data: Any) -> Evaluation:
        """f, its gradient and the mean of squared gradients, accumulated over micro-batches."""
        parameters = self.parameters
        sums = self.sums()
        total: Tensor | None = None
        total_squares: Tensor | None = None
        with self.ranks.own_work():
            for batch in self._batches_for_squares(data):
                losses, gradients, squares = self.squared_gradients.of_batch(
                    batch, self.activation_memory
                )
                sums.add(batch, losses)
                total = parameters.add(total, gradients)
                del gradients
                total_squares = parameters.add(total_squares, squares)
                del squares
        return sums.evaluation(total, total_squares, squared=True)

    def _batches_for_squares(self, data: Any) -> Iterator[Batch]:
        """Micro-batches that leave room for the outputs of Linear layers and their cotangents."""
        for batch in self.micro_batches(data):
            held = self.findings.bytes_per_sample + 2 * self.findings.layer_bytes_per_sample
            fitting = max(1, int(self.activation_memory // held))
            yield from batch.split(self._micro_batch or fitting)

    def count(self, data: Any) -> Whole:
        """Number of samples and Σ wᵢ over all ranks; one all-reduce of two numbers.

        Raises:
            ValueError: Σ wᵢ is zero.
        """
        size = normaliser = 0.0
        with self.ranks.own_work():
            for batch in self.micro_batches(data):
                size += batch.size
                normaliser += float(self.network.loss.normaliser(batch.targets, batch.size))
        own = torch.tensor([size, normaliser], dtype=torch.float64)
        size, normaliser = self.ranks.sum_numbers(own).tolist()
        if normaliser == 0:
            raise ValueError(
                "a set has no sample that counts on any rank: it is empty, or every target is "
                "ignored or has weight zero"
            )
        return Whole(int(size), normaliser)

    # Micro-batches and findings of the probe ----------------------------------------------

    def single_batch(self, samples: Samples) -> Batch | None:
        """The samples as one batch, if they are in memory and fit one micro-batch; else None."""
        if not isinstance(samples, InMemory) or not samples.batch.size:
            return None
        self.probe(samples.batch)
        return samples.batch if samples.batch.size <= self.micro_batch else None

    def micro_batches(self, data: Any, size: int | None = None) -> Iterator[Batch]:
        """Yield the data in micro-batches on the parameters' device. Probes the first batch.

        Args:
            data: as for `as_samples`.
            size: the most samples per micro-batch; by default `micro_batch`.

        Raises:
            LossContractError: the objective is not a mean over independent samples.
        """
        probed = False
        for batch in as_samples(data, may_be_empty=self.ranks.together).batches():
            if batch.size == 0:
                continue
            if not probed:
                self.probe(batch)
                probed = True
            for piece in batch.split(size or self.micro_batch):
                yield piece.to(self.parameters.device)

    def probe(self, batch: Batch) -> None:
        """Check on a batch that the objective is a mean over samples (see `contract_probe`).

        The check is repeated if the model changed, or if only one sample was checked before and the
        batch has more. An inconclusive check is repeated at the next step, or at the next call
        outside of a step.

        Raises:
            LossContractError: the objective is not a mean over independent samples.
        """
        known = self._findings
        again = self._look_again or not self.engine.in_step
        self._look_again = False
        if known is not None:
            more_to_tell = (known.single and batch.size > 1) or (known.undecided and again)
            if not more_to_tell and not again:  # the model does not change within a step
                return
        signature = probes.signature(self.network)
        if known is not None and known.signature == signature and not more_to_tell:
            return
        found = probes.probe_parts(self.network, batch, signature)
        if found == known:
            return
        self.squared_gradients.forget()
        self.engine.clear()
        self._findings, self.network.trusted_layers = found, found.trusted_layers

    @property
    def findings(self) -> probes.Findings:
        """What the probe found out. Raises RuntimeError if no batch was probed yet."""
        if self._findings is None:
            raise RuntimeError("the objective has not seen a batch yet")
        return self._findings

    def epsilon(self) -> float:
        """Machine epsilon of the forward pass, averaged over the ranks that have samples."""
        if not self.ranks.together:
            return self.findings.epsilon
        known = self._findings is not None
        own = [self.findings.epsilon if known else 0.0, float(known)]
        total, ranks = self.ranks.sum_numbers(torch.tensor(own, dtype=torch.float64)).tolist()
        return float(total / ranks)

    @property
    def micro_batch(self) -> int:
        """The most samples per forward pass."""
        if self._micro_batch is not None:
            return self._micro_batch
        return max(1, int(self.activation_memory // self.findings.bytes_per_sample))

    def value_mode(self) -> AbstractContextManager[Any]:
        """Context for computing values: no_grad, unless the forward pass itself differentiates."""
        return torch.enable_grad() if self.findings.forward_differentiates else torch.no_grad()


@dataclass(frozen=True, slots=True)
class MeanGradient:
    """Work for an engine: f and its gradient over data."""

    objective: Objective
    data: Any

    def run(self) -> Evaluation:
        """Process the data here and now."""
        return self.objective.walk(self.data)


@dataclass(frozen=True, slots=True)
class MeanSquares:
    """Work for an engine: f, its gradient and mean squared per-sample gradients over data.

    Attributes:
        objective: f.
        data: the samples.
        into: consumes the squares; None to return them.
    """

    objective: Objective
    data: Any
    into: MadeOfSquares | None

    def run(self) -> Evaluation:
        """Process the data here and now."""
        return self.made_of(self.objective.walk_with_squares(self.data))

    def made_of(self, found: Evaluation) -> Evaluation:
        """The evaluation; if there is an `into`, it consumes the squares, which become empty."""
        if self.into is None:
            return found
        self.into.take_squares(self.objective.parameters, found.squares)
        return found.without_squares()


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that nobody uses; torch holds some of them for tensors to come."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held

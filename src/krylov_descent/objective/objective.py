"""The function that is minimised: model + loss + L2, over any set of samples.

    f(θ) = Σᵢ nᵢ(θ) / Σᵢ wᵢ  +  ½ Σ λ‖p‖²        (a mean over samples; see `losses`)

`Objective` walks over the samples in micro-batches and sums exactly, whatever the sizes
of the batches; per-sample losses are summed in float64, because progress that matters can
be 1e-8 of the value. It reads the module's parameters as they are; whoever wants f at
another point writes that point into them first (`FlatParameters.assign`).

Under a process group each rank walks over its own samples, and the sums are those over all
ranks (see `ranks`).
"""

from collections.abc import Iterator
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
from krylov_descent.objective.losses import Loss
from krylov_descent.objective.network import Forward, Network, Params
from krylov_descent.objective.parameters import FlatParameters
from krylov_descent.runtime.engine import Engine
from krylov_descent.runtime.ranks import ProcessGroup, Ranks
from krylov_descent.runtime.validation import check_counts

CPU_ACTIVATION_MEMORY = 1 << 30


class MadeOfSquares(Protocol):
    """What is made of mean squared gradients, without a decision on the host."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Where it is: the same at every step, updated in place."""

    def take_squares(self, parameters: FlatParameters, squares: Tensor) -> None:
        """Make it of squares [n], which may be overwritten."""


class Objective:
    """Model, loss and L2 as a function of one flat vector over a stream of batches.

    Args:
        model: any module. A compiled model is used as it is for values, and unwrapped where
            second derivatives or per-sample gradients are needed, which compiled code lacks.
        loss: see `krylov_descent.objective.losses`.
        forward: `forward(model, inputs) -> outputs`. The default calls `model(inputs)`,
            `model(*inputs)` for a tuple or list, `model(**inputs)` for a dict. The forward may
            itself differentiate, as that of a physics-informed net does.
        params: the parameters to train, as torch.optim takes them (tensors, or groups with a
            `weight_decay` each); all of the model's by default.
        micro_batch: the most samples handled at a time; by default as many as fit
            `activation_memory`, measured on a few samples.
        activation_memory: bytes that activations may take; by default 1 GiB on a CPU and a
            quarter of the free memory on a GPU.
        process_group: whose ranks add up their samples: a torch.distributed.ProcessGroup or a
            DeviceMesh of one dimension; all processes by default.

    Attributes:
        engine: what runs the work.
        squared_gradients: of single samples, and what is known of the model for them.
        scale: what f and all that follows from it are multiplied with in a step; see `loss_scale`.

    Cost: a value is one forward pass, a gradient one forward and one backward pass over the
    samples, the squares about one third more for stacks of Linear layers. Memory: activations
    of one micro-batch and two vectors of n numbers for each of gradient and squares.

    Under an initialised process group every rank gives its own part of the samples, which may be
    empty, and gets the result over all of them. So all ranks must make the same calls.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        forward: Forward | None = None,
        params: Params | None = None,
        micro_batch: int | None = None,
        activation_memory: int | None = None,
        process_group: ProcessGroup = None,
    ) -> None:
        limits = {"micro_batch": micro_batch, "activation_memory": activation_memory}
        check_counts(**{name: limit for name, limit in limits.items() if limit is not None})
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
        """What remembers something of model and loss."""
        return [self, self.network, self.network.loss, self.squared_gradients]

    @property
    def parameters(self) -> FlatParameters:
        """The flat view of what is trained."""
        return self.network.parameters

    def refresh(self, groups: list[dict[str, Any]]) -> None:
        """A step begins: see which parameters require a gradient, and their weight decay."""
        self._look_again = True
        if self.network.refresh(groups):
            self._findings = None
            self.engine.clear()
        self.ranks.device = self.parameters.device

    @contextmanager
    def scaled(self) -> Iterator[None]:
        """For a while f is multiplied with the scale."""
        self.network.rescale(self.scale)
        try:
            yield
        finally:
            self.network.rescale(1.0)

    def fit_scale(self, value: float, norm: float) -> bool:
        """In a step: change the scale where squares of gradients are out of range.

        Returns whether it changed; then all that was found before is at another scale.

        Args:
            value: f as it was found.
            norm: ‖g‖, likewise; the same number on all ranks.
        """
        dtype = self.parameters.dtype
        scale = fitting_scale(value, norm, self.scale, dtype)
        if not has_squares(norm, dtype):  # on all ranks, or on none
            scale = self.ranks.agreed_number(scale)
        if scale == self.scale:
            return False
        self.scale = scale
        self.network.rescale(scale)
        self.engine.clear()
        return True

    @property
    def activation_memory(self) -> int:
        """Bytes that activations may take."""
        if self._activation_memory is None:
            # Once: a limit that moves with the free memory would make runs differ.
            device = self.parameters.device
            self._activation_memory = (
                torch.cuda.mem_get_info(device)[0] // 4
                if device.type == "cuda"
                else CPU_ACTIVATION_MEMORY
            )
        return self._activation_memory

    # Values and gradients -----------------------------------------------------------------

    def value(self, data: Any) -> float:
        """f over the data."""
        sums = self.sums()
        with self.ranks.own_work():
            for batch in self.micro_batches(data):
                with self.value_mode():
                    sums.add(batch, self.network.sample_losses(batch))
        return sums.value()

    def losses(self, data: Any) -> Tensor:
        """nᵢ of every sample of this rank, [N] in float64 on the CPU, L2 left out."""
        found = []
        for batch in self.micro_batches(data):
            with self.value_mode():
                found.append(self.network.sample_losses(batch).detach().double())
        if not found:
            if self.ranks.together:
                return torch.empty(0, dtype=torch.float64)
            raise ValueError("`data` is empty: it must hold at least one sample")
        return torch.cat(found).cpu()

    def comparable_losses(self, samples: Samples) -> Tensor:
        """The same at another time are of the same samples; if need be their sum alone [1].

        A loader may deal in another order each time.
        """
        losses = self.losses(samples)
        return losses if isinstance(samples, InMemory) else losses.sum().reshape(1)

    def value_and_gradient(self, data: Any) -> Evaluation:
        """f and its gradient over the data."""
        return self.engine.launch(MeanGradient(self, data)).result()

    def part_of_value_and_gradient(self, data: Any, normaliser: float) -> Evaluation:
        """What this rank adds to f and its gradient; the L2 term is rank 0's. NaN if it failed.

        Args:
            data: this rank's samples.
            normaliser: of all ranks' samples.
        """
        sums = self.sums()
        total: Tensor | None = None
        with self.ranks.own_work():
            total = self._add_gradients(sums, data)
        return sums.part(total, normaliser)

    def sums(self) -> Sums:
        """For the sums of one walk over samples."""
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
        """f, its gradient and the mean of squared per-sample gradients, in one walk.

        Args:
            data: to walk over.
            into: what is made of the squares, where they are wanted for nothing else: they are not
                returned then.
        """
        return self.engine.launch(MeanSquares(self, data, into)).result()

    def walk(self, data: Any) -> Evaluation:
        """f and its gradient, micro-batch by micro-batch."""
        sums = self.sums()
        total: Tensor | None = None
        with self.ranks.own_work():
            total = self._add_gradients(sums, data)
        return sums.evaluation(total, None)

    def walk_with_squares(self, data: Any) -> Evaluation:
        """f, its gradient and the mean of squared gradients, micro-batch by micro-batch."""
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
        """Smaller ones: what goes out of Linear layers and comes back to them is held, too."""
        for batch in self.micro_batches(data):
            held = self.findings.bytes_per_sample + 2 * self.findings.layer_bytes_per_sample
            fitting = max(1, int(self.activation_memory // held))
            yield from batch.split(self._micro_batch or fitting)

    def count(self, data: Any) -> Whole:
        """The samples of all ranks together; two numbers are sent."""
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

    # Pieces for the other rooms -----------------------------------------------------------

    def single_batch(self, samples: Samples) -> Batch | None:
        """The samples as they are, where they are one batch that is handled at a time."""
        if not isinstance(samples, InMemory) or not samples.batch.size:
            return None
        self.probe(samples.batch)
        return samples.batch if samples.batch.size <= self.micro_batch else None

    def micro_batches(self, data: Any, size: int | None = None) -> Iterator[Batch]:
        """The data in micro-batches on the parameters' device; probes the first one."""
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
        """Refuse what is not a mean over samples; look again only when the model changed.

        Or when not everything could be told: then at the next step, and outside of steps each time.
        """
        known = self._findings
        again = self._look_again or not self.engine.in_step
        self._look_again = False
        if known is not None:
            more_to_tell = (known.single and batch.size > 1) or (known.undecided and again)
            if not more_to_tell and not again:  # nothing changes within a step
                return
        signature = probes.signature(self.network)
        if known is not None and known.signature == signature and not more_to_tell:
            return
        found = probes.probe(self.network, batch, signature)
        if found == known:
            return
        self.squared_gradients.forget()
        self.engine.clear()
        self._findings, self.network.trusted_layers = found, found.trusted_layers

    @property
    def findings(self) -> probes.Findings:
        """What the probe found out about model and loss; there is one after the first batch."""
        if self._findings is None:
            raise RuntimeError("the objective has not seen a batch yet")
        return self._findings

    def epsilon(self) -> float:
        """Machine epsilon of the forward pass, also on a rank that saw no sample of its own."""
        if not self.ranks.together:
            return self.findings.epsilon
        known = self._findings is not None
        own = [self.findings.epsilon if known else 0.0, float(known)]
        total, ranks = self.ranks.sum_numbers(torch.tensor(own, dtype=torch.float64)).tolist()
        return float(total / ranks)

    @property
    def micro_batch(self) -> int:
        """The most samples handled at a time."""
        if self._micro_batch is not None:
            return self._micro_batch
        return max(1, int(self.activation_memory // self.findings.bytes_per_sample))

    def value_mode(self) -> AbstractContextManager[Any]:
        """No autograd graph where only a value is wanted, unless the forward differentiates."""
        return torch.enable_grad() if self.findings.forward_differentiates else torch.no_grad()


@dataclass(frozen=True, slots=True)
class MeanGradient:
    """The work of finding f and its gradient over data."""

    objective: Objective
    data: Any

    def run(self) -> Evaluation:
        """Walk over the data."""
        return self.objective.walk(self.data)


@dataclass(frozen=True, slots=True)
class MeanSquares:
    """The work of finding f, its gradient and mean squared per-sample gradients over data.

    Attributes:
        into: what is made of the squares; None to return them.
    """

    objective: Objective
    data: Any
    into: MadeOfSquares | None

    def run(self) -> Evaluation:
        """Walk over the data."""
        return self.made_of(self.objective.walk_with_squares(self.data))

    def made_of(self, found: Evaluation) -> Evaluation:
        """What was found, after `into` has taken the squares if there is one."""
        if self.into is None:
            return found
        self.into.take_squares(self.objective.parameters, found.squares)
        return found.without_squares()

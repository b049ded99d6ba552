"""Check that the objective is a mean over independent samples, and measure what it needs.

The checks use a few samples. They run at the first batch, and again when a `training` flag or a
module changed:

- The same samples, evaluated twice, reveal dropout and random losses.
- A batch, compared with its two halves, reveals BatchNorm in training mode and losses that mix
  samples.
- If the model has buffers, the same samples, evaluated twice at another point, reveal spectral_norm
  in training mode.
- `parameter_writes` finds forward passes that write parameters.

Line searches and curvature have no meaning for such objectives. They are refused with a message
that says what to do. Parameters, buffers and the global random state are restored afterwards.

The same samples show how much memory the activations of a sample take, in which precision the
forward pass computes, and whether the forward pass itself differentiates.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent.objective.batches import Batch, floating_tensors_in
from krylov_descent.objective.buffers import buffers_kept
from krylov_descent.objective.layers.graph_walks import leaves
from krylov_descent.objective.layers.layer_trust import trusted_layers
from krylov_descent.objective.layers.linear_layers import recorded_linear_layers
from krylov_descent.objective.layers.parameter_writes import (
    check_embeddings,
    check_graph,
    parameters_kept,
)
from krylov_descent.objective.losses import LossContractError
from krylov_descent.objective.network import Network
from krylov_descent.objective.pass_measures import CoarsestArithmetic, activation_bytes
from krylov_descent.runtime.messages import first_line, is_out_of_memory
from krylov_descent.runtime.precision import TF32_EPSILON, epsilon_of, forward_precision
from krylov_descent.runtime.private import modules_in

PROBE_SAMPLES = 8
# Relative tolerances. Rounding differs a little between batch sizes, and more in low precision.
TWICE_TOLERANCE, HALVES_TOLERANCE, COARSE_TOLERANCE = 1e-4, 1e-3, 3e-2
# `_check_memory` changes each parameter by at most this factor of itself, so its sign stays.
ELSEWHERE = 0.9

# Modules that may be random, or may mix samples, in training mode.
SUSPECTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    nn.RNNBase,
)

Signature = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """What the probe found out about model and loss.

    Attributes:
        signature: the modules and flags for which the findings hold.
        single: the batch had only one sample, so mixing of samples was not checked.
        forward_differentiates: the forward pass needs grad mode (a physics-informed net).
        coarsest: the dtype with the fewest digits in the forward pass.
        device: the device of the parameters.
        bytes_per_sample: bytes of activations that a backward pass keeps per sample.
        layer_bytes_per_sample: bytes of the outputs of Linear layers per sample.
        trusted_layers: names of the Linear layers that passed the check of `layer_trust`.
        undecided: some parameter had a zero gradient, so neither its layer nor second derivatives
            towards it were checked.
    """

    signature: Signature
    single: bool
    forward_differentiates: bool
    coarsest: torch.dtype
    device: torch.device
    bytes_per_sample: float
    layer_bytes_per_sample: float
    trusted_layers: frozenset[str]
    undecided: bool

    @property
    def epsilon(self) -> float:
        """Machine epsilon of the coarsest forward arithmetic, under torch's current settings."""
        with forward_precision():
            return epsilon_of(self.coarsest, self.device)

    @property
    def derivative_epsilon(self) -> float:
        """Machine epsilon of a backward pass, which may use tf32 if the forward pass does not."""
        return epsilon_of(self.coarsest, self.device)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied model has other modules. The empty signature makes the objective probe them.
        rest = [getattr(self, field.name) for field in fields(self)[1:]]
        return Findings, ((), *rest)


def signature(network: Network) -> Signature:
    """A value that changes if a module is replaced, or a `training` flag or autocast is switched.

    It holds weak references, because the id of a deleted module may be reused by another module.
    """
    modules = tuple((weakref.ref(module), module.training) for module in modules_in(network.model))
    return network.autocast, modules


def probe_parts(network: Network, batch: Batch, model_signature: Signature) -> Findings:
    """`probe` for each term of the objective; errors name the term."""
    found = []
    for name, part in batch.parts():
        try:
            found.append(probe(network, part, model_signature))
        except LossContractError as problem:
            if not name:
                raise
            raise LossContractError(f"term {name!r}: {problem}") from problem
        except Exception as problem:
            if name:
                problem.add_note(f"This was raised in the term {name!r}.")
            raise
    return found[0] if len(found) == 1 else _of_all(found)


def _of_all(found: list[Findings]) -> Findings:
    """What holds for a batch of several terms."""
    return Findings(
        signature=found[0].signature,
        single=False,  # a term with one point has no second one to mix with
        forward_differentiates=any(one.forward_differentiates for one in found),
        coarsest=max((one.coarsest for one in found), key=lambda dtype: torch.finfo(dtype).eps),
        device=found[0].device,
        bytes_per_sample=max(one.bytes_per_sample for one in found),
        layer_bytes_per_sample=max(one.layer_bytes_per_sample for one in found),
        trusted_layers=frozenset.intersection(*(one.trusted_layers for one in found)),
        undecided=all(one.undecided for one in found),
    )


def probe(network: Network, batch: Batch, model_signature: Signature) -> Findings:
    """Check and measure model and loss on a few samples of the batch.

    Raises:
        LossContractError: the objective is random, mixes samples or depends on earlier forward
            passes; its forward pass writes parameters; or its gradients are sparse, or are scaled
            by the frequency of rows.
    """
    few = batch.spread(PROBE_SAMPLES).to(network.parameters.device)
    devices = [network.parameters.device] if network.parameters.device.type == "cuda" else []
    check_embeddings(network.model)
    with (
        torch.random.fork_rng(devices=devices),
        buffers_kept(network.model),
        parameters_kept(network.model) as check_parameters,
    ):
        differentiates = _forward_differentiates(network, few)
        check_parameters()
        mode = torch.enable_grad() if differentiates else torch.no_grad()
        with mode, CoarsestArithmetic(network.parameters.dtype) as arithmetic:
            whole = network.sample_losses(few, eager=True).detach().double()
        coarsest, device = arithmetic.coarsest, network.parameters.device
        with mode:
            again = network.sample_losses(few).detach().double()
            _check_repeats(network.model, whole, again)
            if few.size > 1:
                with forward_precision():
                    epsilon = epsilon_of(coarsest, device)
                _check_halves(network, few, whole, epsilon)
            _check_memory(network, few)
        bytes_per_sample = activation_bytes(network, few)
        with recorded_linear_layers(network.eager) as layers:
            losses = network.sample_losses(few, eager=True)
        put_out = sum(z.nbytes for layer in layers for z in layer.outputs)
        check_graph(losses)
        _check_parameters(network, losses)
        gradients = _gradients(losses, network.parameters.tensors)
        trusted = trusted_layers(network, losses, layers, gradients, epsilon_of(coarsest, device))
    return Findings(
        signature=model_signature,
        single=few.size == 1,
        forward_differentiates=differentiates,
        coarsest=coarsest,
        device=device,
        bytes_per_sample=bytes_per_sample,
        layer_bytes_per_sample=put_out / few.size,
        trusted_layers=trusted,
        undecided=any(g is not None and not bool(g.any()) for g in gradients),
    )


def _gradients(losses: Tensor, parameters: list[Tensor]) -> Sequence[Tensor | None]:
    """Gradients of Σ losses; None for parameters that the losses do not depend on."""
    if not losses.requires_grad:
        return [None] * len(parameters)
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        losses, parameters, torch.ones_like(losses), retain_graph=True, allow_unused=True
    )
    if any(g is not None and g.is_sparse for g in found):
        raise LossContractError(
            "the model has sparse gradients, which have no curvature products: make its embeddings "
            "with sparse=False"
        )
    return found


def _check_parameters(network: Network, losses: Tensor) -> None:
    """Refuse parameters that are not the model's or the loss's: they would never be trained."""
    loss = network.loss.module
    modules = [network.model, *([loss] if isinstance(loss, nn.Module) else [])]
    known = {id(p) for module in modules for p in module.parameters()}
    for leaf in leaves([losses]):
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            raise LossContractError(
                f"a parameter of shape {tuple(leaf.shape)} that is used is not one of the model's, "
                "so it would not be trained: make it an attribute of the model and use it from "
                "there, as model.coefficient, or detach it"
            )


def _forward_differentiates(network: Network, few: Batch) -> bool:
    try:
        with torch.no_grad():
            network.sample_losses(few)
    except RuntimeError as problem:
        if is_out_of_memory(problem):
            raise
        with torch.enable_grad():
            try:
                network.sample_losses(few)
            except RuntimeError as another:
                if is_out_of_memory(another):
                    raise
                _note_dtypes(problem, network, few)
                raise problem from None
        return True
    return False


def _note_dtypes(problem: RuntimeError, network: Network, few: Batch) -> None:
    """Add to an error of the forward pass that the data have another dtype than the parameters."""
    dtype = network.parameters.dtype
    if network.autocast:  # which converts them
        return
    for tensor in floating_tensors_in((few.inputs, few.targets)):
        if tensor.dtype != dtype:
            problem.add_note(
                f"The data have a tensor of {tensor.dtype}, and the parameters are {dtype}: "
                f"if that is the cause, convert one of them, as by tensor.to({dtype})."
            )
            return


def _check_repeats(model: nn.Module, first: Tensor, second: Tensor) -> None:
    if _differ(first, second, TWICE_TOLERANCE):
        raise LossContractError(
            "the same samples gave two different losses, so the objective is random"
            f"{_suspects(model)}: call model.eval() and take randomness out of forward and loss"
        )


def _check_halves(network: Network, few: Batch, whole: Tensor, epsilon: float) -> None:
    half = few.size // 2
    try:
        parts = [
            network.sample_losses(piece).detach().double()
            for piece in (few.rows(0, half), few.rows(half, few.size))
        ]
    except (RuntimeError, ValueError) as problem:
        if is_out_of_memory(problem):
            raise
        raise LossContractError(
            f"model and loss work on {few.size} samples but not on half of them "
            f"({first_line(problem)}){_suspects(network.model)}: call model.eval(), and make "
            "the loss a mean over independent samples"
        ) from problem
    tolerance = COARSE_TOLERANCE if epsilon >= TF32_EPSILON else HALVES_TOLERANCE
    if _differ(whole, torch.cat(parts), tolerance):
        raise LossContractError(
            "a batch and its two halves gave different losses, so samples are mixed"
            f"{_suspects(network.model)}: call model.eval(), and make the loss a mean over "
            "independent samples"
        )


def _check_memory(network: Network, few: Batch) -> None:
    """Refuse forward passes that affect later ones, by two evaluations at another point.

    At θ itself, buffers that follow the weights (spectral_norm) may no longer change.
    """
    buffers = [name for name, _ in network.model.named_buffers()]
    if not buffers:
        return
    theta = network.parameters.copy()
    pattern = torch.arange(len(theta), device=theta.device).cos().to(theta.dtype)
    point = theta * (1 + ELSEWHERE * pattern)
    try:
        first, second = (network.losses_at(point, few).detach().double() for _ in range(2))
    except (RuntimeError, ValueError) as problem:
        if is_out_of_memory(problem):
            raise
        return  # the model may not be defined at every point
    if _differ(first, second, TWICE_TOLERANCE):
        raise LossContractError(
            "a forward pass leaves something behind for the next one, so the same parameters have "
            f"more than one loss (buffers: {', '.join(buffers[:3])}): call model.eval()"
        )


def _differ(first: Tensor, second: Tensor, tolerance: float) -> bool:
    # The step reports NaN and infinity. Here only their positions are compared.
    finite = first.isfinite() & second.isfinite()
    if bool((first.isfinite() != second.isfinite()).any()):
        return True
    scale = first[finite].abs().mean() if bool(finite.any()) else first.new_zeros(())
    return bool(((first - second)[finite].abs() > tolerance * scale).any())


def _suspects(model: nn.Module) -> str:
    """Words that name up to three modules in training mode that may be random or mix samples."""
    found = [
        f"{name or 'model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if module.training
        and isinstance(module, SUSPECTS)
        and not (isinstance(module, nn.RNNBase) and module.dropout == 0)
    ]
    return f" (in training mode: {', '.join(found[:3])})" if found else ""

"""An objective of several terms: f(θ) = Σ_t w_t · (mean of term t over its samples).

`Terms` makes it a mean over all samples (see `term_batches`), so that steps need not know of terms.
It draws points anew, and evaluates the terms one by one for the results of steps. All ranks have
the same terms with all their samples, and each computes a share (see `term_samples`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from krylov_descent.objective.batches import Batch, Tree, tensors_in
from krylov_descent.objective.term import Term
from krylov_descent.objective.term_batches import TermBatch
from krylov_descent.objective.term_samples import TermSamples
from krylov_descent.runtime.descriptions import described, tensors_of
from krylov_descent.runtime.ranks import Ranks

# Points are drawn anew if a term is so many times as large on fresh ones.
RUNAWAY = 2.0
# The losses of this rank's samples of each term [m], in float64 on the CPU.
Losses = Callable[[TermBatch], dict[str, Tensor]]
HELD_OUT = " (held out)"  # after the name of a term, of whose samples no step is made
DRAWN = "points_drawn"  # entry of a parameter group: the step at which each term's were drawn
OF_TERMS = "the term"  # begins the name of what ranks compare of terms
# Keep the generators of steps and of terms apart.
STEP_STRIDE, TERM_STRIDE = 0x9E3779B97F4A7C15, 0x632BE59BD9B4E019


@dataclass(frozen=True, slots=True)
class TermLosses:
    """The terms at the start of a step, each a mean over its samples without its weight.

    Attributes:
        terms: by name.
        held_out: on points or data that no step is made with; of the terms that have them.
        trouble: a sentence on the terms that are not finite; empty if all are.
    """

    terms: dict[str, float] = field(default_factory=dict)
    held_out: dict[str, float] = field(default_factory=dict)
    trouble: str = ""


class Terms(Mapping[str, Term]):
    """The terms of an objective by name.

    Args:
        given: the terms.

    Attributes:
        samples: all points and data; None before `evaluate`.
        losses: the terms when `evaluate` was called.

    Raises:
        TypeError: something else than terms was given.
        ValueError: there are none.
    """

    def __init__(self, given: Mapping[str, Term]) -> None:
        if not given:
            raise ValueError("`loss` has no terms: give at least one")
        for name, term in dict[Any, Any](given).items():
            if not isinstance(name, str) or not isinstance(term, Term):
                raise TypeError(
                    "`loss` as a dict must have a krylov_descent.Term for each name, found "
                    f"{type(term).__name__} for {name!r}"
                )
        self._terms = dict(given)
        self._drawn: dict[str, int] = {}
        self._fresh: dict[str, Any] = {}
        self.samples: TermSamples | None = None
        self._state: list[Any] = []  # of which the samples are made
        self.losses = TermLosses()

    def __getitem__(self, name: str) -> Term:
        return self._terms[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._terms)

    def __len__(self) -> int:
        return len(self._terms)

    def forward(self, model: Any, inputs: dict[str, Tree]) -> dict[str, Tree]:
        """The residuals or outputs of each term."""
        return {name: self._term(name).outputs(model, own) for name, own in inputs.items()}

    def loss(self, outputs: dict[str, Tree], targets: dict[str, Any]) -> Tensor:
        """The losses of all samples [m], times their factors."""
        return torch.cat(
            [
                factors * self._term(name).losses(outputs[name], own, len(factors))
                for name, (own, factors) in targets.items()
            ]
        )

    def _term(self, name: str) -> Term:
        return self._terms[name.removesuffix(HELD_OUT)]

    # Points that are drawn --------------------------------------------------------------------

    def draw(self, like: Tensor, group: dict[str, Any]) -> None:
        """Before a step: draw the points of terms that have a sampler, where it is time for it.

        Each of these terms also gets fresh points to be evaluated on. Nothing is sent: all ranks
        have the same seeds.

        Args:
            like: one of the parameters.
            group: the parameter group with seed and number of steps. Its entry `DRAWN` is updated.
        """
        drawn: dict[str, int] = dict(group.get(DRAWN, {}))
        step = int(group["steps"])
        for name, term in self._terms.items():
            if term.sampler is None:
                continue
            last = drawn.setdefault(name, step)
            if term.resample != "auto" and step - last >= term.resample:
                last = drawn[name] = step
            if self._drawn.get(name) != last:
                term.points = self._draw(like, group, name, last)
                self._drawn[name] = last
            self._fresh[name] = self._draw(like, group, name, step + 1)
        if drawn:
            group[DRAWN] = drawn

    def evaluate(
        self, losses_of: Losses, like: Tensor, group: dict[str, Any], ranks: Ranks
    ) -> None:
        """After `draw`: evaluate the terms, take fresh points where needed, assemble the samples.

        Args:
            losses_of: evaluates samples of these terms.
            like: one of the parameters.
            group: as for `draw`.
            ranks: over which one number is summed for each term, and for each that is held out.

        Cost: one forward pass over all samples, and one over those that are held out, divided among
        the ranks.
        """
        losses, step = self._evaluate(losses_of, like, ranks), int(group["steps"])
        for name, points in self._fresh.items():
            runs_away = losses.held_out[name] > RUNAWAY * losses.terms[name]
            if runs_away and self._terms[name].resample == "auto":
                # Fresh points are drawn with the number of the next step, which draws others.
                self._drawn[name] = step + 1
                group[DRAWN] = group[DRAWN] | {name: step + 1}
                self._terms[name].points = points
                losses.terms[name] = losses.held_out[name]
        self.losses = losses
        self._assemble(like, ranks)

    def _draw(self, like: Tensor, group: dict[str, Any], name: str, step: int) -> Any:
        """Points of a term, the same for the same seed and step."""
        sampler = self._terms[name].sampler
        assert sampler is not None
        number = list(self._terms).index(name) + 1
        seed = (int(group["seed"]) + step * STEP_STRIDE + number * TERM_STRIDE) % 2**63
        devices = [like.device] if like.is_cuda else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(seed)
            points = sampler()
        try:
            self._terms[name].batch_of(points)
        except (TypeError, ValueError) as problem:
            raise type(problem)(f"term {name!r}, points that were drawn: {problem}") from problem
        return points

    def _evaluate(self, losses_of: Losses, like: Tensor, ranks: Ranks) -> TermLosses:
        """The terms, and those on fresh points or on what is held out."""
        parts, losses = self._parts(), dict[str, Tensor]()
        with ranks.own_work():
            for name, part in parts.items():
                _check_dtype(name, part, like.dtype)
            ones = dict.fromkeys(parts, 1.0)
            losses = losses_of(TermBatch.of_terms(parts, ones, like.detach()))
        # A rank has no losses of a term that has fewer samples than there are ranks.
        nothing = torch.empty(0, dtype=torch.float64)
        own = [losses.get(name, nothing) for name in parts]
        sums = ranks.sum_numbers(torch.tensor([float(o.sum()) for o in own], dtype=torch.float64))
        means = {
            name: total / part.size
            for (name, part), total in zip(parts.items(), sums.tolist(), strict=True)
        }
        trouble = [
            _trouble(name, torch.cat(ranks.gather_numbers(losses.get(name, nothing))))
            for name in self._terms
            if not math.isfinite(means[name])
        ]
        return TermLosses(
            {name: means[name] for name in self._terms},
            {name: means[name + HELD_OUT] for name in self._terms if name + HELD_OUT in means},
            "; ".join(filter(None, trouble)),
        )

    def _parts(self) -> dict[str, Batch]:
        """The samples of each term, and those that are held out or fresh, on all ranks alike."""
        parts = {name: term.batch for name, term in self._terms.items()}
        for name, term in self._terms.items():
            fresh = self._fresh.get(name)
            other = term.held_out if fresh is None else term.batch_of(fresh)
            if other is not None:
                parts[name + HELD_OUT] = other
        return parts

    # What must be the same on all ranks -------------------------------------------------------

    def description(self) -> dict[str, str]:
        """The settings of the terms, as text by name."""
        told = {f"{OF_TERMS}s": ", ".join(self._terms)}
        for name, term in self._terms.items():
            told |= described(f"{OF_TERMS} {name}'s rule", term.rule)
            for key in ("weight", "resample", "subset_size"):
                told[f"{OF_TERMS} {name}'s {key}"] = str(getattr(term, key))
        return told

    def tensors(self) -> dict[str, Tensor]:
        """Points and data, drawn and held out, and what rules have as attributes, by name."""
        found = dict[str, Tensor]()
        for name, term in self._terms.items():
            found |= tensors_of(f"{OF_TERMS} {name}'s rule", term.rule)
        for name, part in self._parts().items():
            of_part = tensors_in((part.inputs, part.targets))
            found |= {f"{OF_TERMS} {name}'s points[{i}]": t for i, t in enumerate(of_part)}
        return found

    # Samples ----------------------------------------------------------------------------------

    def _assemble(self, like: Tensor, ranks: Ranks) -> None:
        """Make the samples anew if weights, points, dtype or device have changed."""
        state: list[Any] = [like.dtype, like.device]
        for term in self._terms.values():
            state += [term.weight, term.batch]
        if self.samples is not None and all(
            a is b or (not isinstance(a, Batch) and a == b)
            for a, b in zip(state, self._state, strict=True)
        ):
            return
        parts = {name: term.batch.to(like.device) for name, term in self._terms.items()}
        self.samples, self._state = TermSamples(self, parts, like, ranks), state


def _trouble(name: str, losses: Tensor) -> str:
    """A sentence on the losses of a term that are not finite; empty if all are."""
    wrong = (~losses.isfinite()).nonzero()[:, 0]
    if not len(wrong):
        return ""
    return (
        f"the term {name!r} is not finite for {len(wrong)} of its {len(losses)} samples, the first "
        f"at index {int(wrong[0])}"
    )


def _check_dtype(name: str, part: Batch, wanted: torch.dtype) -> None:
    for tensor in tensors_in(part.inputs):
        if tensor.is_floating_point() and tensor.dtype != wanted:
            raise ValueError(
                f"term {name!r}: its points are {tensor.dtype} and the parameters {wanted}: "
                "convert one of them with .to(dtype)"
            )

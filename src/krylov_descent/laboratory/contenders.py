"""The optimisers that a problem can be trained with, by the names a person types.

Each is made for a problem with sensible settings: those of its paper where they are published.
Options given by the user replace them one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from krylov_descent.laboratory.choices import UnknownNameError, unknown_name
from krylov_descent.laboratory.problems.problem import PaperSettings, Problem
from krylov_descent.laboratory.signatures import (
    Option,
    check_kinds,
    defaults_of,
    options_of,
    plain,
    takes_anything,
    with_dtypes,
)
from krylov_descent.laboratory.yardsticks import YARDSTICKS, Yardstick
from krylov_descent.optimizers.base import DataOptimizer
from krylov_descent.optimizers.first_order import FirstOrder, optimizer_class
from krylov_descent.optimizers.hessian_free import HessianFree
from krylov_descent.optimizers.ksd.ksd import KSD
from krylov_descent.optimizers.lbfgs import LBFGS
from krylov_descent.optimizers.nonlinear_cg import NonlinearCG

Options = dict[str, Any]
# What the laboratory decides, or a command line cannot say.
HIDDEN = ("optimizer", "params", "seed", "forward", "process_group")
PAPER = "ksd-paper"
# The paper's own method, on every problem that it trained.
PAPER_METHOD: Options = {
    "preconditioner": "fisher-diagonal",
    "subset_size": "paper",
    "previous_steps": 1,
}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An optimiser and its settings for a problem.

    Attributes:
        name: what the command line calls it.
        title: what tables and pictures call it.
        summary: one sentence.
        kind: the optimiser's class.
        behind: the torch optimiser that a `FirstOrder` drives.
        presets: settings that replace the class's defaults.
        settings: of the problem, which replace those. What `Problem.suited` says, and the rate
            that the method was tuned to (`Problem.rates`), replace both, and the user's options
            replace all of them.
    """

    name: str
    title: str
    summary: str
    kind: type[DataOptimizer]
    behind: type[torch.optim.Optimizer] | None = None
    presets: Options = field(default_factory=dict)
    settings: Callable[[Problem], Options] = lambda problem: {}

    @property
    def options(self) -> list[Option]:
        """What can be set, with the value it has if it is not."""
        found = options_of(self.kind)
        for option in options_of(self.behind) if self.behind else []:
            # Torch's manual is a long one; its first sentences say enough.
            found.append(replace(option, meaning=option.meaning.partition(". ")[0]))
        defaults = {name: str(value) for name, value in self.presets.items()}
        defaults["weight_decay"] = "the problem's"
        if self.settings is _paper_ksd:
            defaults["dimension"] = "the paper's"
        return [
            replace(option, default=defaults.get(option.name, option.default))
            for option in found
            if option.name not in HIDDEN
        ]

    def make(self, problem: Problem, model: nn.Module, seed: int, options: Options) -> Any:
        """The optimiser for a model of the problem.

        Raises:
            UnknownNameError: there is no such option; the nearest is suggested.
            ValueError: it does not take such a value, or has no settings for the problem.
        """
        settings = with_dtypes(self._chosen(problem, options), self.options)
        if self.behind is not None:
            settings["optimizer"] = self.behind
        make: Any = self.kind
        try:
            return make(model, problem.objective, seed=seed, **settings)
        except TypeError as error:
            raise ValueError(f"{self.name!r} cannot be made with {options}: {error}") from error

    def effective(self, problem: Problem, options: Options) -> Options:
        """Every option with the value that it has for the problem, as JSON has them."""
        made = [self.kind, self.behind] if self.behind else [self.kind]
        defaults = {name: value for each in made for name, value in defaults_of(each).items()}
        found = {k: v for k, v in defaults.items() if k not in HIDDEN}
        return {k: plain(v) for k, v in (found | self._chosen(problem, options)).items()}

    def rate(self, problem: Problem, options: Options) -> str | None:
        """A first-order method's rate and how it was found; None for other methods."""
        if self.behind is None:
            return None
        rate = self.effective(problem, options).get("lr")
        if "lr" in options:
            return f"{rate}, as given"
        tuned = problem.rates.get(self.name)
        return str(tuned) if tuned else f"{rate}, not tuned for this problem"

    def _chosen(self, problem: Problem, options: Options) -> Options:
        """What replaces the defaults of the class."""
        offered = self.options
        known = [option.name for option in offered]
        for option in options:
            if option not in known and not (self.behind and takes_anything(self.behind)):
                raise unknown_name(f"option of {self.name!r}", option, known)
        check_kinds(options, offered)
        decay = {"weight_decay": problem.weight_decay} if "weight_decay" in known else {}
        tuned = problem.rates.get(self.name)
        return {
            **decay,
            **self.presets,
            **self.settings(problem),
            **problem.suited.get(self.name, {}),
            **({"lr": tuned.rate} if tuned else {}),
            **options,
        }


def _paper_ksd(problem: Problem) -> Options:
    if problem.paper is None or problem.paper.krylov_dimension is None:
        raise ValueError(
            f"{PAPER!r} has no settings for {problem.title!r}: the paper did not train it. Take "
            f"--optimizer ksd, with --set for those that `ksd optimizers {PAPER}` shows"
        )
    return {
        "dimension": problem.paper.krylov_dimension,
        "bfgs_iterations": problem.paper.bfgs_iterations,
    }


def _hessian_free(problem: Problem) -> Options:
    if problem.paper is None:
        return {}
    options: Options = {"chunk_size": problem.paper.curvature_samples}
    if problem.paper.initial_damping is not None:
        options["damping"] = problem.paper.initial_damping
    return options


def _first_order(
    name: str,
    title: str,
    behind: type[torch.optim.Optimizer],
    summary: str = "One step is an epoch of mini-batches.",
    **presets: Any,
) -> Contender:
    return Contender(
        name=name,
        title=title,
        summary=summary,
        kind=FirstOrder,
        behind=behind,
        # The laboratory's networks do the same operations each time.
        presets={"cuda_graphs": True, **presets},
    )


CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(
            name="ksd",
            title="KSD",
            summary="Krylov Subspace Descent with this library's defaults.",
            kind=KSD,
        ),
        Contender(
            name=PAPER,
            title="KSD (paper)",
            summary="Krylov Subspace Descent with the paper's settings for a problem that it has.",
            kind=KSD,
            presets={"bfgs_iterations": PaperSettings.bfgs_iterations, **PAPER_METHOD},
            settings=_paper_ksd,
        ),
        Contender(
            name="hf",
            title="HF",
            summary="Hessian-Free after Martens 2010, with his settings where published.",
            kind=HessianFree,
            settings=_hessian_free,
        ),
        Contender(
            name="lbfgs",
            title="L-BFGS",
            summary="Torch's L-BFGS, window 10, strong Wolfe line search, full batch.",
            kind=LBFGS,
        ),
        Contender(
            name="ncg",
            title="Nonlinear CG",
            summary="Nonlinear conjugate gradients (Polak-Ribière+), full batch.",
            kind=NonlinearCG,
        ),
        _first_order("adam", "Adam", torch.optim.Adam),
        _first_order("adamw", "AdamW", torch.optim.AdamW),
        _first_order(
            "sgd",
            "SGD (Nesterov)",
            torch.optim.SGD,
            "One step is an epoch of mini-batches; rate 0.01, momentum 0.9.",
            lr=0.01,
            momentum=0.9,
            nesterov=True,
        ),
    )
}


def contender(name: str) -> Contender:
    """The contender of a name, or the torch optimiser at a dotted path.

    Raises:
        UnknownNameError: no such name, where the nearest is suggested; nothing at the path.
    """
    if name in CONTENDERS:
        return CONTENDERS[name]
    if "." not in name:
        raise unknown_name("optimizer", name, CONTENDERS)
    try:
        return _first_order(name, name.rsplit(".", 1)[-1], optimizer_class(name))
    except (TypeError, ValueError) as problem:
        raise UnknownNameError(str(problem)) from problem


def competitor(name: str) -> Contender | Yardstick:
    """The contender of a name, or the yardstick that stands beside them.

    Raises:
        UnknownNameError: as `contender` does.
    """
    if name in YARDSTICKS:
        return YARDSTICKS[name]
    if name not in CONTENDERS and "." not in name:
        raise unknown_name("optimizer", name, [*CONTENDERS, *YARDSTICKS])
    return contender(name)

"""Everything that a run depends on, as plain values."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from krylov_descent.laboratory.choices import check_seed
from krylov_descent.laboratory.limits import Limits


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything a run depends on.

    Attributes:
        problem: its name.
        problem_options: as `load_problem` takes them, `size` among them.
        optimizer: a contender's name, or a dotted path to a torch optimiser.
        optimizer_options: as the optimiser takes them.
        initialization: of the weights; the problem's own if None.
        seed: of starting weights and optimiser.
        device: "cpu", "cuda", "cuda:1", …
        dtype: "float32" or "float64"; the problem's own if None.
        limits: when to stop.
    """

    problem: str
    problem_options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "ksd"
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    initialization: str | None = None
    seed: int = 0
    device: str = "cpu"
    dtype: str | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def command(self, folder: Path) -> str:
        """The shell line that makes this run."""
        words = ["ksd", "train", self.problem, "--optimizer", self.optimizer]
        for flag, options in (
            ("--problem-set", self.problem_options),
            ("--set", self.optimizer_options),
        ):
            for key, value in options.items():
                words += [flag, f"{key}={value}"]
        if self.initialization:
            words += ["--initialization", self.initialization]
        words += ["--seed", str(self.seed), "--device", self.device]
        if self.dtype is not None:
            words += ["--dtype", self.dtype]
        for flag in ("iterations", "seconds", "passes", "target"):
            if (limit := getattr(self.limits, flag)) is not None:
                words += [f"--{flag}", str(limit)]
        if self.limits.early_stop is None:
            words.append("--no-early-stop")
        return shlex.join([*words, "--folder", str(folder)])

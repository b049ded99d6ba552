"""Run folders with made-up numbers of a plausible shape, written through `RunFolder` itself."""

import math
from pathlib import Path
from typing import Any

import torch

from krylov_descent.laboratory.record import Row, RunFolder
from krylov_descent.laboratory.reproduce import by_line, exhibit

PUBLISHED = [
    {"method": "KSD", "source": "A paper 2011, Table 2", "train": 0.17, "test": 0.25, "time": 0.2},
    {"method": "HF", "source": "A paper 2011, Table 2", "train": 0.13, "test": 0.19, "time": 1.0},
    {"method": "NAG", "source": "Another paper", "train": 0.074, "test": None, "time": None},
]
AUTOENCODER = {
    "name": "curves",
    "title": "CURVES (re-created)",
    "metric": {"name": "squared error per image", "unit": ""},
    "options": {"size": None, "code_size": 5},
    "published": PUBLISHED,
}
CLASSIFIER = {
    "name": "mnist-classifier",
    "title": "MNIST classification",
    "metric": {"name": "classification error", "unit": "%"},
    "options": {"size": None},
    "published": [
        {"method": "KSD", "source": "A paper", "train": 0.0, "test": 0.0170, "time": 0.6},
    ],
}
PHASES = {
    "ksd": {"gradient": 0.12, "basis": 0.43, "search": 0.41},
    "hf": {"gradient": 0.05, "conjugate gradient": 0.80, "line search": 0.13},
    "adam": {"epoch": 1.0},
}


def config(
    name: str = "ksd",
    title: str = "KSD",
    *,
    problem: dict[str, Any] = AUTOENCODER,
    seed: int = 0,
    **options: object,
) -> dict[str, Any]:
    return {
        "problem": problem,
        "optimizer": {"name": name, "title": title, "options": options},
        "seed": seed,
        "device": "cuda: NVIDIA H200",
        "dtype": "float32",
        "versions": {"krylov_descent": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
        "command": f"ksd train {problem['name']} --optimizer {name} --seed {seed}",
    }


def rows(
    name: str = "ksd",
    *,
    steps: int = 120,
    seconds: float = 15.0,
    first: float = 22.0,
    floor: float = 0.09,
    rate: float = 6.0,
    gap: float = 1.2,
) -> list[Row]:
    """Errors that fall from `first` to `floor`; validation and test lie above training."""
    made: list[Row] = []
    for i in range(steps + 1):
        t = i / steps
        wobble = 1 + 0.03 * math.sin(i * 1.7)
        train = (floor + (first - floor) * math.exp(-rate * t) / (1 + 4 * t)) * wobble
        row: Row = {"iteration": i, "seconds": seconds * t, "passes": 4.2 * i, "train": train}
        row |= {"validation": train * gap * (1 + 0.05 * t * t), "test": train * gap * 1.02}
        if i:
            row |= {
                "loss": 60 + train,
                "status": "moved",
                "rank": 21 if name == "ksd" else 0,
                "ritz_values": _ritz_values(i, t) if name == "ksd" else [],
                "evaluations": 27,
                "products": 21 if name != "adam" else 0,
                "phases": {k: v * seconds / steps for k, v in PHASES.get(name, {}).items()},
            }
        made.append(row)
    return made


def write_run(
    path: Path,
    configuration: dict[str, Any] | None = None,
    metrics: list[Row] | None = None,
    *,
    ending: str | None = "early_stop",
) -> RunFolder:
    """A run folder; one without an ending is unfinished."""
    folder = RunFolder(path)
    folder.begin(configuration or config())
    written = rows() if metrics is None else metrics
    for row in written:
        folder.append(row)
    if ending is not None:
        sentence = {
            "early_stop": "the validation error has stopped falling",
            "seconds": "the time limit was reached",
        }[ending]
        folder.finish({"ending": ending, "sentence": sentence, "last": written[-1]})
    return folder


def write_comparison(root: Path) -> list[RunFolder]:
    """KSD twice, HF, Adam, an unfinished L-BFGS, and a folder that is not there."""
    hf = rows("hf", steps=60, seconds=60.0, floor=0.13, rate=9)
    return [
        write_run(root / "ksd-20", config(dimension=20, curvature="gauss-newton")),
        write_run(
            root / "ksd-80",
            config(dimension=80, curvature="hessian"),
            rows(seconds=24.0, floor=0.15, rate=4.5),
        ),
        write_run(root / "hf", config("hf", "HF", initial_damping=45.0), hf),
        write_run(
            root / "adam",
            config("adam", "Adam", lr=2e-3),
            rows("adam", steps=300, seconds=30.0, floor=0.21, rate=5),
            ending="seconds",
        ),
        write_run(
            root / "lbfgs",
            config("lbfgs", "L-BFGS", window=10),
            rows("lbfgs", steps=80, seconds=20.0, floor=2.0)[:48],
            ending=None,
        ),
        RunFolder(root / "ncg"),
    ]


def curve_images(count: int = 12) -> torch.Tensor:
    """Blurred arcs [count, 784]: something a person recognises in the strips."""
    y, x = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    arcs = [
        torch.exp(-((y - 14 - (5 - k) * ((x - 14) / 9) ** 2 - 0.3 * k) ** 2) / 2)
        * ((x > 3) & (x < 25))
        for k in range(count)
    ]
    return torch.stack(arcs).view(count, 784)


def _ritz_values(step: int, t: float) -> list[float]:
    values = [10 ** (3 - 0.42 * k + 0.8 * t + 0.1 * math.sin(step * 0.9 + k)) for k in range(20)]
    return sorted([*values, -(10 ** (0.5 - t + 0.3 * math.sin(step)))])


def write_seeds(base: Path, column: str, count: int) -> list[float]:
    """So many runs of a line of CURVES in Table 2; their lowest test errors."""
    found = []
    for cell in by_line(exhibit("table2").cells)["curves", column][:count]:
        metrics = rows(steps=20, floor=0.1 + cell.settings.seed)
        folder = write_run(cell.folder(base).path, metrics=metrics, ending=None)
        folder.finish({"ending": "early_stop", "best": metrics[-1], "last": metrics[-1]})
        found.append(metrics[-1]["test"])
    return found

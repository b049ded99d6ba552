"""What a curvature product costs, in gradients of the same batch.

The yardstick is torch's own gradient: forward, loss, backward. Each product is followed by one
gradient, so that both see the same machine and their ratio is steadier than either. A run is a
set-up and the products of one KSD step with K = 20; the other library does the same.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from benchmarks.environment import sentence, version_of
from benchmarks.timing import show, spread, timed
from krylov_descent import Objective
from krylov_descent.curvature import Curvature, CurvatureKind
from krylov_descent.laboratory.models import autoencoder

OURS, PEER = "krylov-descent", "curvlinops-for-pytorch"
TITLES = {"gauss-newton": "Gauss-Newton", "hessian": "Hessian", "fisher": "Fisher"}
MNIST_SIZES = (784, 1000, 500, 250, 30)
# Two libraries must agree to this in float32, or they do not measure the same matrix.
AGREEMENT = 1e-3

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, its loss and one batch."""

    model: nn.Module
    loss: nn.Module
    inputs: Tensor
    targets: Tensor

    def gradient(self) -> None:
        """What everything is measured in."""
        loss = self.loss(self.model(self.inputs), self.targets)
        torch.autograd.grad(loss, list(self.model.parameters()))


@dataclass(frozen=True)
class Candidate:
    """One curvature of one library; `prepare` is the set-up that each step needs."""

    library: str
    curvature: CurvatureKind
    prepare: Callable[[], Product]


@dataclass(frozen=True)
class Run:
    """One set-up with its products, in gradients measured between them."""

    with_setup: float
    without_setup: float
    gradient_seconds: float


def measure(
    device: torch.device,
    repeats: int,
    *,
    sizes: tuple[int, ...] = MNIST_SIZES,
    samples: int = 1000,
    products: int = 20,
    peer: str = PEER,
) -> dict[str, Any]:
    """Time every candidate in turn, `repeats` times around; without the peer if it is not there."""
    workload = autoencoder_workload(sizes, samples, device)
    count = sum(p.numel() for p in workload.model.parameters())
    generator = torch.Generator().manual_seed(1)
    vector = torch.randn(count, generator=generator).to(device)
    candidates = our_candidates(workload)
    skipped = [] if version_of(peer) else [peer]
    if skipped:
        print(f"{peer} skipped: it is not installed")
    else:
        candidates += peer_candidates(workload)
    _check_agreement(candidates, vector)
    runs: dict[int, list[Run]] = {i: [] for i in range(len(candidates))}
    for repeat in range(repeats):
        for i, candidate in enumerate(candidates):
            runs[i].append(_run(candidate, workload, vector, products))
            print(
                f"repeat {repeat + 1} of {repeats}, {candidate.library}, {candidate.curvature}: "
                f"{runs[i][-1].with_setup:.3f} gradients a product"
            )
    return {
        "settings": {
            "sizes": list(sizes),
            "parameters": count,
            "samples": samples,
            "products": products,
            "repeats": repeats,
        },
        "rows": [_row(candidate, runs[i]) for i, candidate in enumerate(candidates)],
        "skipped": skipped,
    }


def autoencoder_workload(sizes: tuple[int, ...], samples: int, device: torch.device) -> Workload:
    """An autoencoder with its mirror image; random images do for timing."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(samples, sizes[0], generator=generator).to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = autoencoder(sizes).to(device)
    return Workload(model, nn.BCEWithLogitsLoss(), images, images)


def our_candidates(workload: Workload) -> list[Candidate]:
    """This library's curvatures."""
    objective = Objective(workload.model, workload.loss)

    def prepare(curvature: Curvature) -> Product:
        return curvature.at(objective, (workload.inputs, workload.targets))

    kinds: tuple[CurvatureKind, ...] = get_args(CurvatureKind)
    curvatures = [Curvature(kind) for kind in kinds]
    return [Candidate(OURS, c.kind, partial(prepare, c)) for c in curvatures]


def peer_candidates(workload: Workload) -> list[Candidate]:
    """The same matrices by curvlinops, which differentiates anew for each product."""
    import curvlinops

    operators: dict[CurvatureKind, Any] = {
        "gauss-newton": curvlinops.GGNLinearOperator,
        "hessian": curvlinops.HessianLinearOperator,
        "fisher": curvlinops.EFLinearOperator,
    }

    def prepare(operator: Any) -> Product:
        parameters = list(workload.model.parameters())
        batches = [(workload.inputs, workload.targets)]
        matrix = operator(
            workload.model, workload.loss, parameters, batches, check_deterministic=False
        )
        return lambda vector: matrix @ vector

    return [
        Candidate(PEER, kind, partial(prepare, operator)) for kind, operator in operators.items()
    ]


def table(result: dict[str, Any]) -> str:
    """One row per curvature, one column per library."""
    settings, versions = result["settings"], result["environment"]["versions"]
    rows = {(row["library"], row["curvature"]): row for row in result["rows"]}
    peer = not result["skipped"]
    header = ["curvature", f"{OURS}", "the same without set-up"]
    lines = [header + ([f"curvlinops {versions.get(PEER, '')}".strip()] if peer else [])]
    for kind, title in TITLES.items():
        ours = rows[OURS, kind]
        cells = [title, show(ours["gradients"]), f"{ours['without_setup']['median']:.2f}"]
        lines.append(cells + ([show(rows[PEER, kind]["gradients"])] if peer else []))
    lines.insert(1, ["---"] * len(lines[0]))
    network = "-".join(map(str, settings["sizes"]))
    caption = (
        f"Cost of a curvature product in gradients of the same batch of {settings['samples']:,}: "
        f"autoencoder {network} with its mirror image ({settings['parameters']:,} parameters), "
        f"{settings['products']} products with their set-up, median of {settings['repeats']} "
        f"(lowest to highest). {sentence(result['environment'])}."
    )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + f"\n\n{caption}"


def _check_agreement(candidates: list[Candidate], vector: Tensor) -> None:
    """Also the warm-up: what a library does once in its life is not part of a step."""
    first: dict[str, Tensor] = {}
    for candidate in candidates:
        found = candidate.prepare()(vector)
        # Up to a factor: libraries weigh the elements of a sample differently in Fisher's matrix.
        found = found / found.norm()
        difference = float((found - first.setdefault(candidate.curvature, found)).norm())
        if not difference <= AGREEMENT:
            raise RuntimeError(
                f"{candidate.library} and {OURS} differ by {difference:.1e} in the "
                f"{candidate.curvature} product: they do not measure the same matrix"
            )


def _run(candidate: Candidate, workload: Workload, vector: Tensor, products: int) -> Run:
    device = vector.device
    setup, product = timed(candidate.prepare, device)
    product_seconds, gradient_seconds = [], []
    for _ in range(products):
        product_seconds.append(timed(lambda: product(vector), device)[0])
        gradient_seconds.append(timed(workload.gradient, device)[0])
    gradient = statistics.median(gradient_seconds)
    return Run(
        with_setup=(setup + sum(product_seconds)) / sum(gradient_seconds),
        # The first product builds the graphs of all, so it counts as set-up.
        without_setup=statistics.median(product_seconds[1:]) / gradient,
        gradient_seconds=gradient,
    )


def _row(candidate: Candidate, runs: list[Run]) -> dict[str, Any]:
    return {
        "library": candidate.library,
        "curvature": candidate.curvature,
        "gradients": spread([run.with_setup for run in runs]),
        "without_setup": spread([run.without_setup for run in runs]),
        "gradient_seconds": spread([run.gradient_seconds for run in runs]),
        "runs": [run.with_setup for run in runs],
    }

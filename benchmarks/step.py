"""One KSD step by phase, against its floor.

The floor is the matrix products that the step cannot do without (see `flops`): gradient and
Fisher diagonal on A, products on B, evaluations on C. Their operations are divided by the rate of
torch's plain gradient at that batch size in the same run (on a GPU: as one CUDA graph where that
is faster), and by the rate of a large matrix product, the arithmetic peak.

Steps are warm: libraries have set themselves up, and the previous step has joined the basis. A
search takes as many evaluations as it needs; so that steps can be compared, each is given 20: the
seconds of an evaluation are the slope of the line through the steps' searches, and what it takes
beside its evaluations counts once.
"""

import copy
import inspect
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from benchmarks.environment import UnavailableError
from benchmarks.flops import LinearStack, StepFlops
from benchmarks.images import autoencoder_problem
from benchmarks.parts import Part, Section, Setting
from benchmarks.rates import GradientTimer, Precision, peak_rate
from benchmarks.step_tables import phase_table, summary_table
from benchmarks.timing import spread, timed
from krylov_descent import KSD, StepResult
from krylov_descent.laboratory.problems.problem import Problem

EVALUATIONS = 20
# With fewer between the shortest and the longest search, a slope is mostly chance.
FEWEST_BETWEEN = 8
PHASES = ("gradient", "basis", "search")
# Steps are short on a GPU, and more of them make the median steadier.
STEPS_PER_REPEAT = {"cpu": 1, "cuda": 4}
WARM_UPS = {"cpu": 2, "cuda": 5}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step to be measured.

    Attributes:
        title: what tables call it.
        problem: an autoencoder of the laboratory.
        samples: |A|.
        subset: |B| and |C|.
        dimension: K.
        goal: milliseconds, or multiples of the floor, that it is to reach.
        goal_unit: which of the two.
        precision: of backward passes and products; forward passes are always float32. (The squares
            for the Fisher diagonal are in tf32 on a GPU, which the floor of float32 leaves out.)
        options: of KSD, that ask for that precision.
    """

    title: str
    problem: str
    samples: int
    subset: int
    goal: float
    goal_unit: Literal["ms", "floors"]
    dimension: int = 20
    precision: Precision = "float32"
    options: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, dict[str, Case]] = {
    "cpu": {
        "mnist-autoencoder": Case(
            title="MNIST autoencoder, CPU",
            problem="mnist-autoencoder",
            samples=60_000,
            subset=3_000,
            goal=1.3,
            goal_unit="floors",
        ),
    },
    "cuda": {
        "curves": Case(
            title="CURVES",
            problem="curves",
            samples=20_000,
            subset=1_000,
            goal=15,
            goal_unit="ms",
        ),
        "mnist-autoencoder": Case(
            title="MNIST autoencoder",
            problem="mnist-autoencoder",
            samples=60_000,
            subset=3_000,
            goal=70,
            goal_unit="ms",
        ),
        "mnist-autoencoder-tf32": Case(
            title="MNIST autoencoder, tf32",
            problem="mnist-autoencoder",
            samples=60_000,
            subset=3_000,
            goal=40,
            goal_unit="ms",
            precision="tf32",
            options={"tf32": True},
        ),
    },
}


def sections(device: torch.device) -> list[str]:
    """One per case."""
    return list(CASES[device.type])


def measure(section: str, setting: Setting) -> Section:
    """A case: floors, then steps."""
    case = CASES[setting.device.type][section]
    missing = set(case.options) - set(inspect.signature(KSD).parameters)
    if missing:
        raise UnavailableError(f"KSD has no option {', '.join(sorted(missing))}")
    problem, images = autoencoder_problem(case.problem, case.samples, setting.device)
    return {"images": images, **measure_case(case, problem, setting.repeats)}


def measure_case(case: Case, problem: Problem, repeats: int) -> Section:
    """The case on a problem that has its number of samples."""
    device = problem.train[0].device
    model = problem.make_model(0, None, device)
    optimizer = KSD(
        model,
        problem.criterion,
        dimension=case.dimension,
        subset_size=case.subset,
        previous_steps=1,  # the goals are for the paper's K + 1 directions
        weight_decay=problem.weight_decay,
        **case.options,
    )
    plain = copy.deepcopy(model)
    for _ in range(WARM_UPS[device.type]):
        optimizer.step(problem.train)
    timers = _timers(case, plain, problem, min(case.samples, optimizer.objective.micro_batch))
    steps = _steps(optimizer, problem, timers, repeats * STEPS_PER_REPEAT[device.type])
    flops = _flops(case, model, steps)
    rates = {phase: timer.rate().as_json() for phase, timer in timers.items()}
    peaks: dict[Precision, float] = {
        precision: peak_rate(device, precision, repeats)
        for precision in dict.fromkeys(
            rate[of] for rate in rates.values() for of in ("precision", "forward")
        )
    }
    return {
        "case": asdict(case),
        "settings": {
            "parameters": optimizer.objective.parameters.numel,
            "evaluations": EVALUATIONS,
            "repeats": len(steps),
            "warm_ups": WARM_UPS[device.type],
        },
        "flops": flops.by_phase(),
        "rates": rates,
        "peaks": peaks,
        "floor": {p: flops.by_phase()[p] / rates[p]["best"] for p in PHASES},
        "at_peak": {phase: _at_peak(flops, phase, rates[phase], peaks) for phase in PHASES},
        "measured": summary(steps),
        "steps": steps,
    }


def _steps(
    optimizer: KSD, problem: Problem, timers: dict[str, GradientTimer], count: int
) -> list[dict[str, Any]]:
    """Steps, and between them the plain gradients that they are held against."""
    device = problem.train[0].device
    steps = []
    for _ in range(count):
        seconds, result = timed(lambda: optimizer.step(problem.train), device)
        if not result.status.moved:
            raise RuntimeError(f"the step that is measured was not taken: {result}")
        steps.append(account(seconds, result))
        print(f"{1e3 * seconds:.1f} ms, {result}", flush=True)
        for timer in dict.fromkeys(timers.values()):
            timer.sample()
    return steps


def account(seconds: float, result: StepResult) -> dict[str, Any]:
    """A step's seconds by phase."""
    phases = {phase: result.seconds.get(phase, 0.0) for phase in PHASES}
    return {
        "seconds": seconds,
        "phases": phases,
        # What no phase claims: entering and leaving the step.
        "other": seconds - sum(phases.values()),
        "evaluations": result.evaluations,
        "products": result.products,
    }


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and spread of each phase and of the step, with 20 evaluations in each."""
    each = seconds_of_evaluation(steps)
    added = [each * (EVALUATIONS - step["evaluations"]) for step in steps]
    pairs = list(zip(steps, added, strict=True))
    return {
        "gradient": spread([step["phases"]["gradient"] for step in steps]),
        "basis": spread([step["phases"]["basis"] for step in steps]),
        "search": spread([step["phases"]["search"] + more for step, more in pairs]),
        "other": spread([step["other"] for step in steps]),
        "step": spread([step["seconds"] + more for step, more in pairs]),
        "evaluation": each,
        "evaluations": spread([step["evaluations"] for step in steps]),
        "products": spread([step["products"] for step in steps]),
    }


def seconds_of_evaluation(steps: list[dict[str, Any]]) -> float:
    """The slope of the searches' seconds over their evaluations, by least squares.

    Where they hardly differ it is the mean of the ratios, that of a search without other costs.
    """
    counts = np.array([step["evaluations"] for step in steps], float)
    seconds = np.array([step["phases"]["search"] for step in steps])
    if np.ptp(counts) < FEWEST_BETWEEN:
        return float((seconds / counts).mean())
    return float(np.polyfit(counts, seconds, 1)[0])


def _flops(case: Case, model: nn.Module, steps: list[dict[str, Any]]) -> StepFlops:
    return StepFlops.of(
        LinearStack.of(model),
        samples=case.samples,
        curvature_samples=case.subset,
        objective_samples=case.subset,
        products=round(spread([step["products"] for step in steps])["median"]),
        evaluations=EVALUATIONS,
    )


def _at_peak(
    flops: StepFlops, phase: str, rate: dict[str, Any], peaks: dict[Precision, float]
) -> float:
    """Seconds of a phase's operations at the rates of large matrix products."""
    forward = flops.forward_by_phase()[phase]
    rest = flops.by_phase()[phase] - forward
    return forward / peaks[rate["forward"]] + rest / peaks[rate["precision"]]


def _timers(case: Case, model: nn.Module, problem: Problem, piece: int) -> dict[str, GradientTimer]:
    """The plain gradient at the batch size and in the precisions of each phase.

    `piece` is how many samples of A the library takes at a time.
    """

    def timer(samples: int, forward: Precision) -> GradientTimer:
        inputs = problem.train[0][:samples]
        return GradientTimer(model, problem.criterion, inputs, case.precision, forward)

    basis = timer(case.subset, case.precision)
    return {
        "gradient": timer(piece, "float32"),
        "basis": basis,
        "search": basis if case.precision == "float32" else timer(case.subset, "float32"),
    }


PART = Part(
    sections=sections,
    measure=measure,
    tables={"": summary_table, "phases": phase_table},
)

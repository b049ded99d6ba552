"""What a data-parallel step of KSD sends and holds, and what that means on up to 1,000 GPUs.

Formulas, whose bytes the tests compare with counted ones, and a simulation from them: nothing here
is measured on more than one machine. `python -m benchmarks.scaling` writes the results and the
figure into docs/ and brings the tables of docs/distributed.md up to date.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from krylov_descent.runtime.ranks import Sent

DOCS = Path(__file__).parents[1] / "docs"
SMALL = 8  # bytes of a number that is no entry of a vector: float64 or int64
NOISE_POINTS = 4
Traffic = dict[tuple[str, str], Sent]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of KSD after the first, with the Fisher diagonal and lr = 1.

    Attributes:
        parameters: n.
        dimension: K.
        evaluations: of the objective and its gradient in the subspace; E.
        ranks: R.
        sharded: whether the basis is.
        growing: whether the sets B and C may grow, so that the data are compared.
        width: bytes of a parameter.
    """

    parameters: int
    dimension: int
    evaluations: int
    ranks: int
    sharded: bool = False
    growing: bool = False
    width: int = 4


def traffic(step: Step) -> Traffic:
    """What each rank hands over in a step, by phase and kind, as `Ranks.traffic` counts it."""
    n, K, ranks = step.parameters, step.dimension, step.ranks
    products = K + 1
    vector = n * step.width
    # Vectors in slices are padded to equal ones.
    padded = math.ceil(n / ranks) * ranks * step.width
    # Of the first direction its length; of others also that before it was orthogonalised.
    calls, lengths = products + 1, 2 * products - 1
    found: Traffic = {
        ("check", "all-gather"): Sent(1, 19 * SMALL * ranks),
        ("gradient", "all-gather"): Sent(1, SMALL * ranks),
        ("gradient", "all-reduce"): Sent(3, 4 * SMALL + 2 * vector),
        ("gradient", "broadcast"): Sent(1, SMALL),
        # Two pairs of numbers for the set, the numbers of its noise, and the evaluations.
        ("search", "all-reduce"): Sent(
            3 + step.evaluations,
            (2 * 2 + NOISE_POINTS) * SMALL + step.evaluations * (products + 1) * SMALL,
        ),
        ("step", "broadcast"): Sent(1, vector),
        ("step", "all-reduce"): Sent(1, SMALL),
    }
    if step.growing:
        found["data", "all-gather"] = Sent(2, 2 * SMALL * ranks)
    if not step.sharded:
        found["basis", "all-reduce"] = Sent(1 + products, 3 * SMALL + products * vector)
        found["basis", "broadcast"] = Sent(calls + 1, (lengths + 2 * products**2) * step.width)
        return found
    # With the last two of the k rows before, then with all of them, which gives H̄, too; twice with
    # all for the previous step; the last two rows of H̄, and VᵀV.
    in_two = [min(k, 2) + k for k in range(1, K)] + [2 * K]
    in_one = [K, products, products**2]
    found["basis", "all-reduce"] = Sent(
        1 + 2 * len(in_two) + len(in_one) + calls,
        3 * SMALL + (sum(in_two) + sum(in_one) + calls) * step.width,
    )
    found["basis", "all-gather"] = Sent(products, products * padded)
    found["basis", "reduce-scatter"] = Sent(products, products * padded)
    # Noise is measured along the previous step, which every rank has.
    evaluated = Sent(step.evaluations, step.evaluations * padded)
    found["search", "all-gather"] = found["search", "reduce-scatter"] = evaluated
    found["step", "all-gather"] = Sent(1, padded)
    return found


def held(step: Step) -> int:
    """Bytes that a rank holds at most in a step, beyond model, data and activations.

    With one previous step: the basis, and seven vectors more, those of the K + 8 of one process
    that are not basis.
    """
    basis = (step.dimension + 1) * step.parameters
    return (7 * step.parameters + (basis // step.ranks if step.sharded else basis)) * step.width


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the simulation assumes of each GPU and of the links between them.

    Attributes:
        flops: that a GPU does in a second.
        bandwidth: bytes a second that a GPU sends and receives: a port of 400 Gbit/s.
        latency: seconds of an exchange between two.
    """

    flops: float = 200e12
    bandwidth: float = 50e9
    latency: float = 10e-6


def seconds_sent(sent: Traffic, ranks: int, machine: Machine) -> float:
    """Time of the exchanges of a step: rings for the bytes, trees for the latency."""
    if ranks == 1:
        return 0.0
    part = (ranks - 1) / ranks
    # Times that a ring carries the payload past each rank.
    loads = {"all-reduce": 2 * part, "all-gather": part, "reduce-scatter": part, "broadcast": 1.0}
    hops = math.ceil(math.log2(ranks))
    return sum(
        loads[kind] * one.bytes / machine.bandwidth + one.calls * hops * machine.latency
        for (_, kind), one in sent.items()
    )


def seconds_computed(step: Step, samples: int, machine: Machine) -> float:
    """Time of the passes of a step over a rank's part of the samples, |B| = |C| = N/K.

    Six operations per parameter and sample in a gradient, 4/3 of that with the squares or in a
    product, 1/3 in a value.
    """
    own = math.ceil(samples / step.ranks)
    subset = math.ceil(own / step.dimension)
    gradients = (
        own * 4 / 3
        + (step.dimension + 1) * subset * 4 / 3
        + step.evaluations * subset
        + NOISE_POINTS * subset / 3
    )
    return 6 * step.parameters * gradients / machine.flops


DIMENSION = EVALUATIONS = 20
SIZES = (10**8, 10**10)
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
STRONG_SAMPLES, WEAK_SAMPLES = 10**7, 10**5


def simulate(machine: Machine) -> list[dict[str, Any]]:
    """Strong and weak scaling for each size, with and without a sharded basis."""
    rows = []
    for parameters in SIZES:
        for sharded in (False, True):
            for ranks in RANKS:
                step = Step(
                    parameters=parameters,
                    dimension=DIMENSION,
                    evaluations=EVALUATIONS,
                    ranks=ranks,
                    sharded=sharded,
                )
                sent = seconds_sent(traffic(step), ranks, machine)
                strong = seconds_computed(step, STRONG_SAMPLES, machine)
                weak = seconds_computed(step, WEAK_SAMPLES * ranks, machine)
                alone = seconds_computed(
                    Step(
                        parameters=parameters,
                        dimension=DIMENSION,
                        evaluations=EVALUATIONS,
                        ranks=1,
                    ),
                    STRONG_SAMPLES,
                    machine,
                )
                rows.append(
                    {
                        "parameters": parameters,
                        "sharded": sharded,
                        "ranks": ranks,
                        "sent_seconds": sent,
                        "strong_seconds": strong + sent,
                        "strong_speedup": alone / (strong + sent),
                        "weak_efficiency": weak / (weak + sent),
                        "gigabytes_held": held(step) / 1e9,
                    }
                )
    return rows


def vectors_per_pass(dimension: int, evaluations: int) -> float:
    """n-vectors that KSD sums or broadcasts in a pass over the data, with |B| = |C| = N/K."""
    passes = 1 + (dimension + 1 + evaluations + NOISE_POINTS) / dimension
    return (dimension + 4) / passes


def tables(rows: list[dict[str, Any]]) -> str:
    """The simulation as Markdown."""
    lines = [
        f"| n | basis | GPUs | exchange per step | speed-up, N = {_power(STRONG_SAMPLES)} "
        f"| efficiency, {_power(WEAK_SAMPLES)} samples per GPU | held per GPU |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {_power(row['parameters'])} | {'sharded' if row['sharded'] else 'whole'} | "
        f"{row['ranks']:,} | {row['sent_seconds']:.3g} s | {row['strong_speedup']:.3g} | "
        f"{row['weak_efficiency']:.0%} | {row['gigabytes_held']:,.1f} GB |"
        for row in rows
        if row["ranks"] in (1, 8, 64, 1000)
    ]
    per_pass = vectors_per_pass(DIMENSION, EVALUATIONS)
    large = next(row for row in rows if row["ranks"] == RANKS[-1])
    # Efficiency ½ is where computing takes as long as sending.
    even = WEAK_SAMPLES * (1 / large["weak_efficiency"] - 1)
    lines += [
        "",
        f"With n = {_power(large['parameters'])} on {RANKS[-1]:,} GPUs and the whole basis on each "
        f"of them, computing and sending take the same time at {even:,.0f} samples per GPU.",
        "",
        f"Per pass over the data, with K = {DIMENSION} and {EVALUATIONS} evaluations, KSD "
        f"exchanges {per_pass:.1f} vectors of n numbers. Data-parallel SGD exchanges one for each "
        f"of its N/b mini-batches, so it sends more than KSD for every batch size b below "
        f"N/{per_pass:.1f}: with N = {_power(STRONG_SAMPLES)} and b = 1,000, "
        f"{STRONG_SAMPLES / 1000 / per_pass:,.0f} times as much.",
    ]
    return "\n".join(lines)


def _power(number: int) -> str:
    return "10" + str(int(math.log10(number))).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Strong and weak scaling side by side."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.8, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    panels = (
        ("strong_speedup", f"speed-up over one GPU, N = {_power(STRONG_SAMPLES)} in all"),
        ("weak_efficiency", f"efficiency, {_power(WEAK_SAMPLES)} samples per GPU"),
    )
    for index, (key, label) in enumerate(panels):
        axes = figure.add_subplot(1, 2, index + 1)
        for number, (parameters, sharded) in enumerate(
            (parameters, sharded) for parameters in SIZES for sharded in (False, True)
        ):
            chosen = [
                row for row in rows if (row["parameters"], row["sharded"]) == (parameters, sharded)
            ]
            axes.plot(
                [row["ranks"] for row in chosen],
                [row[key] for row in chosen],
                linestyle=("-", "--", "-.", ":")[number],
                label=f"n = {_power(parameters)}, basis {'sharded' if sharded else 'whole'}",
            )
        scale = "log" if key == "strong_speedup" else "linear"
        axes.set(xlabel="GPUs", ylabel=label, xscale="log", yscale=scale)
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend(fontsize="small")
    with mpl.rc_context({"svg.hashsalt": "krylov-descent", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


BEGIN, END = "<!-- scaling -->\n", "<!-- end of scaling -->"


def filled(page: str, rows: list[dict[str, Any]]) -> str:
    """The page with the tables between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables(rows)}\n\n{END}{after}"


def main() -> None:
    """Simulate, write, draw."""
    machine = Machine()
    rows = simulate(machine)
    result = {"assumed": asdict(machine), "dimension": DIMENSION, "evaluations": EVALUATIONS}
    result |= {"strong_samples": STRONG_SAMPLES, "weak_samples": WEAK_SAMPLES, "rows": rows}
    (DOCS / "distributed-scaling.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, DOCS / "distributed-scaling.svg")
    page = DOCS / "distributed.md"
    page.write_text(filled(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
    print(tables(rows))


if __name__ == "__main__":
    main()

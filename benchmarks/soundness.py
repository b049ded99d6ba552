"""Does anything go wrong in silence? Many small trainings, and errors at many places of a step.

    stalls   nets with kinks that are trained with the defaults: how many stop before their end
    faults   errors at random calls of a step: how many leave something behind
    ranks    errors on one of two ranks between any two exchanges: how many ranks end otherwise
             than told

All of it is counted, nothing timed: the numbers are the same on a machine that is busy.
"""

from dataclasses import asdict

import torch

from benchmarks import fault_sweep
from benchmarks.environment import sentence
from benchmarks.parts import Part, Section, Sections, Setting, markdown
from benchmarks.stall_sweep import KINDS, train

STALLS, FAULTS = "stalls", "faults"
SEEDS, STEPS = 20, 60
POINTS, FAULT_SEEDS = 40, 3


def sections(device: torch.device) -> list[str]:
    """One for each question; on a CPU, where the arithmetic is the same each time."""
    return [STALLS, FAULTS] if device.type == "cpu" else []


def measure(section: str, setting: Setting) -> Section:
    """Ask a question at its full size."""
    del setting
    return {STALLS: _stalls, FAULTS: _faults}[section]()


def _stalls() -> Section:
    runs = [asdict(train(kind, seed, STEPS)) for kind in KINDS for seed in range(SEEDS)]
    return {"seeds": SEEDS, "steps": STEPS, "runs": runs}


def _faults() -> Section:
    rows = []
    for name in fault_sweep.OPTIMIZERS:
        counts = [fault_sweep.sweep([name], points=POINTS, seed=s) for s in range(FAULT_SEEDS)]
        differences = [asdict(found) for _, differing in counts for found in differing]
        rows.append(
            {"optimizer": name, "faults": sum(n for n, _ in counts), "differences": differences}
        )
    return {"rows": rows}


def table(sections: Sections, device: torch.device) -> str:
    """One row per kind of problem, or per optimiser."""
    del device
    parts = []
    if STALLS in sections:
        found = sections[STALLS]
        rows = [["trained with the defaults", "runs", "stalled", "median loss at the end"]]
        for kind in dict.fromkeys(run["kind"] for run in found["runs"]):
            own = [run for run in found["runs"] if run["kind"] == kind]
            losses = sorted(run["loss"] for run in own)
            stalled = sum(run["stalled"] for run in own)
            rows.append([kind, str(len(own)), str(stalled), f"{losses[len(own) // 2]:.2g}"])
        parts += [markdown(rows), _caption(found, f"At most {found['steps']} steps a run.")]
    if FAULTS in sections:
        found = sections[FAULTS]
        rows = [["errors in a step of", "errors", "left something behind"]]
        rows += [
            [row["optimizer"], str(row["faults"]), str(len(row["differences"]))]
            for row in found["rows"]
        ]
        parts += [markdown(rows), _caption(found, "At random calls of the library's functions.")]
    return "\n\n".join(parts)


def _caption(found: Section, text: str) -> str:
    return f"{text} {sentence(found['environment'])}."


PART = Part(sections=sections, measure=measure, tables={"": table})

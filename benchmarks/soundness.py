"""Does anything go wrong in silence? Many small trainings, and errors at many places of a step.

    stalls   nets with kinks that are trained with the defaults: how many stop before their end
    faults   errors at random calls of a step: how many leave something behind
    ranks    errors on one of two or three ranks, before every exchange and in some operations: how
             many end otherwise than told

All of it is counted, nothing is timed.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context

import torch

from benchmarks import fault_sweep
from benchmarks.environment import sentence
from benchmarks.parts import Part, Section, Sections, Setting, markdown
from benchmarks.stall_sweep import KINDS, Run, train

STALLS, FAULTS, RANKS = "stalls", "faults", "ranks"
SEEDS = {"cpu": 20, "cuda": 2}
STEPS = 60
POINTS, FAULT_SEEDS = 40, 3
RANK_OPERATIONS = 10


def sections(device: torch.device) -> list[str]:
    """One for each question; errors are the same on a GPU, and asked about on a CPU."""
    return [STALLS, FAULTS, RANKS] if device.type == "cpu" else [STALLS]


def measure(section: str, setting: Setting) -> Section:
    """Ask a question at its full size."""
    return {STALLS: _stalls, FAULTS: _faults, RANKS: _ranks}[section](setting.device)


def _stalls(device: torch.device) -> Section:
    """On a CPU with a process for each core: a net is too small for more than one."""
    seeds = SEEDS[device.type]
    cases = [(kind, seed) for kind in KINDS for seed in range(seeds)]
    alone = partial(_train_alone, device=device)
    if device.type == "cpu":
        with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as processes:
            runs = list(processes.map(alone, cases))
    else:
        runs = list(map(alone, cases))
    return {"seeds": seeds, "steps": STEPS, "runs": [asdict(run) for run in runs]}


def _train_alone(case: tuple[str, int], device: torch.device) -> Run:
    torch.set_num_threads(1)
    return train(*case, STEPS, device)


def _faults(_: torch.device) -> Section:
    rows = []
    for name in fault_sweep.OPTIMIZERS:
        counts = [fault_sweep.sweep([name], points=POINTS, seed=s) for s in range(FAULT_SEEDS)]
        differences = [asdict(found) for _, differing in counts for found in differing]
        faults = sum(number for number, _ in counts)
        rows.append({"optimizer": name, "faults": faults, "differences": differences})
    return {"rows": rows}


def _ranks(_: torch.device) -> Section:
    from tests.distributed.faults import large_sweep  # a group of processes, which tests have

    faults, complaints = large_sweep(RANK_OPERATIONS)
    return {"faults": faults, "complaints": complaints}


def table(sections: Sections, device: torch.device) -> str:
    """A table for each question that was asked."""
    del device
    tables = {STALLS: _stall_table, FAULTS: _fault_table, RANKS: _rank_table}
    return "\n\n".join(tables[name](sections[name]) for name in tables if name in sections)


def _stall_table(found: Section) -> str:
    rows = [["trained with the defaults", "runs", "stalled", "loss at the end: median", "highest"]]
    for kind in dict.fromkeys(run["kind"] for run in found["runs"]):
        own = [run for run in found["runs"] if run["kind"] == kind]
        losses = sorted(run["loss"] for run in own)
        stalled = sum(run["stalled"] for run in own)
        middle, highest = losses[len(own) // 2], losses[-1]
        rows.append([kind, str(len(own)), str(stalled), f"{middle:.2g}", f"{highest:.2g}"])
    return _with_caption(rows, f"At most {found['steps']} steps a run.", found)


def _fault_table(found: Section) -> str:
    rows = [["errors in a step of", "errors", "left something behind"]]
    rows += [
        [row["optimizer"], str(row["faults"]), str(len(row["differences"]))]
        for row in found["rows"]
    ]
    text = "Errors at random calls of the library's functions; compared are parameters, state, "
    return _with_caption(rows, f"{text}parameter groups and the next step, bit for bit.", found)


def _rank_table(found: Section) -> str:
    rows = [
        ["errors on one of several ranks", "errors", "ended otherwise than told"],
        ["KSD, HessianFree, NonlinearCG", str(found["faults"]), str(len(found["complaints"]))],
    ]
    text = (
        "Before every exchange, and in some operations between, on two and three ranks. The failed "
        "rank has to raise its own error, and all others one that quotes it, within five seconds, "
        "with parameters and state as before."
    )
    return _with_caption(rows, text, found)


def _with_caption(rows: list[list[str]], text: str, found: Section) -> str:
    return f"{markdown(rows)}\n\n{text} {sentence(found['environment'])}."


PART = Part(sections=sections, measure=measure, tables={"": table})

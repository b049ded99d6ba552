"""A step against its floor, as tables: one line a case, and one a phase."""

import torch

from benchmarks.environment import sentence
from benchmarks.parts import Section, Sections, markdown
from benchmarks.timing import Spread

PHASE_TITLES = {
    "gradient": "gradient and Fisher diagonal on A",
    "basis": "products on B, basis",
    "search": "evaluations on C, search",
}


def summary_table(sections: Sections, device: torch.device) -> str:
    """One line a case: measured, floor, peak, goal."""
    del device
    rows = [["step", "measured", "floor", "measured / floor", "at the arithmetic peak", "to reach"]]
    for section in sections.values():
        case, measured = section["case"], section["measured"]["step"]
        floor, at_peak = (sum(section[key].values()) for key in ("floor", "at_peak"))
        goal = (
            f"{case['goal']:g} ms" if case["goal_unit"] == "ms" else f"{case['goal']:g} × its floor"
        )
        rows.append(
            [
                _described(section),
                _milliseconds(measured),
                f"{1e3 * floor:.1f} ms",
                f"{measured['median'] / floor:.2f}",
                f"{1e3 * at_peak:.1f} ms",
                goal,
            ]
        )
    return f"{markdown(rows)}\n\n{_caption(sections)}"


def phase_table(sections: Sections, device: torch.device) -> str:
    """One table a case, one line a phase: floor, measured, what is left."""
    del device
    return (
        "\n\n".join(
            f"**{_described(section)}**\n\n{_phases(section)}" for section in sections.values()
        )
        + f"\n\n{_caption(sections)}"
    )


def _phases(section: Section) -> str:
    measured, floors, peaks = section["measured"], section["floor"], section["at_peak"]
    rows = [
        ["phase", "GFLOP", "plain gradient, GFLOP/s", "floor, ms", "measured, ms", "left, ms", "×"]
    ]
    for phase, title in PHASE_TITLES.items():
        rows.append(
            [
                title,
                f"{section['flops'][phase] / 1e9:.1f}",
                f"{section['rates'][phase]['best'] / 1e9:,.0f}",
                *_compared(floors[phase], measured[phase]["median"]),
            ]
        )
    other = measured["other"]["median"]
    rows.append(
        ["entering and leaving", "", "", "", f"{1e3 * other:.2f}", f"{1e3 * other:.2f}", ""]
    )
    whole = measured["step"]["median"]
    rows.append(["**step**", f"{sum(section['flops'].values()) / 1e9:.1f}", ""])
    rows[-1] += _compared(sum(floors.values()), whole)
    peak = ", ".join(
        f"{rate / 1e9:,.0f} GFLOP/s in {precision}" for precision, rate in section["peaks"].items()
    )
    return (
        f"{markdown(rows)}\n\nThe search took {measured['evaluations']['median']:.0f} evaluations "
        f"({measured['evaluations']['low']:.0f} to {measured['evaluations']['high']:.0f}), the "
        f"basis {measured['products']['median']:.0f} products. A large matrix product runs at "
        f"{peak}, at which the step's operations would take {1e3 * sum(peaks.values()):.1f} ms."
    )


def _compared(floor: float, measured: float) -> list[str]:
    left = measured - floor
    return [
        f"{1e3 * floor:.2f}",
        f"{1e3 * measured:.2f}",
        f"{1e3 * left:.2f}",
        f"{measured / floor:.2f}",
    ]


def _described(section: Section) -> str:
    case = section["case"]
    return (
        f"{case['title']}, K = {case['dimension']}, \\|B\\| = \\|C\\| = {case['subset']:,}, "
        f"N = {case['samples']:,}"
    )


def _milliseconds(found: Spread) -> str:
    low, high = (f"{1e3 * found[key]:.1f}" for key in ("low", "high"))
    return f"{1e3 * found['median']:.1f} ms ({low} to {high})"


def _caption(sections: Sections) -> str:
    section = next(iter(sections.values()))
    settings = section["settings"]
    repeats = sorted({one["settings"]["repeats"] for one in sections.values()})
    return (
        f"Warm steps, median of {' or '.join(map(str, repeats))} (lowest to highest), each with "
        f"{settings['evaluations']} evaluations in its search. The floor is the step's "
        "matrix products at the rate of torch's plain gradient at the same batch size, measured "
        f"between the steps. {sentence(section['environment'])}."
    )

"""What products cost, as tables."""

import torch

from benchmarks.candidates import COMPILED, EAGER, OURS, PEER
from benchmarks.environment import sentence
from benchmarks.parts import Section, Sections, markdown
from benchmarks.timing import show

TITLES = {"gauss-newton": "Gauss-Newton", "hessian": "Hessian", "fisher": "Fisher"}
MODEL_TITLES = {
    "autoencoder": "MNIST autoencoder",
    "cnn": "CNN",
    "gru": "GRU",
    "transformer": "transformer",
}


def autoencoder_table(sections: Sections, device: torch.device) -> str:
    """The MNIST autoencoder: one row per curvature, one column per library."""
    del device
    if "autoencoder" not in sections:
        return "*The autoencoder is not measured yet.*"
    section = sections["autoencoder"]
    rows = {(row["library"], row["curvature"]): row for row in section["rows"]}
    peers = [name for name in (EAGER, COMPILED) if any(library == name for library, _ in rows)]
    lines = [["curvature", OURS, "the same without set-up", *_named(peers, section)]]
    for kind, title in TITLES.items():
        own = rows[OURS, kind]
        lines.append([title, _cost(own), f"{own['without_setup']['median']:.2f}"])
        lines[-1] += [_cost(rows.get((peer, kind))) for peer in peers]
    settings = section["settings"]
    caption = (
        f"Cost of a curvature product in gradients of the same batch of {settings['samples']:,}: "
        f"{settings['title']} ({settings['parameters']:,} parameters), "
        f"{settings['products']} products with their set-up, median of {settings['repeats']} "
        f"(lowest to highest). {sentence(section['environment'])}."
    )
    return f"{markdown(lines)}\n\n{caption}"


def models_table(sections: Sections, device: torch.device) -> str:
    """All networks: seconds and peak memory in gradients, one column per library."""
    del device
    there = [name for name in MODEL_TITLES if name in sections]
    libraries = (OURS, EAGER, COMPILED)
    lines = [["network", "curvature", *libraries, *(f"memory: {name}" for name in libraries)]]
    for name in there:
        rows = {(row["library"], row["curvature"]): row for row in sections[name]["rows"]}
        for kind in dict.fromkeys(kind for _, kind in rows):
            found = [rows.get((library, kind)) for library in libraries]
            lines.append([MODEL_TITLES[name], TITLES[kind], *map(_cost, found)])
            lines[-1] += [_memory_cost(row) for row in found]
    lines += [
        [MODEL_TITLES[name], "*not measured yet*"] + [""] * 6
        for name in MODEL_TITLES
        if name not in there
    ]
    sizes = ", ".join(
        f"{MODEL_TITLES[name]} {sections[name]['settings']['parameters']:,} parameters and "
        f"{sections[name]['settings']['samples']:,} samples"
        for name in there
    )
    last = sections[there[-1]]
    caption = (
        f"Seconds and peak memory of a product, both in gradients of the same batch: {sizes}. "
        f"Set-up of {last['settings']['products']} products included; median (lowest to highest). "
        f"curvlinops {last['environment']['versions'].get(PEER, 'is not installed')}; “fails” "
        "where it has no such product or cannot be compiled as one graph, “off” where its product "
        "is not that of finite differences. "
        f"{sentence(*(sections[name]['environment'] for name in there))}."
    )
    return f"{markdown(lines)}\n\n{caption}"


def _named(peers: list[str], section: Section) -> list[str]:
    version = section["environment"]["versions"].get(PEER, "")
    return [peer.replace(EAGER, f"{EAGER} {version}".strip()) for peer in peers]


def _cost(row: Section | None) -> str:
    if row is None:
        return "–"
    if "failed" in row:
        return "fails"
    off = f", product off by {100 * row['off']:.1f}%" if "off" in row else ""
    return show(row["gradients"]) + off


def _memory_cost(row: Section | None) -> str:
    used = row.get("memory") if row else None
    return f"{used['gradients']:.2f}" if used else "–"

"""`python -m benchmarks` measures everything; `python -m benchmarks product` a part of it."""

import argparse
import json
from pathlib import Path

import torch

from benchmarks import tables
from benchmarks.environment import UnavailableError, describe
from benchmarks.parts import PARTS, Part, result_file


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and bring the tables up to date; the exit status."""
    options = _parser().parse_args(arguments)
    if options.part == "tables":
        return tables.update(tables.ROOT, options.output, check=options.check)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no CUDA device here")
    for name in PARTS if options.part == "all" else [options.part]:
        run(name, PARTS[name], device, options.repeats, options.output)
    # Results written elsewhere are a trial: they leave the documentation alone.
    if options.output == tables.RESULTS:
        return tables.update(tables.ROOT, options.output, check=False)
    return 0


def run(name: str, part: Part, device: torch.device, repeats: int, output: Path) -> None:
    """Measure one part, print its table and write its JSON file."""
    try:
        measured = part.measure(device, repeats)
    except UnavailableError as reason:
        print(f"{name} skipped: {reason}")
        return
    result = {"part": name, "environment": describe(device), **measured}
    output.mkdir(parents=True, exist_ok=True)
    path = output / result_file(name, device)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"\n{part.table(result)}\n\nWritten to {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("part", nargs="?", default="all", choices=["all", *PARTS, "tables"])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--repeats", type=_at_least_one, default=5, help="of each timing")
    parser.add_argument(
        "--output", type=Path, default=tables.RESULTS, help="folder of the JSON files"
    )
    parser.add_argument(
        "--check", action="store_true", help="with tables: change nothing, fail if out of date"
    )
    return parser


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m benchmarks` measures everything; `python -m benchmarks product` a part of it."""

import argparse
import time
import traceback
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import torch

from benchmarks import pages
from benchmarks.catalogue import PARTS
from benchmarks.environment import UnavailableError, describe
from benchmarks.parts import NOT_MEASURED, Part, Setting, place_of, result_folder
from benchmarks.records import read_all, write

# A part begins no new section after so long; called again it goes on where it can.
SECONDS = {"cpu": 600.0, "cuda": 80.0}


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results and bring tables and figures up to date; the exit status."""
    options = _parser().parse_args(arguments)
    if options.part == "tables":
        return pages.update(pages.ROOT, options.output, check=options.check)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no CUDA device here")
    seconds = SECONDS[device.type] if options.seconds is None else options.seconds
    failed: list[str] = []
    chosen = PARTS if options.part == "all" else {options.part: PARTS[options.part]}
    sections = [section for part in chosen.values() for section in part.sections(device)]
    if not wanted(sections, options.only):
        raise SystemExit(
            f"--only: no section begins with {' or '.join(options.only)}; there are "
            f"{_some(sections)}"
        )
    for name, part in chosen.items():
        folder = options.output / result_folder(name, place_of(device))
        setting = Setting(device=device, repeats=options.repeats, folder=folder)
        failed += run(name, part, setting, only=options.only, seconds=seconds)
    # Results written elsewhere are a trial: they leave the documentation alone.
    if options.output == pages.RESULTS:
        pages.update(pages.ROOT, options.output, check=False)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def run(
    name: str, part: Part, setting: Setting, *, only: Sequence[str] = (), seconds: float
) -> list[str]:
    """Measure a part section by section, write each as it is done, and print the table.

    Returns:
        The sections that failed: an error in one does not cost the others their time on a machine.
    """
    device, started = setting.device, time.monotonic()
    left, failed = [], []
    chosen = wanted(part.sections(device), only)
    to_do = [section for section in chosen if not _is_done(section, part, setting)]
    if expected := sum(part.seconds(section, device) for section in to_do):
        print(f"{name}: {len(to_do)} sections to measure, about {expected / 60:.0f} min at most")
    for section in chosen:
        path = setting.folder / f"{section}.json"
        # Asked again: what was measured meanwhile may speak against a section that is there.
        if _is_done(section, part, setting):
            continue
        passed = time.monotonic() - started
        if passed + part.seconds(section, device) > seconds:
            left.append(section)
            continue
        print(f"[{passed:.0f} s] {name}: {section}", flush=True)
        try:
            measured = part.measure(section, setting)
        except UnavailableError as reason:
            print(f"{name}: {section} skipped: {reason}", flush=True)
            continue
        except Exception:
            traceback.print_exc()
            failed.append(f"{name}: {section}")
            continue
        write(path, {"environment": describe(device), **measured})
    if left:
        print(f"{name}: left for another call (--seconds {seconds:.0f} is over): {_some(left)}")
    found = read_all(setting.folder)
    print(f"\n{part.tables[''](found, device) if found else NOT_MEASURED}\n")
    print(f"{name}: results are in {setting.folder}", flush=True)
    return failed


def _is_done(section: str, part: Part, setting: Setting) -> bool:
    is_there = part.kept and (setting.folder / f"{section}.json").exists()
    return is_there and not part.stale(section, setting)


def wanted(sections: list[str], only: Sequence[str]) -> list[str]:
    """The sections that a pattern is the beginning of; all without patterns."""
    if not only:
        return sections
    return [name for name in sections if any(fnmatch(name, f"{p}*") for p in only)]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("part", nargs="?", default="all", choices=["all", *PARTS, "tables"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=_at_least_one, default=5, help="of each timing")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="SECTION", help="sections that begin like this"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="a part begins no new section after so long (600 on a CPU, 80 on a GPU)",
    )
    parser.add_argument(
        "--output", type=Path, default=pages.RESULTS, help="folder of the JSON files"
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

"""Where and with what a measurement was made."""

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from krylov_descent.laboratory.environment import cpu_name, output_of

# New records do not make a commit unclean.
RESULTS = ":(exclude,top)benchmarks/results"
PACKAGES = (
    "torch",
    "numpy",
    "krylov-descent",
    "curvlinops-for-pytorch",
    "pytorch_optimizer",
    "deepxde",
    "scikit-learn",
    "scimba",
)


class UnavailableError(RuntimeError):
    """A part cannot be measured here, and why; the harness says so and goes on."""


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, device, threads, commit and date, ready for JSON."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: version for name in PACKAGES if (version := version_of(name))},
        "device": device_name(device),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def device_name(device: torch.device) -> str:
    """Of the GPU or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def physical_cores() -> int:
    """The cores that this process may use; two threads of one core count once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    places = (Path(f"/sys/devices/system/cpu/cpu{cpu}/topology") for cpu in allowed)
    try:
        return len(
            {
                ((place / "physical_package_id").read_text(), (place / "core_id").read_text())
                for place in places
            }
        )
    except OSError:  # no such files in some containers
        return len(allowed)


def sentence(environment: dict[str, Any], *others: dict[str, Any]) -> str:
    """The environment in a few words, for a table's caption; of others only their dates count."""
    threads = environment["threads"]
    where = environment["device"]
    if where == environment["cpu"]:
        where += f", {threads} thread{'s' if threads > 1 else ''}"
    dates = sorted(measured["date"][:10] for measured in (environment, *others))
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"{where}, torch {environment['versions']['torch']}, {when}"


def version_of(package: str) -> str | None:
    """The installed version of a distribution; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit that was measured, with "+changes" where files differ; None without git.

    Files of results do not count: a measurement writes them.
    """
    here = Path(__file__).parent
    revision = output_of("git", "rev-parse", "HEAD", folder=here).strip()
    if not revision:
        return None
    changes = output_of("git", "status", "--porcelain", "--", ":/", RESULTS, folder=here)
    return revision + ("+changes" if changes else "")

"""Where and with what a measurement was made."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

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
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


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


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    for line in _output_of("lscpu").splitlines():
        if line.startswith("Model name:"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit that was measured, with "+changes" where files differ; None without git.

    Files of results do not count: a measurement writes them.
    """
    revision = _output_of("git", "rev-parse", "HEAD").strip()
    if not revision:
        return None
    return revision + (
        "+changes" if _output_of("git", "status", "--porcelain", "--", ":/", RESULTS) else ""
    )


def _output_of(*command: str) -> str:
    """What a command prints; empty where it is not there or fails."""
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        )
    except OSError:
        return ""
    return found.stdout if found.returncode == 0 else ""

"""Where and with what a run was made, for its record."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import krylov_descent

PACKAGE = Path(krylov_descent.__file__).parent
# What does not tell one environment from another.
WHEN = "date"


def environment(device: torch.device) -> dict[str, Any]:
    """Date, commit, versions, hardware and threads, ready for JSON."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        WHEN: datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "krylov-descent": krylov_descent.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "gpu": gpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What is another in two environments, as a list for a sentence; empty if nothing is.

    Only what both of them tell is compared.
    """
    return ", ".join(
        f"{name} {before[name]} (now {now[name]})"
        for name in now
        if name != WHEN and before.get(name) is not None and before[name] != now[name]
    )


@cache
def cpu_name() -> str:
    """The processor's name as the system tells it."""
    for line in output_of("lscpu").splitlines():
        if line.startswith("Model name:"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@cache
def commit(folder: Path = PACKAGE) -> str | None:
    """The commit of a package's checkout, with "+changes" where its files differ from it.

    None where the package is installed without its history, also inside of another repository.
    """
    if not output_of("git", "ls-files", "__init__.py", folder=folder):
        return None
    changes = output_of("git", "status", "--porcelain", "--", ".", folder=folder)
    revision = output_of("git", "rev-parse", "HEAD", folder=folder).strip()
    return revision + ("+changes" if changes else "")


def output_of(*command: str, folder: Path | None = None) -> str:
    """What a command prints; empty where it is not there or fails."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    except OSError:
        return ""
    return found.stdout if found.returncode == 0 else ""

"""The processor and the libraries, on which the bits of a trace depend beside the code."""

import platform
import re
import subprocess
from pathlib import Path

import numpy as np
import torch

Environment = dict[str, str]

# Where all of these are the same, bits must be the same.
DECISIVE = ("architecture", "processor", "processor_id", "instructions", "torch", "blas", "numpy")
# Kernels are chosen by these.
FEATURES = (
    *("avx", "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile", "fma"),
    *("asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
)


def this_environment() -> Environment:
    """The environment of this process; "unknown" for what the operating system does not tell."""
    described = _cpu_information()
    settings = torch.__config__.show()
    features = described.get("flags", described.get("Features", "")).split()
    parts = (
        *("vendor_id", "cpu family", "model", "stepping"),
        *("CPU implementer", "CPU part", "CPU variant", "CPU revision"),
    )
    identity = [f"{part} {described[part]}" for part in parts if part in described]
    return {
        "architecture": platform.machine(),
        "processor": _processor_name(described),
        "processor_id": ", ".join(identity) or "unknown",
        "features": " ".join(name for name in FEATURES if name in features) or "unknown",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "blas": _setting("BLAS_INFO", settings),
        "lapack": _setting("LAPACK_INFO", settings),
        "onednn": str(torch.backends.mkldnn.is_available()),
    }


def same_bits(one: Environment, other: Environment) -> bool:
    """Whether the two environments give the same bits."""
    return all(one.get(entry) == other.get(entry) for entry in DECISIVE)


def file_name(environment: Environment) -> str:
    """Of the recorded file: the kind of processor."""
    words = f"{environment['architecture']} {environment['processor']}".lower()
    return "-".join(re.findall(r"[a-z0-9_]+", words)) + ".json"


def _cpu_information() -> dict[str, str]:
    """The first processor in /proc/cpuinfo; nothing where there is no such file."""
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return {}
    lines = file.read_text().split("\n\n", maxsplit=1)[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _processor_name(described: dict[str, str]) -> str:
    """The model's name; /proc/cpuinfo of an ARM processor has none, but lscpu knows many."""
    if "model name" in described:
        return described["model name"]
    try:
        answer = subprocess.run(
            ["lscpu"], env={"LC_ALL": "C"}, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or "unknown"
    found = re.search(r"^Model name:\s*(.+)$", answer.stdout, re.MULTILINE)
    return found[1].strip() if found else "unknown"


def _setting(name: str, settings: str) -> str:
    found = re.search(rf"\b{name}=(\w+)", settings)
    return found[1] if found else "unknown"

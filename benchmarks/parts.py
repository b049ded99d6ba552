"""The parts of the benchmark by name. A part is a module with `measure` and `table`."""

from typing import Any, Protocol

import torch

from benchmarks import memory, product

# What a part measured, as it stands in the JSON file.
Result = dict[str, Any]


class Part(Protocol):
    """What the harness asks of a part."""

    def measure(self, device: torch.device, repeats: int) -> Result:
        """Everything the part knows, ready for JSON."""

    def table(self, result: Result) -> str:
        """The result as a Markdown table with a sentence on how it was measured."""


PARTS: dict[str, Part] = {"product": product, "memory": memory}


def result_file(part: str, device: torch.device) -> str:
    """The name of a part's JSON file, which is also the name of its table."""
    return f"{part}.json" if device.type == "cpu" else f"{part}-{device.type}.json"

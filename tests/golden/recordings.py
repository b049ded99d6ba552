"""Recorded files: one for each kind of processor, with the environment and the traces by case."""

import dataclasses
import json
from pathlib import Path

from tests.golden.environment import Environment, same_bits, this_environment
from tests.golden.traces import Trace

FOLDER = Path(__file__).parent / "recorded"


@dataclasses.dataclass(frozen=True)
class Recording:
    """The traces of one environment, by the name of their case."""

    environment: Environment
    traces: dict[str, Trace]

    def write(self, path: Path) -> None:
        """As JSON with a line for each step, so that a difference shows which step it is in."""
        cases = [
            f"{json.dumps(name)}: [\n" + ",\n".join(map(_lines, trace)) + "\n]"
            for name, trace in self.traces.items()
        ]
        environment = json.dumps(self.environment, indent=1)
        traces = ",\n".join(cases)
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'{{"environment": {environment},\n"traces": {{\n{traces}\n}}}}\n')

    @classmethod
    def read(cls, path: Path) -> "Recording":
        """What `write` wrote."""
        return cls(**json.loads(path.read_text()))


def _lines(steps: list[dict[str, object]]) -> str:
    return "[\n" + ",\n".join(json.dumps(step) for step in steps) + "\n]"


def all_recordings() -> list[Recording]:
    """Every recorded file."""
    return [Recording.read(path) for path in sorted(FOLDER.glob("*.json"))]


def recording_of_this_environment() -> Recording | None:
    """The recorded file whose bits must be found here; None where there is none."""
    here = this_environment()
    fitting = (found for found in all_recordings() if same_bits(found.environment, here))
    return next(fitting, None)

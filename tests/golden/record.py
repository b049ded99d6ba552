"""Record the traces of all cases for this processor: `python -m tests.golden.record [--force]`.

Every case is run twice, and nothing is written if two runs of a case differ.
"""

import argparse
import sys

from tests.golden.environment import file_name, this_environment
from tests.golden.recordings import FOLDER, Recording
from tests.golden.traces import CASES, trace_of


def main() -> None:
    """Write the file of this processor."""
    parser = argparse.ArgumentParser(description="Record golden traces for this processor.")
    parser.add_argument("--force", action="store_true", help="overwrite the recorded file")
    force = parser.parse_args().force
    environment = this_environment()
    path = FOLDER / file_name(environment)
    if path.exists() and not force:
        sys.exit(
            f"{path} exists. Traces are recorded anew only where numbers are meant to change: "
            "say --force."
        )
    first = {case.name: trace_of(case) for case in CASES}
    differing = [case.name for case in CASES if trace_of(case) != first[case.name]]
    if differing:
        sys.exit(f"two runs differ, so nothing is written: {', '.join(differing)}")
    Recording(environment, first).write(path)
    print(f"{len(first)} traces are in {path}")


if __name__ == "__main__":
    main()

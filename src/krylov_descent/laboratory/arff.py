"""ARFF, the text format of Weka: numbers in columns, and a class in the last one.

A header with the lines `@attribute ZergPool numeric` and `@attribute midBuild {HydraRush,Lurker}`
goes with rows like `3015,Lurker`, which begin after the line `@data`.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from krylov_descent.laboratory.download import DataError

ATTRIBUTE = re.compile(r"@attribute\s+(\S+)\s+(numeric|real|integer|\{[^{}]+\})", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Arff:
    """What such a file holds.

    Attributes:
        columns: the names of the numeric columns.
        classes: the names of the classes, in the order of the header.
        values: float64 [rows, columns].
        labels: the class of each row, an index into `classes`, int64 [rows].
    """

    columns: tuple[str, ...]
    classes: tuple[str, ...]
    values: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]


def read_arff(path: Path) -> Arff:
    """Read a file of numeric columns and a class at the end.

    Raises:
        DataError: not readable, or not such a file; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error
    numbered = [
        (number, line.strip())
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("%")
    ]
    start = next((i for i, (_, line) in enumerate(numbered) if line.lower() == "@data"), None)
    if start is None:
        raise DataError(f"{path} is no ARFF file: there is no line @data.")
    columns, classes = _header(path, numbered[:start])
    values, labels = [], []
    for number, line in numbered[start + 1 :]:
        numbers, label = _row(line, columns, classes, f"{path}, line {number}")
        values.append(numbers)
        labels.append(label)
    if not values:
        raise DataError(f"{path} has no rows: there is nothing after @data.")
    return Arff(columns, classes, np.array(values, np.float64), np.array(labels, np.int64))


def _header(path: Path, lines: list[tuple[int, str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the numeric columns, and those of the classes."""
    attributes: list[tuple[str, str]] = []
    for number, line in lines:
        if line.lower().startswith("@relation"):
            continue
        found = ATTRIBUTE.fullmatch(line)
        if found is None:
            raise DataError(
                f"{path}, line {number}: expected an @attribute that is numeric or a list of "
                f"classes in braces, found {line!r}."
            )
        attributes.append((found[1], found[2]))
    kinds = [kind.startswith("{") for _, kind in attributes]
    if len(kinds) < 2 or not kinds[-1] or any(kinds[:-1]):
        raise DataError(f"{path} must have numeric attributes and then one with the classes.")
    classes = tuple(name.strip() for name in attributes[-1][1][1:-1].split(","))
    return tuple(name for name, _ in attributes[:-1]), classes


def _row(
    line: str, columns: tuple[str, ...], classes: tuple[str, ...], where: str
) -> tuple[list[float], int]:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(columns) + 1:
        raise DataError(f"{where}: expected {len(columns) + 1} fields, found {len(fields)}.")
    numbers = []
    for name, field in zip(columns, fields, strict=False):  # the class is left over
        try:
            number = float(field)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise DataError(f"{where}: {name} must be a number, found {field!r}.")
        numbers.append(number)
    if fields[-1] not in classes:
        raise DataError(
            f"{where}: unknown class {fields[-1]!r}, the header has {', '.join(classes)}."
        )
    return numbers, classes.index(fields[-1])

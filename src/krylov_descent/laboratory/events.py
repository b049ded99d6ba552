"""TensorBoard events of a run, beside its metrics."""

from pathlib import Path
from typing import Any

from krylov_descent.laboratory.record import Row
from krylov_descent.laboratory.training import OnRow
from krylov_descent.optimizers.result import StepResult

CURVES = ("train", "validation", "test", "loss", "seconds", "passes", "rank", "evaluations")


def with_events(folder: Path, on_row: OnRow | None) -> OnRow:
    """A callback that writes each row as TensorBoard events and then calls the given one.

    Raises:
        ValueError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as problem:
        raise ValueError(
            '--tensorboard needs the package tensorboard: pip install "krylov-descent[lab]"'
        ) from problem
    writer: Any = None

    def record(row: Row, result: StepResult | None) -> None:
        nonlocal writer
        if writer is None:
            # A resumed run does again what came after its checkpoint: those events go.
            writer = SummaryWriter(log_dir=str(folder / "events"), purge_step=row["iteration"])
        for name in CURVES:
            if row.get(name) is not None:
                writer.add_scalar(name, row[name], row["iteration"])
        writer.flush()
        if on_row is not None:
            on_row(row, result)

    return record

"""Ignite with KSD, for which its engine needs nothing of ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from krylov_descent import KSD, StepResult
from tests.howto import run
from tests.optimizers.nets import classes, net, parameters_of

# Ignite and torch script some functions when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit..* is deprecated:DeprecationWarning")


def engine(seed: int = 0) -> tuple[nn.Module, KSD, Any]:
    from ignite.engine import Engine

    model = net(seed=seed)
    optimizer = KSD(model, nn.CrossEntropyLoss(), dimension=3)
    return model, optimizer, Engine(lambda engine, batch: optimizer.step(batch))


def expected(steps: int) -> tuple[torch.Tensor, StepResult]:
    """The parameters after steps without Ignite, and the result of the last of them."""
    model = net()
    optimizer = KSD(model, nn.CrossEntropyLoss(), dimension=3)
    for _ in range(steps):
        result = optimizer.step(classes())
    return parameters_of(model), result


def test_the_output_of_the_engine_is_the_result_of_the_step() -> None:
    from ignite.engine import Events

    model, optimizer, trainer = engine()
    seen: list[float] = []
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED, lambda: seen.append(trainer.state.output.loss)
    )
    state = trainer.run([classes()], max_epochs=3)
    parameters, result = expected(3)
    assert torch.equal(parameters_of(model), parameters)
    assert state.output.loss == result.loss
    assert len(seen) == optimizer.steps == 3


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    from ignite.engine import Events
    from ignite.handlers import Checkpoint

    def kept(seed: int) -> dict[str, Any]:
        model, optimizer, trainer = engine(seed)
        return {"model": model, "optimizer": optimizer, "trainer": trainer}

    first, second = kept(0), kept(5)
    handler = Checkpoint(first, tmp_path)
    first["trainer"].add_event_handler(Events.EPOCH_COMPLETED, handler)
    first["trainer"].run([classes()], max_epochs=2)
    assert handler.last_checkpoint is not None
    saved = torch.load(tmp_path / handler.last_checkpoint, weights_only=True)
    Checkpoint.load_objects(second, saved)
    second["trainer"].run([classes()], max_epochs=3)
    assert second["optimizer"].steps == 3
    assert torch.equal(parameters_of(second["model"]), expected(3)[0])


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("ignite")

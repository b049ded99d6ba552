"""Accelerate with KSD, for which its wrapper needs nothing of ours."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from krylov_descent import KSD
from tests.distributed.group import Group
from tests.howto import run
from tests.optimizers.nets import classes, net, parameters_of


@pytest.fixture(autouse=True)
def nothing_of_an_earlier_accelerator() -> Iterator[None]:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def prepared(seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, ...]:
    """An accelerator with a model, an optimiser and a loader."""
    from accelerate import Accelerator, DataLoaderConfiguration

    # Without samples that are repeated to make the last batches of the ranks equal.
    config = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config, **options)
    model = net(dtype, seed)
    optimizer = KSD(model, nn.CrossEntropyLoss(), dimension=3)
    loader = DataLoader(TensorDataset(*classes(dtype=dtype)), batch_size=7)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def expected(steps: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The parameters after steps without Accelerate."""
    model = net(dtype)
    optimizer = KSD(model, nn.CrossEntropyLoss(), dimension=3)
    for _ in range(steps):
        optimizer.step(classes(dtype=dtype))
    return parameters_of(model)


@pytest.mark.parametrize("bound", [False, True])
def test_steps_are_those_without_accelerate(bound: bool) -> None:
    _, model, optimizer, loader = prepared(dtype=torch.float64)
    if bound:
        optimizer.optimizer.bind(loader)
    for _ in range(2):
        optimizer.step() if bound else optimizer.step(loader)
    assert optimizer.optimizer.last_result.samples == len(classes()[0])
    torch.testing.assert_close(
        parameters_of(model), expected(2, torch.float64), rtol=1e-4, atol=1e-5
    )


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    accelerator, model, optimizer, loader = prepared()
    optimizer.step(loader)
    accelerator.save_state(tmp_path)
    optimizer.step(loader)
    again, other, resumed, loader = prepared(seed=5)
    again.load_state(tmp_path)
    resumed.step(loader)
    assert resumed.optimizer.steps == 2
    assert torch.equal(parameters_of(other), parameters_of(model))


def test_bfloat16_is_that_of_the_accelerator() -> None:
    _, model, optimizer, loader = prepared(mixed_precision="bf16")
    for _ in range(2):
        optimizer.step(loader)
    assert optimizer.optimizer.last_result.status.moved
    assert not torch.equal(parameters_of(model), expected(2))


def test_scaled_gradients_are_refused() -> None:
    from accelerate.optimizer import AcceleratedOptimizer

    _, model, optimizer, loader = prepared()
    scaled = AcceleratedOptimizer(optimizer.optimizer, scaler=torch.amp.GradScaler("cpu"))
    inputs, targets = classes()
    scaled.scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
    with pytest.raises(RuntimeError, match="KSD does not work with GradScaler"):
        scaled.step(loader)


def on_this_rank() -> tuple[Tensor, int, int]:
    """Two steps on this rank's part; the parameters, |A|, and how many predictions are gathered."""
    rank = str(torch.distributed.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    accelerator, model, optimizer, loader = prepared(dtype=torch.float64)
    for _ in range(2):
        optimizer.step(loader)
    own = [model(inputs).argmax(1) for inputs, _ in loader]
    gathered = accelerator.gather_for_metrics(own, use_gather_object=True)
    samples = optimizer.optimizer.last_result.samples
    return parameters_of(model), samples, sum(len(part) for part in gathered)


def test_two_processes_make_the_steps_of_one() -> None:
    group = Group(2)
    try:
        answers = group.run(on_this_rank)
    finally:
        group.close()
    for parameters, samples, predictions in answers:
        assert samples == predictions == len(classes()[0])
        assert torch.equal(parameters, answers[0][0])
        torch.testing.assert_close(parameters, expected(2, torch.float64), rtol=1e-4, atol=1e-5)


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("accelerate")

"""Lightning with KSD: manual and automatic optimisation, logs and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from krylov_descent import KSD, Term
from tests.howto import run
from tests.integrations.torchvision_operators import declare_if_missing
from tests.optimizers.nets import classes, net, parameters_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # of torch's
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def importable() -> None:
    declare_if_missing()


def manual() -> Any:
    """A LightningModule that steps by itself on the batch."""
    import lightning

    class Manual(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.automatic_optimization = False

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.net(inputs)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.log_dict(optimizer.step(data=batch).numbers())

        def configure_optimizers(self) -> Any:
            return KSD(self, nn.CrossEntropyLoss(), dimension=3)

    return Manual()


def automatic(base: Any = None) -> Any:
    """A LightningModule of the usual kind, whose optimiser has bound data."""
    from krylov_descent.integrations.lightning import KSDModule

    class Automatic(base or KSDModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.net(inputs)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return KSD(self, nn.CrossEntropyLoss(), dimension=3).bind(classes())

    return Automatic()


def trainer(epochs: int = STEPS, **options: Any) -> Any:
    import lightning

    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    return lightning.Trainer(max_epochs=epochs, accelerator="cpu", **quiet, **options)


def fit(model: Any, epochs: int = STEPS, ckpt_path: Any = None, **options: Any) -> Any:
    found = trainer(epochs, **options)
    found.fit(model, DataLoader(TensorDataset(*classes()), batch_size=60), ckpt_path=ckpt_path)
    return found


def expected(steps: int = STEPS) -> tuple[Any, Any]:
    """The net after steps without Lightning, and the result of the last of them."""
    model = net()
    optimizer = KSD(model, nn.CrossEntropyLoss(), dimension=3)
    for _ in range(steps):
        result = optimizer.step(classes())
    return model, result


@pytest.mark.parametrize(("build", "prefix"), [(manual, ""), (automatic, "ksd/")])
def test_steps_are_those_without_lightning_and_are_logged(build: Any, prefix: str) -> None:
    model = build()
    found = fit(model)
    alike, result = expected()
    assert torch.equal(parameters_of(model), parameters_of(alike))
    assert found.global_step == STEPS
    numbers = result.numbers()
    for name in ("loss", "loss_after", "rank", "step_norm"):
        assert float(found.callback_metrics[prefix + name]) == pytest.approx(numbers[name])
    assert all(p.grad is None for p in model.parameters())
    if prefix:  # training_step is called before each step
        logged = float(found.callback_metrics["train_loss"])
        assert logged == pytest.approx(result.loss, rel=1e-5)


def test_terms_need_no_binding() -> None:
    class Physics(automatic().__class__):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            inputs, targets = classes()
            target = nn.functional.one_hot(targets).float()
            term = Term(lambda model, x, y: model(x) - y, (inputs, target))
            return KSD(self.net, {"data": term}, dimension=3)

    metrics = fit(Physics()).callback_metrics
    assert metrics["ksd/loss_after"] < metrics["ksd/loss_before"]
    assert metrics["ksd/terms/data"] == metrics["ksd/loss"]


@pytest.mark.parametrize("build", [manual, automatic])
def test_a_resumed_run_goes_on_exactly(build: Any, tmp_path: Path) -> None:
    fit(build(), STEPS - 1).save_checkpoint(tmp_path / "checkpoint")
    model = build()
    assert fit(model, ckpt_path=tmp_path / "checkpoint").global_step == STEPS
    assert torch.equal(parameters_of(model), parameters_of(expected()[0]))


def test_gradients_of_an_ordinary_module_are_refused() -> None:
    import lightning

    with pytest.raises(TypeError, match=r"KSD makes its own gradients, of the bound data"):
        fit(automatic(lightning.LightningModule))


def test_clipping_and_scaled_gradients_are_refused() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    with pytest.raises(ValueError, match=r"`gradient_clip_val` is 0\.5, and a step has no grad"):
        fit(automatic(), gradient_clip_val=0.5)
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(RuntimeError, match="KSD does not work with GradScaler"):
        fit(automatic(), plugins=[scaled])


@pytest.mark.parametrize("build", [manual, automatic])
def test_bfloat16_is_that_of_the_trainer(build: Any) -> None:
    model = build()
    found = fit(model, precision="bf16-mixed")
    before = nn.functional.cross_entropy(net()(classes()[0]), classes()[1])
    after = nn.functional.cross_entropy(model(classes()[0]), classes()[1])
    assert after < before
    assert not torch.equal(parameters_of(model), parameters_of(expected()[0]))
    assert found.global_step == STEPS


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("lightning")

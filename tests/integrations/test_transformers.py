"""The Trainer of Hugging Face with KSD."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from krylov_descent import KSD
from tests.howto import run
from tests.integrations.torchvision_operators import declare_if_missing
from tests.optimizers.nets import parameters_of

# The Trainer asks for pinned memory where there is no GPU, too.
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no acc")
STEPS = 3
COUNT = 16


@pytest.fixture(scope="module", autouse=True)
def importable() -> None:
    declare_if_missing()


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=12,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=6,
        num_labels=2,
    )
    return BertForSequenceClassification(config)  # with dropout, as it comes


def sentences() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    words = torch.randint(0, 12, (COUNT, 6))
    labels = (words[:, 0] > words[:, 1]).long()
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def trainer(path: Path, model: Any = None, **options: Any) -> Any:
    from transformers import TrainingArguments

    from krylov_descent.integrations.transformers import KSDTrainer

    usual = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return KSDTrainer(
        model or bert(),
        TrainingArguments(str(path), **usual | options),
        train_dataset=sentences(),
        loss=nn.CrossEntropyLoss(),
        ksd={"dimension": 3},
    )


@cache
def expected() -> tuple[Any, Any]:
    """The model after steps without the Trainer, and the result of the last of them."""
    model = bert().eval()
    optimizer = KSD(
        model,
        nn.CrossEntropyLoss(),
        dimension=3,
        seed=42,
        forward=lambda model, words: model(input_ids=words).logits,
    )
    pairs: Any = [(row["input_ids"], row["labels"]) for row in sentences()]
    for _ in range(STEPS):
        result = optimizer.step(DataLoader(pairs, batch_size=8))
    return model, result


def test_steps_are_those_without_the_trainer_and_are_logged(tmp_path: Path) -> None:
    found = trainer(tmp_path)
    found.train()
    model, result = expected()
    assert found.optimizer.optimizer.steps == STEPS
    torch.testing.assert_close(
        parameters_of(found.model), parameters_of(model), rtol=1e-2, atol=1e-3
    )
    *steps, _ = found.state.log_history
    assert len(steps) == STEPS
    last = steps[-1]
    assert last["ksd_loss_after"] == pytest.approx(result.loss_after, rel=0.05)
    assert last["ksd_rank"] == result.rank
    assert last["grad_norm"] == last["ksd_gradient_norm"] > 0
    assert last["learning_rate"] == 1.0
    assert last["loss"] > 0  # of the batch before the step


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": STEPS - 1}
    trainer(tmp_path, max_steps=STEPS - 1, **options).train()
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == resumed.optimizer.optimizer.steps == STEPS
    # Without the state of the optimiser the last step would have a smaller subspace.
    model, result = expected()
    assert resumed.state.log_history[-2]["ksd_rank"] == result.rank > 3
    assert torch.equal(parameters_of(resumed.model), parameters_of(model))


def test_evaluation_and_prediction_are_the_trainers(tmp_path: Path) -> None:
    found = trainer(tmp_path, max_steps=2, per_device_eval_batch_size=COUNT)
    before = found.evaluate(sentences())["eval_loss"]
    found.train()
    assert found.evaluate(sentences())["eval_loss"] < before
    assert found.predict(sentences()).predictions.shape == (COUNT, 2)


def test_bfloat16_and_weight_decay_are_those_of_the_arguments(tmp_path: Path) -> None:
    model, dtypes = bert(), set[torch.dtype]()

    def look(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # in a step
            dtypes.add(output.dtype)

    model.classifier.register_forward_hook(look)
    found = trainer(tmp_path, model, max_steps=1, bf16=True, weight_decay=0.1)
    found.train()
    assert found.optimizer.optimizer.last_result.status.moved
    assert found.optimizer.param_groups[0]["weight_decay"] == 0.1
    assert dtypes == {torch.bfloat16}


def test_scaled_and_accumulated_gradients_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`gradient_accumulation_steps` must be 1"):
        trainer(tmp_path, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="`fp16` scales gradients"):
        trainer(tmp_path, fp16=True)


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("transformers")

"""Estimators of scikit-learn that KSD trains by skorch."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from krylov_descent import KSD, LBFGS, FirstOrder
from tests.howto import run
from tests.optimizers.nets import classes, net, parameters_of


class Net(nn.Module):
    """The usual small net, whose outputs are logits or probabilities."""

    def __init__(self, hidden: int = 6, outputs: int = 3, probabilities: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
        if hidden == 6 and outputs == 3:
            self.layers = net()
        self.probabilities = probabilities

    def forward(self, inputs: torch.Tensor) -> Any:
        outputs = self.layers(inputs)
        return outputs.softmax(1) if self.probabilities else outputs


def arrays() -> tuple[Any, Any]:
    inputs, targets = classes()
    return inputs.numpy(), targets.numpy()


def classifier(**options: Any) -> Any:
    from krylov_descent.integrations.skorch import NeuralNetClassifier

    usual = {"max_epochs": 3, "verbose": 0, "train_split": None, "optimizer__dimension": 3}
    return NeuralNetClassifier(Net, **usual | options)


def test_an_epoch_is_a_step_on_all_of_the_data() -> None:
    found = classifier().fit(*arrays())
    alike = Net()
    optimizer = KSD(alike, nn.CrossEntropyLoss(), dimension=3)
    results = [optimizer.step(classes()) for _ in range(3)]
    assert torch.equal(parameters_of(found.module_), parameters_of(alike))
    losses = [result.loss for result in results]
    np.testing.assert_allclose(found.history[:, "train_loss"], losses, rtol=1e-5)
    steps = found.history[:, "batches", 0, "step"]
    assert [step["loss"] for step in steps] == losses
    chances = found.predict_proba(arrays()[0])
    np.testing.assert_allclose(chances.sum(1), 1, rtol=1e-5)  # of logits


def test_probabilities_and_the_criterion_of_skorch_are_understood() -> None:
    found = classifier(criterion=nn.NLLLoss, module__probabilities=True).fit(*arrays())
    logits = classifier(max_epochs=1).fit(*arrays())
    losses = found.history[:, "train_loss"]
    assert losses[0] == pytest.approx(logits.history[0]["train_loss"], rel=1e-5)
    assert losses[0] > losses[1] > losses[2]


def test_grid_search_over_a_pipeline() -> None:
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    name = "neuralnetclassifier"
    grid = {f"{name}__optimizer__dimension": [2, 3], f"{name}__module__hidden": [3, 6]}
    pipeline = make_pipeline(StandardScaler(), classifier())
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(*arrays())
    best = search.best_estimator_[-1]
    assert best.optimizer_.dimension == search.best_params_[f"{name}__optimizer__dimension"]
    assert search.score(*arrays()) > 0.6


def test_a_fitted_net_can_be_pickled_and_goes_on_exactly() -> None:
    found = classifier().fit(*arrays())
    twin = pickle.loads(pickle.dumps(found))
    for one in (found, twin):
        one.partial_fit(*arrays())
    assert twin.optimizer_.steps == found.optimizer_.steps == 6
    assert torch.equal(parameters_of(twin.module_), parameters_of(found.module_))


def test_parameters_saved_in_files_go_on_exactly(tmp_path: Path) -> None:
    found = classifier().fit(*arrays())
    files = {"f_params": tmp_path / "module", "f_optimizer": tmp_path / "optimizer"}
    found.save_params(**files)
    resumed = classifier().initialize()
    resumed.load_params(**files)
    for one in (found, resumed):
        one.partial_fit(*arrays(), epochs=1)
    assert torch.equal(parameters_of(resumed.module_), parameters_of(found.module_))


def test_a_regressor_and_groups_of_parameters() -> None:
    from krylov_descent.integrations.skorch import NeuralNetRegressor

    inputs, _ = arrays()
    targets = np.sin(inputs[:, :1])
    groups = [("layers.0*", {"weight_decay": 0.01})]
    found = NeuralNetRegressor(
        Net, module__outputs=1, verbose=0, max_epochs=10, optimizer__param_groups=groups
    )
    assert found.fit(inputs, targets).score(inputs, targets) > 0.9
    assert [group["weight_decay"] for group in found.optimizer_.param_groups] == [0.01, 0.0]
    assert found.history[-1]["valid_loss"] > 0


@pytest.mark.parametrize(("optimizer", "options"), [(LBFGS, {}), (FirstOrder, {"lr": 0.01})])
def test_other_optimizers_of_the_library(optimizer: Any, options: dict[str, Any]) -> None:
    from krylov_descent.integrations.skorch import NeuralNetClassifier

    found = NeuralNetClassifier(Net, optimizer=optimizer, max_epochs=3, verbose=0, **options)
    losses = found.fit(*arrays()).history[:, "train_loss"]
    assert losses[-1] < losses[0]


class Noisy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Dropout(0.5))


def test_dropout_is_told_of() -> None:
    with pytest.raises(ValueError, match="Dropout"):
        classifier().set_params(module=Noisy).fit(*arrays())


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("skorch")

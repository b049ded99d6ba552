"""The estimators for scikit-learn, beside scikit-learn's own."""

import importlib
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris, load_wine, make_friedman1
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, scale
from sklearn.utils.estimator_checks import check_estimator

from krylov_descent.integrations.perceptron import make_perceptron
from krylov_descent.integrations.sklearn import KSDClassifier, KSDRegressor

SMALL: dict[str, Any] = {"hidden_layer_sizes": (4,), "random_state": 0}


def diabetes(count: int = 150) -> tuple[Any, Any]:
    X, y = load_diabetes(return_X_y=True)
    return scale(X[:count]), y[:count]


def iris(classes: int = 3) -> tuple[Any, Any]:
    X, y = load_iris(return_X_y=True)
    return scale(X[: 50 * classes]), y[: 50 * classes]


@pytest.mark.filterwarnings("ignore")  # two steps are not enough
@pytest.mark.parametrize("kind", [KSDRegressor, KSDClassifier])
def test_it_passes_the_checks_of_scikit_learn(kind: Any) -> None:
    # It passes with hidden layers as well, which take many times as long.
    check_estimator(kind((), max_iter=2), on_skip=None)


@pytest.mark.parametrize("activation", ["tanh", "logistic"])
@pytest.mark.filterwarnings("ignore:Stochastic")
def test_it_starts_with_the_weights_of_scikit_learns(activation: str) -> None:
    X, y = diabetes(20)
    options = {"hidden_layer_sizes": (5, 3), "activation": activation, "random_state": 7}
    still = MLPRegressor(solver="sgd", learning_rate_init=1e-300, max_iter=1, **options).fit(X, y)
    random = np.random.RandomState(7)
    net = make_perceptron([10, 5, 3, 1], activation, random, torch.float64)
    layers: Any = net[::2]
    for layer, weight, bias in zip(layers, still.coefs_, still.intercepts_, strict=True):
        assert layer.weight.detach().numpy() == pytest.approx(weight.T, rel=1e-12)
        assert layer.bias.detach().numpy() == pytest.approx(bias, rel=1e-12)


def test_without_hidden_layers_it_is_ridge_regression() -> None:
    X, y = diabetes()
    found = KSDRegressor((), alpha=3.0, tol=0).fit(X, y)
    expected = Ridge(alpha=3.0).fit(X, y)
    assert found.predict(X) == pytest.approx(expected.predict(X), rel=1e-6)


@pytest.mark.parametrize("classes", [2, 3])
def test_without_hidden_layers_it_is_logistic_regression(classes: int) -> None:
    X, y = iris(classes)
    # Of two classes scikit-learn's has one output, as this one has.
    found = KSDClassifier((), alpha=0.5, tol=0).fit(X, y)
    expected = LogisticRegression(C=2.0, tol=1e-9, max_iter=1000).fit(X, y)
    assert found.predict_proba(X) == pytest.approx(expected.predict_proba(X), abs=1e-5)


def norm(model: Any) -> float:
    """‖W‖²."""
    return sum(float(layer.weight.detach().square().sum()) for layer in model.net_[::2])


def test_the_loss_is_that_of_scikit_learns_regressor() -> None:
    X, y = diabetes()
    y = np.stack([y, y**2 / 100], 1)
    model = KSDRegressor(**SMALL, alpha=10.0, tol=0.1).fit(X, y)
    errors = ((model.predict(X) - y) ** 2).mean()
    assert model.loss_ == pytest.approx(errors / 2 + 10 / 2 / len(X) * norm(model), rel=1e-9)
    assert model.loss_curve_[-1] == model.loss_
    assert len(model.loss_curve_) == model.n_iter_
    assert model.predict(X).shape == y.shape
    assert model.score(X, y) > 0.5


@pytest.mark.parametrize("classes", [2, 3])
def test_the_loss_is_that_of_scikit_learns_classifier(classes: int) -> None:
    X, y = iris(classes)
    model = KSDClassifier(**SMALL, alpha=1.0).fit(X, y)
    entropy = log_loss(y, model.predict_proba(X))
    assert model.loss_ == pytest.approx(entropy + 1 / 2 / len(X) * norm(model), rel=1e-9)


def test_it_learns_more_by_heart_than_l_bfgs() -> None:
    X, y = diabetes(60)
    options: dict[str, Any] = {"hidden_layer_sizes": (50,), "activation": "tanh", "random_state": 0}
    mine = KSDRegressor(**options, tol=0.1).fit(X, y)
    with pytest.warns(ConvergenceWarning, match="lbfgs failed to converge after 200 iter"):
        theirs = MLPRegressor(**options, solver="lbfgs").fit(X, y)
    assert mine.loss_ < theirs.loss_


def test_it_trains_on_data_as_they_come() -> None:
    X, y = load_wine(return_X_y=True)  # columns from 0.1 to 1700
    names = np.array(["barolo", "grignolino", "barbera"])[y]
    # The softmax of the last seed begins saturated.
    for seed in (0, 1):
        model = KSDClassifier((20,), random_state=seed, tol=0.3).fit(X, names)
        assert list(model.classes_) == ["barbera", "barolo", "grignolino"]
        assert model.score(X, names) > 0.95


def test_it_works_in_pipelines_and_searches_and_is_pickled() -> None:
    X, y = iris()
    pipeline = make_pipeline(StandardScaler(), KSDClassifier(**SMALL, tol=0.3, n_iter_no_change=2))
    search = GridSearchCV(pipeline, {"ksdclassifier__alpha": [0.1, 10.0]}, cv=2).fit(X, y)
    assert search.best_score_ > 0.9
    model = search.best_estimator_[-1]
    again = pickle.loads(pickle.dumps(model))
    probabilities = again.predict_proba(scale(X))
    assert (probabilities == model.predict_proba(scale(X))).all()
    assert probabilities.sum(1) == pytest.approx(np.ones(len(X)))
    assert (model.classes_[probabilities.argmax(1)] == model.predict(scale(X))).all()
    assert (clone(model).fit(scale(X), y).predict_proba(scale(X)) == probabilities).all()


def test_it_computes_in_the_precision_of_the_data() -> None:
    X, y = diabetes()
    model = KSDRegressor(**SMALL, tol=0.1).fit(X.astype(np.float32), y)
    assert model.net_[0].weight.dtype == torch.float32
    assert model.predict(X).dtype == np.float32
    assert model.score(X, y) > 0.5


def test_early_stopping_keeps_the_best_net(capsys: pytest.CaptureFixture[str]) -> None:
    X, y = diabetes()
    options: dict[str, Any] = {"random_state": 0, "validation_fraction": 0.3, "n_iter_no_change": 3}
    model = KSDRegressor((10,), early_stopping=True, verbose=True, **options).fit(X, y)
    scores = model.validation_scores_
    assert scores is not None
    best = int(np.argmax(scores))
    assert len(scores) == model.n_iter_ == best + 1 + 3
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"score {scores[-1]:.4g}")
    # A third of the samples is held out; a net that goes on learns the others by heart.
    assert model.score(X, y) < KSDRegressor((10,), **options, tol=0.1).fit(X, y).score(X, y)
    rows = np.random.RandomState(0)
    rows.uniform(size=10 * 10 + 10 + 10 + 1)  # the weights come first
    _, X_out, _, y_out = train_test_split(X, y, test_size=0.3, random_state=rows)
    assert model.score(X_out, y_out) == pytest.approx(max(scores))


@pytest.mark.parametrize(("samples", "counted"), [(300, True), (4000, False)])
def test_steps_with_a_part_of_the_samples_do_not_end_the_training(
    samples: int, counted: bool
) -> None:
    """With tol=1 no step is better, so the training ends after two steps that count."""
    X, y = make_friedman1(samples, noise=1.0, random_state=0)
    fitted = KSDRegressor((10,), tol=1.0, n_iter_no_change=2, random_state=0).fit(scale(X), y)
    assert (fitted.n_iter_ == 2) == counted


def test_too_few_steps_are_told() -> None:
    X, y = diabetes()
    with pytest.warns(ConvergenceWarning, match="not ended after 3 steps") as told:
        model = KSDRegressor(**SMALL, max_iter=3, tol=0).fit(X, y)
    assert model.n_iter_ == 3
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"hidden_layer_sizes": (10, 0)}, "`hidden_layer_sizes` must be at least 1"),
        ({"activation": "swish"}, "`activation` must be one of 'identity'"),
        ({"alpha": -1.0}, "`alpha`"),
        ({"tol": "small"}, "`tol`"),
        ({"max_iter": 0}, "`max_iter`"),
        ({"n_iter_no_change": 0}, "`n_iter_no_change`"),
        ({"early_stopping": True, "validation_fraction": 1.0}, "`validation_fraction` must be"),
    ],
)
def test_a_wrong_parameter_is_named(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        KSDRegressor(**given).fit(*diabetes(20))


def test_unusable_data_are_refused() -> None:
    X, y = diabetes(20)
    with pytest.raises(ValueError, match="`y` has one class"):
        KSDClassifier().fit(X, np.zeros(20))
    with pytest.raises(ValueError, match="scale `X` and `y`"):
        KSDRegressor().fit(X, 1e300 * y)


def test_without_scikit_learn_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "krylov_descent.integrations.sklearn"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(ImportError, match=r'pip install "krylov-descent\[lab\]"'):
        importlib.import_module(name)

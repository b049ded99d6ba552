"""The estimators for scikit-learn beside scikit-learn's own, on data that come with it."""

import math
import statistics
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.environment import UnavailableError, sentence, version_of
from benchmarks.parts import NOT_MEASURED, Part, Section, Sections, Setting, markdown
from benchmarks.timing import timed

CPU = torch.device("cpu")
SEEDS = (0, 1, 2)
# What the estimators are given; all else is their default.
METHODS: dict[str, dict[str, Any]] = {
    "lbfgs": {"solver": "lbfgs"},
    "lbfgs-end": {"solver": "lbfgs", "max_iter": 20_000, "max_fun": 1_000_000, "tol": 1e-6},
    "ksd": {},
}
# KSD's seconds to the loss of PEER are measured. LONG takes too long on large tables.
PEER, LONG = "lbfgs", "lbfgs-end"
TITLES = {"ksd": "KSD", "lbfgs": "L-BFGS", "lbfgs-end": "L-BFGS, 20,000 iterations"}
DATA = {
    "diabetes": "diabetes",
    "linnerud": "Linnerud, 3 outputs",
    "friedman": "Friedman 1",
    "iris": "iris",
    "wine": "wine",
    "breast-cancer": "breast cancer",
    "digits": "digits",
    "friedman-large": "Friedman 1",
    "classes-large": "ten classes, 50 inputs",
}
# Samples of the large tables.
LARGE = 20_000


def names(device: torch.device) -> list[str]:
    """The data."""
    del device
    return list(DATA)


def measure(section: str, setting: Setting) -> Section:
    """Each method with each seed, of the split and of the starting weights, on a CPU."""
    del setting
    if version_of("scikit-learn") is None:
        raise UnavailableError("scikit-learn is not installed")
    from sklearn.exceptions import ConvergenceWarning

    X, y = _load(section)
    is_classes = bool(np.issubdtype(y.dtype, np.integer))
    runs: dict[str, list[dict[str, float | None]]] = {name: [] for name in _methods(section)}
    for seed in SEEDS:
        train, test = _split(X, y, seed, stratified=is_classes)

        def fit(name: str, given: dict[str, Any], seed: int = seed, train: Any = train) -> Any:
            model = _estimator(name, is_classes, random_state=seed, **given)
            return model, round(timed(partial(model.fit, *train), CPU)[0], 4)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            for name in _methods(section):
                given = METHODS[name]
                # What libraries do at their first call is nobody's time.
                fit(name, {**given, "max_iter": 1})
                model, seconds = fit(name, given)
                found: dict[str, float | None] = {
                    "loss": float(model.loss_),
                    "score": float(model.score(*test)),
                    "seconds": seconds,
                    "steps": int(model.n_iter_),
                }
                if name == "ksd":
                    aim = runs[PEER][-1]["loss"]
                    steps = next((k for k, x in enumerate(model.loss_curve_, 1) if x <= aim), None)
                    found["to_peer"] = steps and fit(name, {**given, "max_iter": steps})[1]
                runs[name].append(found)
    return {"samples": len(X), "features": X.shape[1], "classes": is_classes, "runs": runs}


def _load(section: str) -> tuple[Any, Any]:
    from sklearn import datasets

    found: tuple[Any, Any]
    if section.startswith("friedman"):
        size = LARGE if section == "friedman-large" else 1000
        found = datasets.make_friedman1(size, noise=1.0, random_state=0)
    elif section == "classes-large":
        found = datasets.make_classification(
            LARGE, 50, n_informative=20, n_classes=10, random_state=0
        )
    else:
        found = getattr(datasets, f"load_{section.replace('-', '_')}")(return_X_y=True)
    return found


def _methods(section: str) -> list[str]:
    return [name for name in METHODS if not (name == LONG and section.endswith("-large"))]


def _split(X: Any, y: Any, seed: int, *, stratified: bool) -> tuple[Any, Any]:
    """Training and test set (X, y), with the columns of X standardised."""
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

    X_train, X_test, y_train, y_test = train_test_split(
        X, y, random_state=seed, stratify=y if stratified else None
    )
    scaler = StandardScaler().fit(X_train)
    return (scaler.transform(X_train), y_train), (scaler.transform(X_test), y_test)


def _estimator(name: str, is_classes: bool, **given: Any) -> Any:
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    from krylov_descent.integrations.sklearn import KSDClassifier, KSDRegressor

    if name == "ksd":
        return (KSDClassifier if is_classes else KSDRegressor)(**given)
    return (MLPClassifier if is_classes else MLPRegressor)(**given)


def table(sections: Sections, device: torch.device) -> str:
    """Training loss, test score and seconds of each method, as medians over the seeds."""
    del device
    if not sections:
        return NOT_MEASURED
    heads = [f"{TITLES[name]}: loss, score, s" for name in METHODS]
    rows = [["data", "samples", *heads, f"KSD to the loss of {TITLES[PEER]}, s"]]
    found = {name: sections[name] for name in DATA if name in sections}
    rows += [[DATA[name], str(found[name]["samples"]), *_cells(found[name])] for name in found]
    environments = [section["environment"] for section in found.values()]
    return (
        f"{markdown(rows)}\n\nThe loss is the regularised one, of both as scikit-learn defines it; "
        "the score is R² or accuracy on a quarter of the samples. A hidden layer of 100 units, "
        f"alpha 1e-4, median of {len(SEEDS)} seeds. {sentence(*environments)}, float64."
    )


def _cells(section: Section) -> list[str]:
    def median(name: str, number: str) -> float:
        found = (run[number] for run in section["runs"][name])
        return float(statistics.median(math.inf if x is None else x for x in found))

    cells = [
        f"{median(m, 'loss'):.2g}, {median(m, 'score'):.3f}, {median(m, 'seconds'):.2f}"
        if m in section["runs"]
        else ""
        for m in METHODS
    ]
    reached = median("ksd", "to_peer")
    return [*cells, f"{reached:.2f}" if math.isfinite(reached) else "–"]


PART = Part(sections=names, measure=measure, tables={"": table}, kept=True)

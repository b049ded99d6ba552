"""Classifiers of scikit-learn: what the networks have to stand beside on few data.

They get what the networks get: the same inputs, the training part to fit and the validation part
to choose settings by. The test part is only reported on.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from krylov_descent.laboratory.problems.problem import Problem, Split
from krylov_descent.laboratory.signatures import Option

Inputs = npt.NDArray[np.float32]
Classes = npt.NDArray[np.int64]
# (inputs [n, d]) -> classes [n]
Predict = Callable[[Inputs], Classes]
# A model under one choice of settings, as those settings and what it predicts.
Candidate = tuple[dict[str, Any], Predict]

INVERSE_PENALTIES = (0.003, 0.01, 0.03, 0.1)
LEAVES = 15
TREES = range(5, 45, 5)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The settings that were chosen, and the errors with them."""

    settings: dict[str, Any]
    train: float
    validation: float
    test: float


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """A method that is fitted in one go.

    Attributes:
        name: what the command line calls it.
        title: what tables call it.
        summary: one sentence.
        candidates: (inputs, classes, seed) to fitted models. Of those that are equally good on
            the validation part the first is taken, so the simplest comes first.
        options: nothing can be set.
    """

    name: str
    title: str
    summary: str
    candidates: Callable[[Inputs, Classes, int], Iterable[Candidate]]
    options: tuple[Option, ...] = ()

    def check(self, problem: Problem, options: dict[str, Any]) -> None:
        """Refuse what it cannot be fitted to.

        Raises:
            ValueError: not one class per sample, nothing held out, an option given, or no
                scikit-learn.
        """
        labels = problem.train[1]
        if problem.task != "classification" or labels.numel() != len(labels):
            raise ValueError(
                f"{self.name!r} is for classification with one class per sample, "
                f"{problem.name!r} is not"
            )
        if problem.validation is None:
            raise ValueError(f"{self.name!r} needs a validation part to choose its settings by")
        if options:
            raise ValueError(f"{self.name!r} has no options, found {', '.join(options)}")
        if find_spec("sklearn") is None:
            raise ValueError(f'{self.name!r} needs scikit-learn: pip install "krylov-descent[lab]"')

    def fit(self, problem: Problem, seed: int) -> Fit:
        """The candidate with the lowest error on the validation part."""
        if problem.validation is None:
            raise ValueError("`problem` must have a validation part")
        parts = problem.train, problem.validation, problem.test
        (inputs, classes), validation, test = (_arrays(part) for part in parts)
        held_out, settings, predict = min(
            (
                (_error(predict, *validation), settings, predict)
                for settings, predict in self.candidates(inputs, classes, seed)
            ),
            key=itemgetter(0),
        )
        return Fit(
            settings=settings,
            train=_error(predict, inputs, classes),
            validation=held_out,
            test=_error(predict, *test),
        )


def _logistic_regression(inputs: Inputs, classes: Classes, seed: int) -> Iterator[Candidate]:
    """One model for each strength of the L2 penalty, the strongest first."""
    from sklearn.linear_model import LogisticRegression

    for inverse in INVERSE_PENALTIES:
        model = LogisticRegression(C=inverse, max_iter=5_000, random_state=seed)
        yield {"C": inverse}, model.fit(inputs, classes).predict


def _gradient_boosting(inputs: Inputs, classes: Classes, seed: int) -> Iterator[Candidate]:
    """One model after each of several numbers of trees per class, the fewest first."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    # A column that repeats another offers the same splits, and most of them do.
    _, distinct = np.unique(inputs, axis=1, return_index=True)
    model = HistGradientBoostingClassifier(
        max_iter=max(TREES), max_leaf_nodes=LEAVES, early_stopping=False, random_state=seed
    ).fit(inputs[:, distinct], classes)

    def after(trees: int) -> Predict:
        return lambda rows: next(islice(model.staged_predict(rows[:, distinct]), trees - 1, None))

    for trees in TREES:
        yield {"max_iter": trees}, after(trees)


YARDSTICKS: dict[str, Yardstick] = {
    yardstick.name: yardstick
    for yardstick in (
        Yardstick(
            name="logistic-regression",
            title="Logistic regression",
            summary="Scikit-learn's, the L2 penalty chosen on the validation part.",
            candidates=_logistic_regression,
        ),
        Yardstick(
            name="gradient-boosting",
            title="Gradient boosting",
            summary="Scikit-learn's, the number of trees chosen on the validation part.",
            candidates=_gradient_boosting,
        ),
    )
}


def _arrays(split: Split) -> tuple[Inputs, Classes]:
    inputs, classes = (part.cpu().numpy() for part in split)
    # Bits come as numbers [n, 1], which would be compared with predictions [n] pair by pair.
    return inputs.reshape(len(inputs), -1).astype(np.float32), classes.reshape(-1).astype(np.int64)


def _error(predict: Predict, inputs: Inputs, classes: Classes) -> float:
    return float(np.mean(predict(inputs) != classes))

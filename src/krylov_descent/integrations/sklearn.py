"""Nets as scikit-learn's estimators, trained by KSD.

    from krylov_descent.integrations.sklearn import KSDRegressor

    model = KSDRegressor(hidden_layer_sizes=(50, 50)).fit(X, y)
    print(model.score(X_test, y_test))

The objective is that of scikit-learn's `MLPRegressor` and `MLPClassifier`, and the starting weights
are those that they draw with the same `random_state`.
"""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from krylov_descent.integrations.perceptron import ACTIVATIONS, make_perceptron, train
from krylov_descent.runtime.validation import check_counts, check_flags, check_not_negative

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import accuracy_score, r2_score
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as problem:
    raise ImportError(
        "krylov_descent.integrations.sklearn needs scikit-learn 1.6 or newer: "
        'pip install "krylov-descent[lab]"'
    ) from problem

Array = np.ndarray[Any, Any]
# Inputs [n, d], and targets [n] or [n, k].
Samples = tuple[Array, Array]
DTYPES = (np.float64, np.float32)


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """The parameters and the training, which regressor and classifier share."""

    # (wanted, predicted) -> the higher, the better
    _metric: Callable[..., float]
    # Whether a validation set has the classes in proportion.
    _stratified = False
    # The loss that is minimised, divided by scikit-learn's.
    _factor = 1.0
    _preconditioner: str

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] = (100,),
        activation: str = "relu",
        *,
        alpha: float = 1e-4,
        max_iter: int = 200,
        tol: float = 5e-3,
        n_iter_no_change: int = 3,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.alpha = alpha
        self.max_iter = max_iter
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.verbose = verbose

    def predict(self, X: Any) -> Array:
        """The predictions for inputs [n, d]: [n], or [n, k] after a training with such targets."""
        return self._predictions(self._outputs(self._checked(X)))

    def _loss(self) -> nn.Module:
        """The loss, one of torch's."""
        raise NotImplementedError

    def _targets(self, y: Array, dtype: torch.dtype) -> Tensor:
        """What the loss compares the outputs of the net with."""
        raise NotImplementedError

    def _predictions(self, outputs: Tensor) -> Array:
        """What `predict` returns, given the outputs of the net."""
        raise NotImplementedError

    def _checked(self, X: Any) -> Array:
        check_is_fitted(self)
        found: Array = validate_data(self, X, dtype=DTYPES, reset=False)
        return found

    def _outputs(self, X: Array) -> Tensor:
        """The outputs of the net [n, k]."""
        with torch.no_grad():
            found: Tensor = self.net_(torch.tensor(X).to(next(self.net_.parameters())))
        return found

    def _fit(self, X: Array, y: Array, outputs: int) -> Self:
        """Train a new net with so many outputs."""
        hidden = self._checked_parameters()
        random = check_random_state(self.random_state)
        dtype = torch.float32 if X.dtype == np.float32 else torch.float64
        net = make_perceptron([X.shape[1], *hidden, outputs], self.activation, random, dtype)
        held_out = None
        if self.early_stopping:
            X, X_held_out, y, y_held_out = train_test_split(
                X,
                y,
                test_size=self.validation_fraction,
                stratify=y if self._stratified else None,
                random_state=random,
            )
            held_out = X_held_out, y_held_out
        self.net_ = net
        self._train(X, y, held_out, seed=int(random.randint(2**31 - 1)))
        return self

    def _checked_parameters(self) -> list[int]:
        """The sizes of the hidden layers."""
        sizes = self.hidden_layer_sizes
        hidden = list(sizes) if isinstance(sizes, Sequence | np.ndarray) else [sizes]
        for size in hidden:
            check_counts(hidden_layer_sizes=size)
        check_counts(max_iter=self.max_iter, n_iter_no_change=self.n_iter_no_change)
        check_not_negative(alpha=self.alpha, tol=self.tol)
        check_flags(early_stopping=self.early_stopping)
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"`validation_fraction` must be between 0 and 1, found {self.validation_fraction!r}"
            )
        if self.activation not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"`activation` must be one of {known}, found {self.activation!r}")
        return [int(size) for size in hidden]

    def _train(self, X: Array, y: Array, held_out: Samples | None, seed: int) -> None:
        """Take steps until nothing improves; with samples held out, keep the best net."""
        inputs = torch.tensor(X)
        data = inputs, self._targets(y, inputs.dtype)
        self.loss_curve_: list[float] = []
        self.validation_scores_: list[float] | None = None if held_out is None else []
        lowest, highest, kept, idle = math.inf, -math.inf, None, 0
        steps = train(
            self.net_,
            self._loss(),
            data,
            decay=self.alpha * self._factor / len(X),
            preconditioner=self._preconditioner,
            seed=seed,
        )
        for objective, on_all, at_end in islice(steps, self.max_iter):
            self.loss_ = objective / self._factor
            self.loss_curve_.append(self.loss_)
            self.n_iter_ = len(self.loss_curve_)
            told = f"step {self.n_iter_}, loss {self.loss_:.6g}"
            if held_out is None or self.validation_scores_ is None:
                better = self.loss_ < (1 - self.tol) * lowest
                lowest = min(lowest, self.loss_)
                counts = on_all  # after steps with a part of the samples others with more follow
            else:
                score = self._score(*held_out)
                self.validation_scores_.append(score)
                told += f", validation score {score:.4g}"
                better, counts = score > highest, True
                if better:
                    highest, kept = score, copy.deepcopy(self.net_.state_dict())
            if self.verbose:
                print(told)
            if better:
                idle = 0
            elif counts:
                idle += 1
            if at_end or idle >= self.n_iter_no_change:
                break
        else:
            warnings.warn(
                f"the training has not ended after {self.max_iter} steps: raise `max_iter`, or "
                "`tol`, or scale `X`",
                ConvergenceWarning,
                stacklevel=4,
            )
        if kept is not None:
            self.net_.load_state_dict(kept)

    def _score(self, X: Array, y: Array) -> float:
        return float(self._metric(y, self._predictions(self._outputs(X))))


class KSDRegressor(MultiOutputMixin, RegressorMixin, _Estimator):  # type: ignore[misc]
    """A multilayer perceptron that minimises the squared error, for scikit-learn.

    It stands where `MLPRegressor` does: pipelines, grid searches, `clone`, `pickle`. It minimises
    ½ · mean squared error + ½ · `alpha` / n · ‖W‖², with the weights W without biases and n
    samples. The net has the precision of X: float32, or else float64. Weights of samples and sparse
    X are not supported.

    Args:
        hidden_layer_sizes: units of each hidden layer; a number is one layer, () is none.
        activation: of the hidden layers: "relu", "tanh", "logistic" or "identity".
        alpha: strength of the L2 term.
        max_iter: the most steps of KSD; a ConvergenceWarning says when they were too few.
        tol: training ends when `n_iter_no_change` steps in a row, on all samples, lower the loss by
            less than this part of it. With 0 it ends where only rounding is left to gain.
        n_iter_no_change: see `tol` and `early_stopping`.
        early_stopping: whether to hold out a part of the samples, and to end when
            `n_iter_no_change` steps in a row do not raise the score on it. The net with the best
            score is kept.
        validation_fraction: the part of the samples that early stopping holds out.
        random_state: of the starting weights and of the split; an int makes results repeatable.
        verbose: print a line for each step.

    Attributes:
        net_: the trained torch module.
        loss_: the objective after the last step.
        loss_curve_: the objective after each step.
        validation_scores_: the score after each step with `early_stopping`, else None.
        n_iter_: the number of steps.
        n_features_in_: columns of X.
        feature_names_in_: their names, if X had names.
    """

    _factor = 2.0
    _metric = staticmethod(r2_score)
    # Of one hidden layer with ReLU. Kronecker factors end at higher losses.
    _preconditioner = "identity"

    def fit(self, X: Any, y: Any) -> Self:
        """Train a new net.

        Args:
            X: inputs [n, d], dense.
            y: targets [n] or [n, k].

        Raises:
            TypeError, ValueError: a parameter or the data cannot be used.
        """
        X, y = validate_data(self, X, y, dtype=DTYPES, multi_output=True, y_numeric=True)
        self._one_column = y.ndim == 1
        return self._fit(X, y, 1 if y.ndim == 1 else y.shape[1])

    def _loss(self) -> nn.Module:
        return nn.MSELoss()

    def _targets(self, y: Array, dtype: torch.dtype) -> Tensor:
        return torch.tensor(y, dtype=dtype).reshape(len(y), -1)

    def _predictions(self, outputs: Tensor) -> Array:
        found: Array = outputs.numpy()
        return found[:, 0] if self._one_column else found


class KSDClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A multilayer perceptron that minimises the cross-entropy, for scikit-learn.

    It stands where `MLPClassifier` does: pipelines, grid searches, `clone`, `pickle`. It minimises
    mean cross-entropy + ½ · `alpha` / n · ‖W‖², with the weights W without biases and n samples.
    Two classes have one output, more have one each. Several labels of a sample, weights of samples
    and sparse X are not supported.

    The parameters are those of `KSDRegressor`.

    Attributes:
        classes_: the classes, sorted.
        net_: as for `KSDRegressor`, as are the others.
    """

    _metric = staticmethod(accuracy_score)
    _stratified = True
    _preconditioner = "auto"

    def fit(self, X: Any, y: Any) -> Self:
        """Train a new net.

        Args:
            X: inputs [n, d], dense.
            y: classes [n], numbers or strings.

        Raises:
            TypeError, ValueError: a parameter or the data cannot be used.
        """
        X, y = validate_data(self, X, y, dtype=DTYPES)
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError(f"`y` has one class, {self.classes_[0]!r}: two are needed at least")
        return self._fit(X, y, len(self.classes_) if self._several else 1)

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class [n, classes], in the order of `classes_`."""
        outputs = self._outputs(self._checked(X))
        if not self._several:
            outputs = torch.cat([-outputs, outputs], 1)
            return outputs.sigmoid().numpy()
        return outputs.softmax(1).numpy()

    @property
    def _several(self) -> bool:
        """Whether there are more than two classes."""
        return len(self.classes_) > 2

    def _loss(self) -> nn.Module:
        return nn.CrossEntropyLoss() if self._several else nn.BCEWithLogitsLoss()

    def _targets(self, y: Array, dtype: torch.dtype) -> Tensor:
        numbers = torch.tensor(np.searchsorted(self.classes_, y))
        return numbers if self._several else numbers.to(dtype)[:, None]

    def _predictions(self, outputs: Tensor) -> Array:
        chosen = outputs.argmax(1) if self._several else (outputs[:, 0] > 0).long()
        found: Array = self.classes_[chosen.numpy()]
        return found

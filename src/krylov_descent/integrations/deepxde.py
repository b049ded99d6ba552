"""Models of DeepXDE (PyTorch backend) trained by KSD.

    from krylov_descent.integrations.deepxde import compile_with_ksd

    compile_with_ksd(model, metrics=["l2 relative error"])   # in place of model.compile
    model.train(iterations=100, display_every=10)

An iteration of DeepXDE is a step of KSD. Losses, metrics, history, callbacks, resampling and
checkpoints are DeepXDE's own. The equation and each condition become terms (see `Term`), so steps
may have parts of their points, and errors name them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import deepxde
import numpy as np
import torch
from deepxde import gradients
from deepxde.data.pde import PDE
from deepxde.icbc import (
    IC,
    DirichletBC,
    NeumannBC,
    OperatorBC,
    PeriodicBC,
    PointSetBC,
    PointSetOperatorBC,
    RobinBC,
)
from torch import Tensor

from krylov_descent.objective.layers.graph_walks import leaves
from krylov_descent.objective.term import Term
from krylov_descent.optimizers.ksd import damped_phase
from krylov_descent.optimizers.ksd.ksd import KSD

EQUATION = "equation"
# The residual of a condition: of the net, points and what belongs to each point.
Condition = Callable[..., Tensor]


def compile_with_ksd(
    model: deepxde.Model,
    *,
    metrics: Sequence[Any] | None = None,
    loss_weights: Sequence[float] | None = None,
    verbose: int = 1,
    **options: Any,
) -> KSD:
    """Compile a model for training by KSD, in place of `model.compile`.

    Args:
        model: with data of the kind `dde.data.PDE` or `dde.data.TimePDE`.
        metrics: as for `model.compile`.
        loss_weights: of the equations, then of the conditions, as for `model.compile`.
        verbose: as for `model.compile`.
        options: of `KSD`.

    Returns:
        The optimiser, which is also `model.opt`. `model.last_step` is the result of its last step.

    Raises:
        TypeError: the model has another backend or kind of data, a condition without residuals of
            single points, or trainable numbers outside of the net.
        ValueError: the model has a regulariser other than L2, or weights of another number.
    """
    _check(model)
    model.compile(
        "adam", lr=1e-3, loss="MSE", metrics=metrics, loss_weights=loss_weights, verbose=verbose
    )
    terms = _Terms(model)
    if model.net.regularizer is not None:
        options.setdefault("weight_decay", model.net.regularizer[1])
    optimizer = KSD(model.net, terms.made, **options)
    if any(isinstance(bc, PointSetBC | PointSetOperatorBC) for bc in model.data.bcs):
        damped_phase.end(optimizer.param_groups[0])  # these may be readings with noise

    def train_step(inputs: Any, targets: Any, auxiliary: Any) -> None:
        del targets, auxiliary
        terms.update(inputs)
        model.last_step = optimizer.step()

    model.opt, model.opt_name, model.train_step = optimizer, "KSD", train_step
    return optimizer


def _check(model: Any) -> None:
    if deepxde.backend.backend_name != "pytorch":
        raise TypeError(
            f"DeepXDE has the backend {deepxde.backend.backend_name}: set DDE_BACKEND=pytorch "
            "before it is imported"
        )
    if not isinstance(model.data, PDE):
        raise TypeError(
            f"the model has data of the kind {type(model.data).__name__}, and KSD knows "
            "dde.data.PDE and dde.data.TimePDE: train others as KSD(model.net, loss)"
        )
    if model.data.auxiliary_var_fn is not None:
        raise TypeError("auxiliary variables of points are not supported by KSD")
    if deepxde.config.autodiff != "reverse":
        raise TypeError(
            "KSD differentiates backwards: call dde.config.set_default_autodiff('reverse')"
        )
    kind = None if model.net.regularizer is None else model.net.regularizer[0]
    if kind not in (None, "l2"):
        raise ValueError(f"KSD knows the regulariser 'l2', found {kind!r}")


class _Terms:
    """The terms of a model, whose points follow DeepXDE's.

    Args:
        model: compiled.
    """

    def __init__(self, model: Any) -> None:
        self._model, data = model, model.data
        self._last = data.train_x
        parts = self._points(data.train_x)
        equations = self._count_equations(parts[EQUATION]) if EQUATION in parts else 0
        count = equations + len(data.bcs)
        weights = [1.0] * count if model.loss_weights is None else list(model.loss_weights)
        if len(weights) != count:
            raise ValueError(
                f"`loss_weights` has {len(weights)} numbers, and there are {equations} equations "
                f"and {len(data.bcs)} conditions"
            )
        self.made: dict[str, Term] = {}
        if equations:
            total = sum(weights[:equations])
            mean = total / equations or 1.0
            self._scales = [(weight / mean) ** 0.5 for weight in weights[:equations]]
            self.made[EQUATION] = Term(self._equation, parts[EQUATION], weight=total)
        for number, (bc, weight) in enumerate(zip(data.bcs, weights[equations:], strict=True)):
            name = _name(number)
            self.made[name] = Term(_condition(bc), parts[name], weight=weight)

    def update(self, points: Any) -> None:
        """Take over points that DeepXDE has drawn anew."""
        if points is self._last:
            return
        self._last, parts = points, self._points(points)
        for name, term in self.made.items():
            term.points = parts[name]

    def _points(self, points: Any) -> dict[str, Any]:
        """The points of each term: those of the conditions come first, then the equation's."""
        data, start = self._model.data, 0
        parts: dict[str, Any] = {}
        for number, (bc, size) in enumerate(zip(data.bcs, data.num_bcs, strict=True)):
            parts[_name(number)] = _with_values(bc, points, start, start + size)
            start += size
        if data.pde is not None:
            parts[EQUATION] = torch.as_tensor(points[start:])
        return parts

    def _count_equations(self, points: Tensor) -> int:
        """The number of equations; raises TypeError if one has a trainable number of its own."""
        net, few = self._model.net, points[:1].clone().requires_grad_()
        with torch.enable_grad():
            found = self._residuals(net, few)
        known = {id(few), *map(id, net.parameters())}
        if any(id(leaf) not in known for leaf in leaves(found)):
            raise TypeError(
                "the equation uses a trainable number that is not a parameter of the net, such as "
                "dde.Variable: set net.coefficient = torch.nn.Parameter(...), and use "
                "net.coefficient in the equation"
            )
        return len(found)

    def _residuals(self, net: Any, points: Tensor) -> list[Tensor]:
        gradients.clear()  # DeepXDE caches derivatives by the identity of tensors
        found = self._model.data.pde(points, net(points))
        gradients.clear()
        return list(found) if isinstance(found, list | tuple) else [found]

    def _equation(self, net: Any, points: Tensor) -> Tensor:
        """The residuals of all equations [m, …], scaled so that their mean square is the loss."""
        found = [row.reshape(len(points), -1) for row in self._residuals(net, points)]
        columns = sum(row.shape[1] for row in found) / len(found)  # of an equation, on average
        return torch.cat(
            [
                scale * (columns / row.shape[1]) ** 0.5 * row
                for scale, row in zip(self._scales, found, strict=True)
            ],
            1,
        )


def _name(number: int) -> str:
    return f"condition {number + 1}"


def _with_values(bc: Any, points: Any, start: int, stop: int) -> Any:
    """The points of a condition, with what its residuals need for each of them."""
    own = torch.as_tensor(points[start:stop])
    if isinstance(bc, PeriodicBC):
        half = len(own) // 2
        return own[:half], own[half:]
    if isinstance(bc, DirichletBC | IC):
        return own, _column(bc.func(points, start, stop, None), own)
    if isinstance(bc, NeumannBC):
        normals = bc.boundary_normal(points, start, stop, None)
        return own, _column(bc.func(points, start, stop, None), own), torch.as_tensor(normals)
    if isinstance(bc, PointSetBC | PointSetOperatorBC):
        values = bc.values if bc.batch_size is None else bc.values[bc.batch_indices]
        return own, _column(values, own)
    if isinstance(bc, RobinBC | OperatorBC):
        return (own,)
    raise TypeError(
        f"the condition {type(bc).__name__} is not supported by KSD: it has no residual of each "
        "point that is known here"
    )


def _column(values: Any, points: Tensor) -> Tensor:
    """Values of each point [m, c]; a single number counts for all."""
    found = torch.as_tensor(values).to(points)
    if found.dim() < 2 or len(found) != len(points):
        found = found.reshape(-1, 1).expand(len(points), 1)
    return found


def _condition(bc: Any) -> Condition:
    """The residual of a condition, given the net and what `_with_values` returns."""

    def component(outputs: Tensor) -> Tensor:
        chosen = bc.component if isinstance(bc.component, list) else [bc.component]
        return outputs[:, chosen]

    def values(net: Any, points: Tensor, given: Tensor) -> Tensor:
        return component(net(points)) - given

    def slope(net: Any, points: Tensor, given: Tensor, normals: Tensor) -> Tensor:
        return _slope(net(points), points, normals) - given

    def _slope(outputs: Tensor, points: Tensor, normals: Tensor) -> Tensor:
        (rows,) = torch.autograd.grad(component(outputs).sum(), points, create_graph=True)
        return (rows * normals).sum(1, keepdim=True)

    def periodic(net: Any, left: Tensor, right: Tensor) -> Tensor:
        if bc.derivative_order == 0:
            return component(net(left)) - component(net(right))
        sides = []
        for points in (left, right):
            outputs = component(net(points)).sum()
            (rows,) = torch.autograd.grad(outputs, points, create_graph=True)
            sides.append(rows[:, [bc.component_x]])
        return sides[0] - sides[1]

    def robin(net: Any, points: Tensor) -> Tensor:
        x, outputs = _numpy(points), net(points)
        normals = torch.as_tensor(bc.geom.boundary_normal(x)).to(points)
        found: Tensor = _slope(outputs, points, normals) - bc.func(x, outputs)
        return found

    def operator(net: Any, points: Tensor, given: Tensor | float = 0.0) -> Tensor:
        gradients.clear()
        found: Tensor = bc.func(points, net(points), _numpy(points)) - given
        gradients.clear()
        return found

    if isinstance(bc, PeriodicBC):
        return periodic
    if isinstance(bc, NeumannBC):
        return slope
    if isinstance(bc, RobinBC):
        return robin
    if isinstance(bc, OperatorBC | PointSetOperatorBC):
        return operator
    return values


def _numpy(points: Tensor) -> np.ndarray[Any, Any]:
    return points.detach().cpu().numpy()

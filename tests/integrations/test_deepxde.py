"""Models of DeepXDE trained by KSD, with the real package."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

os.environ.setdefault("DDE_BACKEND", "pytorch")
os.environ.setdefault("MPLBACKEND", "Agg")

import deepxde as dde

from krylov_descent import KSD, Status
from krylov_descent.integrations.deepxde import compile_with_ksd
from krylov_descent.optimizers.ksd import damped_phase


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    dde.config.set_default_float("float64")
    dde.config.set_random_seed(0)
    yield
    dde.config.set_default_float("float32")


def burgers(x: Any, y: Any) -> Any:
    u_x, u_t = (dde.grad.jacobian(y, x, i=0, j=j) for j in (0, 1))
    return u_t + y * u_x - 0.1 / np.pi * dde.grad.hessian(y, x, i=0, j=0)


def domain() -> Any:
    return dde.geometry.GeometryXTime(dde.geometry.Interval(-1, 1), dde.geometry.TimeDomain(0, 1))


def model_of(
    pde: Any, conditions: list[Any], outputs: int = 1, transform: Any = None, where: Any = None
) -> Any:
    place = where or domain()
    kind, options = dde.data.TimePDE, {"num_initial": 20}
    if where is not None:
        kind, options = dde.data.PDE, {}
    data = kind(place, pde, conditions, num_domain=150, num_boundary=40, **options)
    net = dde.nn.FNN([2, 12, 12, outputs], "tanh", "Glorot normal")
    if transform is not None:
        net.apply_output_transform(transform)
    return dde.Model(data, net)


def of_burgers() -> Any:
    place = domain()
    return model_of(
        burgers,
        [
            dde.icbc.DirichletBC(place, lambda x: 0, lambda _, on: on),
            dde.icbc.IC(place, lambda x: -np.sin(np.pi * x[:, :1]), lambda _, on: on),
        ],
    )


def deepxdes_losses(model: Any) -> Any:
    """The weighted losses as DeepXDE itself computes them."""
    return model._outputs_losses(True, model.data.train_x, None, None)[1]


def test_burgers_is_trained_with_deepxdes_history_and_callbacks() -> None:
    model = of_burgers()
    optimizer = compile_with_ksd(model, loss_weights=[1, 10, 10], verbose=0)
    assert isinstance(optimizer, KSD)
    assert model.opt is optimizer

    class Count(dde.callbacks.Callback):  # type: ignore[misc]
        calls = 0

        def on_epoch_end(self) -> None:
            self.calls += 1

    count = Count()
    history, state = model.train(iterations=12, display_every=4, callbacks=[count], verbose=0)
    assert count.calls == 12
    assert history.steps == [0, 4, 8, 12]
    assert state.step == 12
    assert sum(history.loss_train[-1]) < 0.05 * sum(history.loss_train[0])
    assert set(model.last_step.terms) == {"equation", "condition 1", "condition 2"}


def test_allen_cahn_with_hard_conditions_is_trained() -> None:
    """DeepXDE's own example: the output transform meets both conditions, so none are left."""

    def equation(x: Any, y: Any) -> Any:
        u_t = dde.grad.jacobian(y, x, i=0, j=1)
        return u_t - 0.001 * dde.grad.hessian(y, x, i=0, j=0) - 5 * (y - y**3)

    def transform(x: Any, y: Any) -> Any:
        start = x[:, :1] ** 2 * torch.cos(np.pi * x[:, :1])
        return start + x[:, 1:] * (1 - x[:, :1] ** 2) * y

    model = model_of(equation, [], transform=transform)
    compile_with_ksd(model, verbose=0)
    history, _ = model.train(iterations=10, display_every=10, verbose=0)
    assert sum(history.loss_train[-1]) < 0.2 * sum(history.loss_train[0])
    assert set(model.last_step.terms) == {"equation"}


def square_conditions() -> dict[str, Any]:
    square = dde.geometry.Rectangle([0, 0], [1, 1])

    def left(x: Any, on: bool) -> bool:
        return on and bool(np.isclose(x[0], 0))

    places, values = np.random.rand(9, 2), np.random.rand(9, 1)  # noqa: NPY002
    return {
        "dirichlet": dde.icbc.DirichletBC(square, lambda x: x[:, :1] + 1, left, component=1),
        "neumann": dde.icbc.NeumannBC(square, lambda x: x[:, 1:], left),
        "robin": dde.icbc.RobinBC(square, lambda x, y: 2 * y[:, :1], left),
        "periodic": dde.icbc.PeriodicBC(square, 0, left),
        "periodic slope": dde.icbc.PeriodicBC(square, 0, left, derivative_order=1),
        "operator": dde.icbc.OperatorBC(
            square, lambda x, y, _: dde.grad.jacobian(y, x, i=1, j=0) - 1, left
        ),
        "points": dde.icbc.PointSetBC(places, values, component=1),
        "two components": dde.icbc.PointSetBC(
            places, np.hstack([values, values]), component=[0, 1]
        ),
        "one value": dde.icbc.PointSetBC(places, 0.5),
        "operator at points": dde.icbc.PointSetOperatorBC(
            places, values, lambda x, y, _: dde.grad.jacobian(y, x, i=0, j=1)
        ),
    }


@pytest.mark.parametrize("name", square_conditions())
def test_every_condition_has_deepxdes_loss(name: str) -> None:
    """With two equations, of which one has two columns; the sum is compared, and its gradient."""

    def equations(x: Any, y: Any) -> list[Any]:
        return [dde.grad.hessian(y, x, component=0, i=0, j=0) - 1, y - x[:, :1]]

    square = dde.geometry.Rectangle([0, 0], [1, 1])
    model = model_of(equations, [square_conditions()[name]], outputs=2, where=square)
    optimizer = compile_with_ksd(model, loss_weights=[2.0, 0.5, 3.0], verbose=0)
    expected = deepxdes_losses(model)
    total = model.outputs_losses_train(model.data.train_x, None, None)[1].sum()
    gradient = torch.autograd.grad(total, list(model.net.parameters()), materialize_grads=True)
    result = optimizer.step()
    assert result.loss == pytest.approx(expected.sum(), rel=1e-9)
    norm = float(torch.cat([g.reshape(-1) for g in gradient]).norm())
    assert result.gradient_norm == pytest.approx(norm, rel=1e-7)
    assert result.terms["condition 1"] == pytest.approx(expected[-1] / 3, rel=1e-9)


def test_readings_may_have_noise_and_mean_krylov_steps() -> None:
    square, conditions = dde.geometry.Rectangle([0, 0], [1, 1]), square_conditions()
    for name, may_be_damped in ("dirichlet", True), ("points", False):
        model = model_of(lambda x, y: y - 1, [conditions[name]], outputs=2, where=square)
        optimizer = compile_with_ksd(model, verbose=0)
        assert damped_phase.is_under_way(optimizer.param_groups[0]) is may_be_damped


def test_points_that_deepxde_draws_anew_are_taken_over() -> None:
    model = of_burgers()
    model.data.train_distribution = "pseudo"
    optimizer = compile_with_ksd(model, verbose=0)
    resampler = dde.callbacks.PDEPointResampler(period=2)
    model.train(iterations=3, callbacks=[resampler], verbose=0)
    assert optimizer.objective.terms is not None
    held = optimizer.objective.terms["equation"].points
    start = sum(model.data.num_bcs)
    np.testing.assert_array_equal(held.numpy(), model.data.train_x[start:])
    expected = deepxdes_losses(model).sum()
    assert optimizer.step().loss == pytest.approx(expected, rel=1e-9)


def test_a_coefficient_of_the_net_is_trained_and_one_outside_is_refused() -> None:
    place = dde.geometry.Rectangle([0, 0], [1, 1])
    outside = dde.Variable(2.0)
    model = model_of(lambda x, y: outside * y - 1, [], where=place)
    with pytest.raises(TypeError, match=r"use net\.coefficient in the equation"):
        compile_with_ksd(model, verbose=0)
    model = model_of(lambda x, y: model.net.coefficient * y - 1, [], where=place)
    model.net.coefficient = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    compile_with_ksd(model, verbose=0)
    model.train(iterations=2, verbose=0)
    assert model.net.coefficient.item() != 2.0


def test_a_run_is_saved_and_restored(tmp_path: Path) -> None:
    models = []
    for _ in range(2):
        dde.config.set_random_seed(0)  # the same points
        models.append(of_burgers())
        compile_with_ksd(models[-1], verbose=0)
    model, other = models
    model.train(iterations=3, verbose=0)
    path = model.save(str(tmp_path / "run"))
    other.restore(path)
    results = []
    for each in (model, other):
        each.train(iterations=1, verbose=0)
        results.append((each.last_step.loss, each.last_step.loss_after))
    assert results[0] == results[1]


def test_what_is_not_supported_is_named() -> None:
    square = dde.geometry.Rectangle([0, 0], [1, 1])
    data = dde.data.Function(square, lambda x: x[:, :1], 10, 10)
    with pytest.raises(TypeError, match=r"kind Function, .* dde.data.PDE"):
        compile_with_ksd(dde.Model(data, dde.nn.FNN([2, 4, 1], "tanh", "Glorot normal")))
    model = model_of(lambda x, y: y - 1, [], where=square)
    model.net.regularizer = ("l1", 0.1)
    with pytest.raises(ValueError, match="'l2', found 'l1'"):
        compile_with_ksd(model)
    model.net.regularizer = ("l2", 0.1)
    optimizer = compile_with_ksd(model, verbose=0)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    with pytest.raises(ValueError, match="has 3 numbers, and there are 1 equations and 0"):
        compile_with_ksd(model, loss_weights=[1, 2, 3], verbose=0)


def test_a_step_that_is_refused_is_not_a_crash() -> None:
    square = dde.geometry.Rectangle([0, 0], [1, 1])
    model = model_of(lambda x, y: y / 0, [], where=square)
    compile_with_ksd(model, verbose=0)
    model.train(iterations=1, verbose=0)
    assert model.last_step.status is Status.NOT_FINITE
    assert "the term 'equation' is not finite" in model.last_step.reason

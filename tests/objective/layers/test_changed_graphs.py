"""A weight that gains another use in mid-run: no derivative goes on without it.

Layers are trusted at a first batch. Then a flag changes what the forward pass or the loss does with
a weight, and everything is compared with derivatives that autograd takes sample by sample.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from krylov_descent import KSD, KroneckerFactors, Objective
from krylov_descent.cuda.graphs.aliased_network import Aliased
from krylov_descent.curvature.double_backward import fisher, gauss_newton, hessian
from krylov_descent.curvature.products import Curvature, CurvatureKind
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.layers import squared_gradients
from krylov_descent.objective.layers.graph_walks import layers_used_elsewhere
from krylov_descent.objective.layers.layer_gradients import losses_and_gradients
from krylov_descent.objective.layers.linear_layers import recorded_linear_layers

SAMPLES, INPUTS, OUTPUTS, RARE = 16, 4, 2, 3


class Chain(nn.Module):
    """Two layers; a sample is one row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.layer(x)))
        return result


class Recurrent(nn.Module):
    """A layer that is called at every time step."""

    def __init__(self) -> None:
        super().__init__()
        self.inwards, self.layer = nn.Linear(1, 3), nn.Linear(3, 3)
        self.out = nn.Linear(3, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 3)
        for column in x.unbind(1):
            state = torch.tanh(self.inwards(column.unsqueeze(1)) + self.layer(state))
        result: Tensor = self.out(state)
        return result


class Rows(nn.Module):
    """A layer for each of the rows of a sample, and one parameter outside of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(2, 2, bias=False), nn.Linear(4, OUTPUTS)
        self.scale = nn.Parameter(torch.ones(OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x.unflatten(1, (2, 2)))).flatten(1)
        result: Tensor = self.scale * self.out(hidden)
        return result


MODELS: list[Callable[[], nn.Module]] = [Chain, Recurrent, Rows]


def some_samples(layer: nn.Linear, x: Tensor, outputs: Tensor) -> Tensor:
    """What a few samples do, and no others; a batch without them has no such operation."""
    rare = x[:, 0] > RARE
    return outputs + rare[:, None] * layer.weight.sin().sum() if bool(rare.any()) else outputs


# New uses of the weight or bias of a layer, from its inputs and the outputs to other outputs.
IN_FORWARD: dict[str, Callable[[nn.Linear, Tensor, Tensor], Tensor]] = {
    "function": lambda layer, x, z: z + first_of(x, layer).mm(layer.weight.t()).sin()[:, :1],
    "bias": lambda layer, x, z: z + x[:, :1] * list(layer.parameters())[-1].square().sum(),
    "keyword": lambda layer, x, z: z + layer(input=first_of(x, layer))[:, :1],
    "itself": lambda layer, x, z: z + layer(layer.weight).sum(),
    "its bias": lambda layer, x, z: z + layer(list(layer.parameters())[-1]).sum(),
    "slope": lambda layer, x, z: z + torch.autograd.grad(z.sum(), x, create_graph=True)[0][:, :1],
    "some samples": some_samples,
    "other forward": lambda layer, x, z: z,
}
IN_LOSS = ["penalty", "penalty on a held tensor"]
WAYS = [*IN_FORWARD, *IN_LOSS]


def first_of(x: Tensor, layer: nn.Linear) -> Tensor:
    """As many inputs as the layer takes."""
    return x[:, : layer.in_features]


class Changing(nn.Module):
    """A model whose forward pass, or whose loss, uses a weight anew once `way` is set."""

    def __init__(self, model: nn.Module, way: str | None = None) -> None:
        super().__init__()
        self.model, self.way = model, way
        self.held = [self.layer_of_model.weight]  # which no module is asked for

    @property
    def layer_of_model(self) -> nn.Linear:
        layer = self.model.layer
        assert isinstance(layer, nn.Linear)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        layer, way = self.layer_of_model, self.way or ""
        if way == "slope":
            x = x.detach().requires_grad_()
        if way == "other forward":
            vars(layer)["forward"] = lambda x: F.linear(x, 2 * layer.weight, layer.bias)
        outputs: Tensor = self.model(x)
        return IN_FORWARD[way](layer, x, outputs) if way in IN_FORWARD else outputs

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One number per sample; H_E is 2."""
        losses = (outputs - targets).square().sum(1)
        if self.way in IN_LOSS:
            weight = self.layer_of_model.weight if self.way == "penalty" else self.held[0]
            losses = losses + 0.3 * weight.square().sum()
        return losses


def samples() -> tuple[Tensor, Tensor]:
    """Of which three are rare, and not among those that are probed."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, INPUTS, generator=generator, dtype=torch.float64)
    x[:, 0].clamp_(max=1)
    x[1:7:2, 0] += 2 * RARE
    return x, torch.randn(SAMPLES, OUTPUTS, generator=generator, dtype=torch.float64)


def changed(make: Callable[[], nn.Module], way: str) -> tuple[Changing, Objective]:
    """A model whose layers were trusted, and used, before it changed."""
    torch.manual_seed(3)
    model = Changing(make()).double()
    objective, data = Objective(model, model.loss), samples()
    for kind in ("gauss-newton", "fisher"):
        Curvature(kind).at(objective, data)(objective.parameters.copy())
    objective.value_gradient_and_squares(data)
    assert "model.layer" in objective.network.trusted_layers
    model.way = way
    return model, objective


@functools.cache
def derivatives(make: Callable[[], nn.Module], way: str) -> tuple[Tensor, Tensor]:
    """∂losses/∂θ [N, n] and ∂outputs/∂θ [N · outputs, n] of such a model, a backward pass a row."""
    torch.manual_seed(3)
    model = Changing(make(), way).double()
    rows, of_outputs = [], []
    for x, y in zip(*(part.split(1) for part in samples()), strict=True):
        outputs = model(x)
        of_outputs += [_gradient(model, z) for z in outputs[0]]
        rows.append(_gradient(model, model.loss(outputs, y)[0]))
    return torch.stack(rows), torch.stack(of_outputs)


def _gradient(model: nn.Module, number: Tensor) -> Tensor:
    parameters = list(model.parameters())
    found = torch.autograd.grad(
        number, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return torch.cat([g.reshape(-1) for g in found])


def vector(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float64).cos()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random signs give exact squares with one sample in each group."""
    monkeypatch.setattr(squared_gradients, "GROUPS", SAMPLES)


ways = pytest.mark.parametrize("way", WAYS)
models = pytest.mark.parametrize("make", MODELS)


@models
@ways
def test_gradients_and_squares_know_a_new_use(make: Callable[[], nn.Module], way: str) -> None:
    objective, rows = changed(make, way)[1], derivatives(make, way)[0]
    for _ in range(2):
        found = objective.value_gradient_and_squares(samples())
        close(found.gradient, rows.mean(0))
        close(found.squares, rows.square().mean(0))
    close(objective.value_and_gradient(samples()).gradient, rows.mean(0))


@models
@ways
def test_products_know_a_new_use(make: Callable[[], nn.Module], way: str) -> None:
    objective, (rows, J) = changed(make, way)[1], derivatives(make, way)
    v = vector(objective.parameters.numel)
    expected = {"gauss-newton": 2 * J.T @ (J @ v), "fisher": rows.T @ (rows @ v)}
    kind: CurvatureKind
    for kind in ("gauss-newton", "fisher"):
        close(Curvature(kind).at(objective, samples())(v), expected[kind] / SAMPLES)


@models
@ways
def test_recorded_derivatives_know_a_new_use(make: Callable[[], nn.Module], way: str) -> None:
    """Those of a network on aliases of its parameters, or they are refused."""
    objective = changed(make, way)[1]
    network, batch = objective.network, Batch(*samples(), SAMPLES)
    aliased = Aliased(network)
    if way == "penalty on a held tensor":
        for derivative in (losses_and_gradients, fisher, hessian):
            with pytest.raises(RuntimeError, match=r"holds 'model.layer.weight' itself"):
                derivative(aliased, batch)
        return
    rows, J = derivatives(make, way)
    parameters = network.parameters
    v = vector(parameters.numel)
    close(parameters.flatten(losses_and_gradients(aliased, batch)[1]), rows.sum(0))
    _, gradients, squares = objective.squared_gradients.on(aliased).of_batch(batch, 1 << 20)
    close(parameters.flatten(gradients), rows.sum(0))
    close(parameters.flatten(squares), rows.square().sum(0))
    pieces = parameters.pieces(v)
    close(parameters.flatten(gauss_newton(aliased, batch)(pieces)), 2 * J.T @ (J @ v))
    close(parameters.flatten(fisher(aliased, batch)(pieces)), rows.T @ (rows @ v))


@models
@pytest.mark.parametrize("way", IN_FORWARD)
def test_a_layer_with_a_new_use_has_no_kronecker_factors(
    make: Callable[[], nn.Module], way: str
) -> None:
    objective = changed(make, way)[1]
    batch = Batch(*samples(), SAMPLES)
    factors = KroneckerFactors()
    factors.update(objective, samples())
    factors.learn(objective, [batch])
    squares = derivatives(make, way)[0].square().mean(0)
    first = flat_index(objective, "model.layer.weight")
    entries = []
    for i in (first, first + 1):
        image = factors.multiply(torch.eye(len(squares), dtype=torch.float64)[i])
        assert image.count_nonzero() == 1
        entries.append(image[i])
    # D has units of its own.
    close(entries[0] / entries[1], squares[first] / squares[first + 1])


def flat_index(objective: Objective, name: str) -> int:
    """Where a parameter begins in θ."""
    before = objective.network.names.index(name)
    return sum(p.numel() for p in objective.parameters.tensors[:before])


@pytest.mark.parametrize("preconditioner", ["fisher-diagonal", "kronecker", "identity"])
@pytest.mark.parametrize("way", ["penalty", "penalty on a held tensor", "function", "some samples"])
def test_a_step_reports_the_gradient_of_the_changed_model(preconditioner: Any, way: str) -> None:
    torch.manual_seed(3)
    model, data = Changing(Chain()).double(), samples()
    if preconditioner == "kronecker":
        preconditioner = KroneckerFactors(after=0)
    optimizer = KSD(model, model.loss, preconditioner=preconditioner, dimension=4)
    for _ in range(3):
        optimizer.step(data)
    model.way = way
    for _ in range(2):
        expected = _gradient(model, model.loss(model(data[0]), data[1]).mean())
        found = optimizer.step(data)
        assert found.gradient_norm == pytest.approx(float(expected.norm()), rel=1e-9)
        assert found.status.moved


@models
def test_a_branch_that_the_probe_does_not_take_is_seen(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    model = Changing(make(), "some samples").double()
    objective = Objective(model, model.loss)
    rows, J = derivatives(make, "some samples")
    v = vector(objective.parameters.numel)
    close(Curvature().at(objective, samples())(v), 2 / SAMPLES * J.T @ (J @ v))
    assert "model.layer" in objective.network.trusted_layers
    found = objective.value_gradient_and_squares(samples())
    close(found.gradient, rows.mean(0))
    close(found.squares, rows.square().mean(0))


def test_a_penalty_is_evaluated_where_the_network_is_moved_to() -> None:
    """By a recorded search, which writes its points nowhere else."""
    model, objective = changed(Chain, "penalty")
    parameters, batch = objective.parameters, Batch(*samples(), SAMPLES)
    point = 2 * parameters.copy()
    there = Aliased(objective.network).at(point).sample_losses(batch).detach()
    parameters.assign(point)
    close(there, model.loss(model(batch.inputs), batch.targets).detach())


def test_a_parameter_among_the_outputs_is_another_use() -> None:
    model, x = Chain(), samples()[0].float()
    with recorded_linear_layers(model) as layers:
        outputs = model(x)
    assert layers_used_elsewhere([outputs], layers) == set()
    assert layers_used_elsewhere([outputs, model.out.weight], layers) == {1}


def test_a_layer_may_be_applied_to_its_own_weight_alone() -> None:
    layer, data = nn.Linear(INPUTS, INPUTS).double(), (samples()[0], samples()[0])
    objective = Objective(layer, nn.MSELoss(), forward=lambda model, x: x @ model(model.weight))
    mean = F.mse_loss(data[0] @ layer(layer.weight), data[0])
    close(objective.value_gradient_and_squares(data).gradient, _gradient(layer, mean))


def test_inputs_that_are_overwritten_are_not_multiplied() -> None:
    """Autograd has an error for it, also where δ alone could be found."""
    model, objective = changed(Chain, "none")

    def overwrite(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        args[0].mul_(2)

    model.layer_of_model.register_forward_hook(overwrite)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses_and_gradients(objective.network, Batch(*samples(), SAMPLES))

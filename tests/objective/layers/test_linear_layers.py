"""Derivatives by way of the Linear layers' outputs are those towards the parameters."""

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from krylov_descent import Objective
from krylov_descent.curvature.double_backward import gauss_newton
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.layers.layer_gradients import Reach
from krylov_descent.objective.layers.linear_layers import recorded_linear_layers

SAMPLES, INPUTS, OUTPUTS = 6, 4, 3


class Recurrent(nn.Module):
    """A cell whose Linear layers are called once per time step."""

    def __init__(self) -> None:
        super().__init__()
        self.inwards, self.across = nn.Linear(1, 5), nn.Linear(5, 5, bias=False)
        self.out = nn.Linear(5, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 5)
        for column in x.unbind(1):
            state = torch.tanh(self.inwards(column.unsqueeze(1)) + self.across(state))
        result: Tensor = self.out(state)
        return result


class Tied(nn.Module):
    """Two layers, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)
        self.second.weight = self.first.weight
        self.out = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return result


class UsedTwice(nn.Module):
    """A weight that is used without its layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.layer(x)) @ self.layer.weight)
        return result


class UsedALittle(nn.Module):
    """The same, where at first hardly anything of the gradient comes from there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(INPUTS, 5), nn.Linear(5, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.layer(x))) + 1e-4 * self.out.weight.sum(1)
        return result


class Hooked(nn.Module):
    """A hook of the model's own returns something else than the layer gave."""

    def __init__(self, hook: Callable[[Tensor], Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(INPUTS, 5), nn.Linear(4, OUTPUTS)
        self.layer.register_forward_hook(lambda module, args, output: hook(output))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        result: Tensor = self.out(torch.tanh(hidden[:, :4]))
        return result


class Empty(nn.Module):
    """Layers without inputs and without outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(INPUTS, 5), nn.Linear(5, OUTPUTS)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
            self.from_nothing, self.to_nothing = nn.Linear(0, 5), nn.Linear(INPUTS, 0)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x) + self.from_nothing(x[:, :0]))
        result: Tensor = self.out(torch.cat([hidden, self.to_nothing(x)], 1))
        return result


class Routed(nn.Module):
    """A layer that is also called without a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(INPUTS, 5), nn.Linear(5, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(torch.cat([self.layer(x), self.layer(x[:0])])))
        return result


class Differentiating(nn.Module):
    """The forward pass differentiates, as a physics-informed net's does."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(INPUTS, 5), nn.Linear(5, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u: Tensor = self.out(torch.tanh(self.hidden(x)))
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u + slope[:, :OUTPUTS]


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, OUTPUTS, bias=False))


def in_place() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, 5), nn.ReLU(inplace=True), nn.Linear(5, OUTPUTS))


def rows_within_samples() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Linear(2, 5), nn.Tanh(), nn.Flatten(), nn.Linear(10, OUTPUTS)
    )


def with_convolution() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, OUTPUTS)
    )


TRUSTED: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "chain": (chain, {"0", "2"}),
    "recurrent": (Recurrent, {"inwards", "across", "out"}),
    "rows within samples": (rows_within_samples, {"1", "4"}),
    "convolution": (with_convolution, {"4"}),
    "tied": (Tied, {"out"}),
    "used twice": (UsedTwice, {"out"}),
    "used a little": (UsedALittle, {"layer"}),
    "scaled by a hook": (lambda: Hooked(lambda z: 1.02 * z), {"layer", "out"}),
    "cut by a hook": (lambda: Hooked(lambda z: z[:, :4]), {"layer", "out"}),
    "a hook's tuple": (lambda: Hooked(lambda z: (z, z)), {"layer", "out"}),
    "empty": (Empty, {"layer", "out"}),
    "routed": (Routed, {"layer", "out"}),
    "differentiating": (Differentiating, set()),
    "in place": (in_place, {"2"}),
}


def made(name: str, zeros: Sequence[int] = ()) -> tuple[nn.Module, Objective, Batch]:
    """A model, and samples of which these inputs are always zero."""
    torch.manual_seed(3)
    model = TRUSTED[name][0]().double()
    objective = Objective(model, nn.MSELoss())
    inputs, targets = torch.randn(SAMPLES, INPUTS).double(), torch.randn(SAMPLES, OUTPUTS).double()
    inputs[:, list(zeros)] = 0
    batch = Batch(inputs, targets, SAMPLES)
    objective.probe(batch)
    return model, objective, batch


@pytest.mark.parametrize("name", TRUSTED)
def test_only_layers_that_factor_are_trusted(name: str) -> None:
    assert made(name)[1].network.trusted_layers == TRUSTED[name][1]


@pytest.mark.parametrize("name", TRUSTED)
def test_gradients_are_autograds(name: str) -> None:
    _, objective, batch = made(name)
    network = objective.network
    with recorded_linear_layers(network.eager) as layers:
        losses = network.sample_losses(batch)
    found = Reach(network, layers, [losses]).gradients(losses)
    expected = network.gradients(network.sample_losses(batch))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("zeros", [(), (0, 2), range(INPUTS)], ids=["no", "some", "all"])
@pytest.mark.parametrize("name", TRUSTED)
def test_directions_move_the_outputs_as_differences_say(name: str, zeros: Sequence[int]) -> None:
    model, objective, batch = made(name, zeros)
    network = objective.network
    pieces = [torch.randn_like(p) for p in model.parameters()]

    def outputs_at(step: float) -> Tensor:
        points = [p.detach() + step * v for p, v in zip(model.parameters(), pieces, strict=True)]
        found: Tensor = network.call_with(points, network.names, lambda: model(batch.inputs))
        return found.detach()

    expected = (outputs_at(1e-5) - outputs_at(-1e-5)) / 2e-5
    with recorded_linear_layers(network.eager) as layers:
        outputs = model(batch.inputs)
    reach = Reach(network, layers, [outputs])
    u = torch.zeros_like(outputs, requires_grad=True)
    images = torch.autograd.grad(outputs, reach.tensors, u, create_graph=True)
    (found,) = torch.autograd.grad(images, u, reach.from_parameters(pieces))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_inputs_that_are_always_zero_take_no_arithmetic() -> None:
    counts = []
    for zeros in ((), (0, 2), (0, 1, 3)):
        model, objective, batch = made("chain", zeros)
        product = gauss_newton(objective.network, batch)
        with FlopCounterMode(display=False) as counter:
            product([torch.randn_like(p) for p in model.parameters()])
        counts.append(counter.get_total_flops())
    saved = [counts[0] - count for count in counts[1:]]
    assert saved == [2 * SAMPLES * 5 * left_out for left_out in (2, 3)]


def test_a_linearisation_takes_the_arithmetic_of_a_forward_pass() -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(80, 900), nn.Tanh(), nn.Linear(900, 10)).double()
    objective = Objective(model, nn.MSELoss())
    batch = Batch(torch.randn(7, 80).double(), torch.randn(7, 10).double(), 7)
    objective.probe(batch)
    with FlopCounterMode(display=False) as counter:
        product = gauss_newton(objective.network, batch)
    assert counter.get_total_flops() == 2 * 7 * (80 * 900 + 900 * 10)
    pieces = [torch.randn_like(p) for p in model.parameters()]
    # By differences, and a backward pass of its own.
    parameters = list(model.parameters())
    ahead, behind = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for p, q, v in zip(ahead.parameters(), behind.parameters(), pieces, strict=True):
            p.add_(v, alpha=1e-5)
            q.sub_(v, alpha=1e-5)
        moved = (ahead(batch.inputs) - behind(batch.inputs)) / 2e-5
    exact = torch.autograd.grad(model(batch.inputs), parameters, 2 / 10 * moved)
    for ours, theirs in zip(product(pieces), exact, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


class Mixing(nn.Module):
    """A net that mixes samples by a matrix of few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(80, 900), nn.Linear(900, 10)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.eye(len(x), dtype=x.dtype).roll(1, 0).to_sparse()
        result: Tensor = self.last(torch.tanh(torch.sparse.mm(mixed, self.first(x))))
        return result


def test_a_linearisation_may_have_sparse_matrices() -> None:
    torch.manual_seed(5)
    model = Mixing()
    network = Objective(model, nn.MSELoss()).network
    batch = Batch(torch.randn(7, 80), torch.randn(7, 10), 7)
    product = gauss_newton(network, batch)
    assert all(piece is not None for piece in product([p.detach() for p in model.parameters()]))


def test_frozen_weights_and_biases_are_left_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, OUTPUTS)).double()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    objective = Objective(model, nn.MSELoss(), params=trainable)
    x, y = torch.randn(SAMPLES, INPUTS).double(), torch.randn(SAMPLES, OUTPUTS).double()
    objective.probe(Batch(x, y, SAMPLES))
    assert objective.network.trusted_layers == {"0", "2"}
    with recorded_linear_layers(model) as layers:
        losses = objective.network.sample_losses(Batch(x, y, SAMPLES))
    reach = Reach(objective.network, layers, [losses])
    found = reach.gradients(losses)
    expected = torch.autograd.grad(F.mse_loss(model(x), y) * SAMPLES, trainable)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    moved = reach.from_parameters([torch.ones_like(p) for p in trainable])
    torch.testing.assert_close(moved[0], torch.ones(SAMPLES, 5).double())


def test_outputs_that_autograd_has_no_use_for_are_let_go() -> None:
    # ReLU keeps what it returns, so the layer's outputs are nobody's once the graph is built.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 5), nn.ReLU(), nn.Linear(5, OUTPUTS))
    objective = Objective(model, nn.MSELoss())
    batch = Batch(torch.randn(SAMPLES, INPUTS), torch.randn(SAMPLES, OUTPUTS), SAMPLES)
    objective.probe(batch)
    with recorded_linear_layers(model) as layers:
        losses = objective.network.sample_losses(batch)
    hidden = weakref.ref(layers[0].outputs[0])
    reach = Reach(objective.network, layers, [losses])
    layers.clear()
    assert hidden() is None
    assert all(gradient is not None for gradient in reach.gradients(losses))


def test_on_a_cpu_gradients_are_pieces_of_one_vector_of_their_own() -> None:
    _, objective, batch = made("convolution")
    network = objective.network

    def gradients() -> list[Tensor | None]:
        with recorded_linear_layers(network.eager) as layers:
            losses = network.sample_losses(batch)
        return Reach(network, layers, [losses]).gradients(losses)

    pieces = gradients()
    vector, first = network.parameters.flatten(pieces), pieces[0]
    assert first is not None
    assert vector.data_ptr() == first.data_ptr()
    expected = vector.clone()
    assert network.parameters.flatten(gradients()).data_ptr() != vector.data_ptr()
    assert torch.equal(vector, expected)


def test_what_the_losses_do_not_depend_on_is_zero_in_the_vector() -> None:
    torch.manual_seed(0)

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(INPUTS, OUTPUTS), nn.Linear(INPUTS, OUTPUTS)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.used(x)
            return result

    objective = Objective(Unused(), nn.MSELoss())
    batch = Batch(torch.randn(SAMPLES, INPUTS), torch.randn(SAMPLES, OUTPUTS), SAMPLES)
    objective.probe(batch)
    with recorded_linear_layers(objective.network.eager) as layers:
        losses = objective.network.sample_losses(batch)
    found = Reach(objective.network, layers, [losses]).gradients(losses)
    assert [piece is None for piece in found] == [False, False, True, True]
    vector = objective.parameters.flatten(found)
    assert vector[: INPUTS * OUTPUTS].any()
    assert not vector[(INPUTS + 1) * OUTPUTS :].any()

"""Sums of squared per-sample gradients, for the Fisher diagonal."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.layers import squared_gradients
from krylov_descent.objective.layers.squared_gradients import GROUPS, TRUST_SAMPLES
from krylov_descent.objective.objective import Objective
from tests import dense
from tests.problems import PAIRS, Problem, call, make


def _check(found: Evaluation, problem: Problem) -> None:
    torch.testing.assert_close(found.squares, dense.squares(problem), rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(found.gradient, dense.gradient(problem), rtol=1e-9, atol=1e-13)


# Exact for any module, with few samples -----------------------------------------------------------


@pytest.mark.parametrize(("model", "loss"), PAIRS)
def test_squares_equal_the_dense_ones(model: str, loss: str) -> None:
    problem = make(model, loss)
    objective = Objective(problem.model, problem.loss)
    for _ in range(2):  # the second time with layers that are trusted
        _check(objective.value_gradient_and_squares(problem.data), problem)


def test_squares_are_not_those_of_the_mean_gradient() -> None:
    problem = make("mlp", "mse")
    found = Objective(problem.model, problem.loss).value_gradient_and_squares(problem.data)
    assert not torch.allclose(found.squares, found.gradient.square(), rtol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_dtypes(dtype: torch.dtype) -> None:
    problem = make("conv", "logistic")
    data = tuple(side.to(dtype) for side in problem.data)
    found = Objective(problem.model.to(dtype), problem.loss).value_gradient_and_squares(data)
    problem.model.double()
    assert found.squares.dtype == dtype
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(
        found.squares.double(), dense.squares(problem), rtol=tolerance, atol=tolerance
    )


def test_the_model_is_as_before() -> None:
    problem = make("called-twice", "mse")
    before = list(problem.model.named_parameters(remove_duplicate=False))
    values = [p.detach().clone() for _, p in before]
    Objective(problem.model, problem.loss).value_gradient_and_squares(problem.data)
    after = list(problem.model.named_parameters(remove_duplicate=False))
    assert all(p is q for (_, p), (_, q) in zip(before, after, strict=True))
    assert all(torch.equal(p, value) for (_, p), value in zip(after, values, strict=True))
    assert not any(module._forward_hooks for module in problem.model.modules())


# Random signs -------------------------------------------------------------------------------------


class Last(nn.Module):
    """A recurrent layer of torch, and a Linear layer on its last outputs."""

    def __init__(self, kind: type[nn.RNN | nn.GRU | nn.LSTM]) -> None:
        super().__init__()
        self.recurrent = kind(2, 3, batch_first=True)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.recurrent(x)[0][:, -1])
        return found


class Slope(nn.Module):
    """u + du/dx of a small net: the forward pass differentiates. One layer is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = self.net(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        found: Tensor = u + slope.sum(1, keepdim=True)
        return found


def convolutional() -> nn.Module:
    """Layers of which none is Linear."""
    return nn.Sequential(nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv1d(4, 1, 3))


ESTIMATED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "rnn": (lambda: Last(nn.RNN), (4, 2)),
    "gru": (lambda: Last(nn.GRU), (4, 2)),
    "lstm": (lambda: Last(nn.LSTM), (4, 2)),
    "physics": (Slope, (2,)),
    "convolutional": (convolutional, (2, 4)),
}
estimated = pytest.mark.parametrize("name", ESTIMATED)


def _estimated(name: str, samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    build, shape = ESTIMATED[name]
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(samples, *shape, dtype=torch.float64)
    return model, x, torch.zeros_like(model(x).detach())


@estimated
@pytest.mark.parametrize("samples", [1, GROUPS - 1, GROUPS])
def test_one_sample_in_each_group_is_exact(name: str, samples: int) -> None:
    model, x, targets = _estimated(name, samples)
    found = Objective(model, nn.MSELoss()).value_gradient_and_squares((x, targets))
    torch.testing.assert_close(found.squares, _by_loop(model, x), rtol=1e-10, atol=1e-14)


@estimated
def test_the_mean_over_signs_is_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All signs of 5 samples in 2 groups."""
    samples, sets = 5, list(itertools.product([-1.0, 1.0], repeat=5))
    left = iter(sets)
    monkeypatch.setattr(squared_gradients, "GROUPS", 2)
    monkeypatch.setattr(
        squared_gradients,
        "signs_like",
        lambda like: [torch.tensor(next(left), dtype=like[0].dtype)],
    )
    model, x, targets = _estimated(name, samples)
    objective = Objective(model, nn.MSELoss())
    found = [objective.value_gradient_and_squares((x, targets)).squares for _ in sets]
    exact = _by_loop(model, x)
    assert not torch.allclose(found[0], exact, rtol=0.01)
    torch.testing.assert_close(torch.stack(found).mean(0), exact, rtol=1e-10, atol=1e-14)


def test_the_noise_of_an_entry() -> None:
    """Of many Gaussian gradients: an unbiased estimate, with a deviation of √(2/GROUPS)."""
    entries = 4000
    model = nn.Linear(1, entries, bias=False).double()
    weight = model.weight
    torch.manual_seed(0)
    x = torch.randn(400, entries, dtype=torch.float64)
    objective = Objective(model, lambda z, _: z, forward=lambda _, x: x @ weight[:, 0])
    found = objective.value_gradient_and_squares((x, x[:, :1]))
    ratio = found.squares / x.square().mean(0)
    deviation = (2 / GROUPS) ** 0.5
    assert float(ratio.mean()) == pytest.approx(1, abs=4 * deviation / entries**0.5)
    assert float(ratio.std()) == pytest.approx(deviation, rel=0.06)


@estimated
def test_backward_passes_do_not_grow_with_the_samples(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    derive = torch.autograd.grad
    counts = []
    for samples in (20, 60):
        model, x, targets = _estimated(name, samples)
        objective = Objective(model, nn.MSELoss())
        objective.value_gradient_and_squares((x, targets))
        sizes: list[int] = []

        def counted(outputs: Any, *args: Any, sizes: list[int] = sizes, **choices: Any) -> Any:
            if not choices.get("create_graph"):
                sizes.append(len(outputs))
            return derive(outputs, *args, **choices)

        with monkeypatch.context() as patched:
            patched.setattr(torch.autograd, "grad", counted)
            objective.value_gradient_and_squares((x, targets))
        assert sizes[0] == sum(sizes[1:]) == samples
        counts.append(len(sizes))
    assert counts == [1 + GROUPS, 1 + GROUPS]


def test_signs_leave_the_generators_alone() -> None:
    model, x, targets = _estimated("lstm", 20)
    before = torch.random.get_rng_state()
    Objective(model, nn.MSELoss()).value_gradient_and_squares((x, targets))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_layer_beside_those_with_signs_is_exact() -> None:
    model, x, targets = _estimated("lstm", 50)
    found = Objective(model, nn.MSELoss()).value_gradient_and_squares((x, targets)).squares
    exact = _by_loop(model, x)
    torch.testing.assert_close(found[-4:], exact[-4:], rtol=1e-10, atol=0.0)
    assert not torch.allclose(found[:-4], exact[:-4], rtol=0.01)


@pytest.mark.parametrize("name", ["gru", "physics"])
@pytest.mark.parametrize("autocast", [False, True])
def test_signs_in_lower_precision(name: str, autocast: bool) -> None:
    model, x, targets = _estimated(name, 40)
    expected = Objective(model, nn.MSELoss()).value_gradient_and_squares((x, targets)).squares
    objective = Objective(model.float(), nn.MSELoss())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), objective.network.algebra():
        found = objective.value_gradient_and_squares((x.float(), targets.float())).squares
    assert found.dtype == torch.float32
    tolerance = 0.05 if autocast else 1e-5
    assert float((found - expected).norm()) < tolerance * float(expected.norm())


# Which route is taken -----------------------------------------------------------------------------


@pytest.fixture
def two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the estimates of more than two samples differ from the exact squares."""
    monkeypatch.setattr(squared_gradients, "GROUPS", 2)


def _estimates(objective: Objective, data: Any, exact: Tensor) -> set[str]:
    """The names of the parameters with estimates: their squares are not the exact ones."""
    for _ in range(2):  # the second time with layers that are trusted
        found = objective.value_gradient_and_squares(data).squares
    pieces = zip(
        objective.network.names,
        objective.parameters.pieces(found),
        objective.parameters.pieces(exact),
        strict=True,
    )
    return {name for name, f, e in pieces if not torch.allclose(f, e, rtol=1e-6, atol=1e-13)}


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize(
    ("model", "estimated"),
    [
        ("linear", set()),
        ("mlp", set()),
        ("frozen", set()),
        ("called-twice", set()),
        ("conv", {"0.weight", "0.bias"}),  # the Conv layer, not the Linear one
        ("tied", {"0.weight", "0.bias", "2.bias"}),
    ],
)
def test_each_layer_takes_its_own_route(model: str, estimated: set[str]) -> None:
    problem = make(model, "cross-entropy")
    objective = Objective(problem.model, problem.loss, forward=call)
    assert _estimates(objective, problem.data, dense.squares(problem)) == estimated


def test_linear_layers_take_one_pass() -> None:
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(40, 2)
    objective = Objective(model, nn.MSELoss())
    objective.value_gradient_and_squares((x, torch.zeros(40, 1)))  # decides what to trust
    sizes = noted_sizes(model)
    objective.value_gradient_and_squares((x, torch.zeros(40, 1)))
    assert sizes == [40]


class ALittleMore(nn.Module):
    """A weight that is used without its layer, too, and hardly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + 1e-4 * self.layer.weight.sum(1)
        return result


def test_a_weight_that_is_hardly_used_elsewhere_is_not_trusted_to_the_fast_path() -> None:
    torch.manual_seed(0)
    model, x = ALittleMore().double(), torch.randn(5, 3, dtype=torch.float64)
    found = Objective(model, nn.MSELoss()).value_gradient_and_squares(
        (x, torch.zeros(5, 2, dtype=torch.float64))
    )
    torch.testing.assert_close(found.squares, _by_loop(model, x), rtol=1e-10, atol=0.0)


class Steps(nn.Module):
    """A Linear layer over the time steps of [n, steps, 2], with the time in dimension 0 or 1."""

    def __init__(self, time: int) -> None:
        super().__init__()
        self.layer, self.time = nn.Linear(2, 2), time

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.transpose(0, 1) if self.time == 0 else x)
        return (out.transpose(0, 1) if self.time == 0 else out).tanh()


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize("time", [0, 1])
@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_a_linear_layer_over_time_steps(time: int, memory: int) -> None:
    """It takes the fast path unless the time looks like the samples, being as long."""
    torch.manual_seed(0)
    model = nn.Sequential(Steps(time), nn.Flatten(), nn.Linear(6, 1)).double()
    x = torch.randn(3, 3, 2, dtype=torch.float64)
    objective = Objective(model, nn.MSELoss(), activation_memory=memory, micro_batch=3)
    data = x, torch.zeros(3, 1, dtype=torch.float64)
    estimated = _estimates(objective, data, _by_loop(model, x))
    assert estimated == ({"0.layer.weight", "0.layer.bias"} if time == 0 else set())


def _by_loop(model: nn.Module, x: Tensor) -> Tensor:
    """Mean of the squared gradients of ‖model(x)‖²/width, sample by sample."""
    rows = []
    for sample in x:
        loss = model(sample.unsqueeze(0)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        rows.append(torch.cat([gradient.reshape(-1) for gradient in gradients]).square())
    return torch.stack(rows).mean(0)


@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)])
def test_an_activation_in_place_is_seen_even_where_it_changes_nothing(
    activation: nn.Module,
) -> None:
    # On the first batch it is the identity, and the layer's outputs look as they were.
    model = nn.Sequential(nn.Linear(2, 2), activation, nn.Linear(2, 1)).double()
    x = torch.rand(6, 2, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.abs() / 4)
    objective = Objective(model, nn.MSELoss())
    targets = torch.zeros(6, 1, dtype=torch.float64)
    objective.value_gradient_and_squares((x, targets))
    x = 20 * (x - 0.5)
    found = objective.value_gradient_and_squares((x, targets))
    torch.testing.assert_close(found.squares, _by_loop(model, x))


@pytest.mark.usefixtures("two_groups")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_layer_whose_weight_is_computed() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2))
    model.double()(torch.randn(1, 3, dtype=torch.float64))
    model.eval()
    x = torch.randn(4, 3, dtype=torch.float64)
    data = x, torch.zeros(4, 2, dtype=torch.float64)
    estimated = _estimates(Objective(model, nn.MSELoss()), data, _by_loop(model, x))
    assert estimated == {"0.weight_orig"}


def test_a_gradient_of_zero_proves_nothing() -> None:
    # The tied weight's second use is multiplied by zero on the first batch.
    layer = nn.Linear(2, 2, bias=False).double()
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(2, 2, bias=False).double())
    model[2].weight = layer.weight
    objective = Objective(model, lambda z, scale: (z * scale).sum(1))
    x = torch.randn(5, 2, dtype=torch.float64)
    zero, one = torch.zeros(5, 1, dtype=torch.float64), torch.ones(5, 1, dtype=torch.float64)
    assert not objective.value_gradient_and_squares((x, zero)).squares.any()
    found = objective.value_gradient_and_squares((x, one)).squares
    rows = [torch.autograd.grad(model(sample).sum(), layer.weight)[0] for sample in x]
    torch.testing.assert_close(found, torch.stack(rows).square().mean(0).reshape(-1))


class Attention(nn.Module):
    """Attention of one head over [n, steps, 4]. A softmax does not see the bias of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        result: Tensor = (scores.softmax(2) @ self.value(x)).mean(1)
        return result


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_that_is_rounding_alone_decides_nothing(seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    model = Attention().to(dtype)
    objective = Objective(model, nn.MSELoss())
    x, zero = torch.randn(40, 5, 4, dtype=dtype), torch.zeros(40, 4, dtype=dtype)
    found = objective.value_gradient_and_squares((x, zero)).squares
    exact = _by_loop(model, x)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-6 * float(exact.max()))
    assert objective.network.trusted_layers == {"query", "key", "value"}


def test_trust_is_asked_for_again_when_the_model_changed() -> None:
    first, last = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    model = nn.Sequential(first, nn.Tanh(), last)
    x, zero = torch.randn(4, 3, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
    objective = Objective(model, nn.MSELoss())
    objective.value_gradient_and_squares((x, zero))
    model[2] = first  # now it is called twice
    objective.refresh([{"params": list(model.parameters())}])
    found = objective.value_gradient_and_squares((x, zero))
    torch.testing.assert_close(found.squares, _by_loop(model, x))


def test_parameters_without_influence_have_squares_of_zero() -> None:
    parts = {"used": nn.Linear(2, 1), "conv": nn.Conv1d(1, 1, 1), "idle": nn.Linear(2, 1)}
    model = nn.ModuleDict(parts)
    objective = Objective(model, nn.MSELoss(), forward=lambda m, x: m["used"](x))
    found = objective.value_gradient_and_squares((torch.randn(3, 2), torch.randn(3, 1)))
    assert found.squares[:3].all()
    assert not found.squares[3:].any()
    assert not found.gradient[3:].any()


# Memory -------------------------------------------------------------------------------------------


def noted_sizes(model: nn.Module) -> list[int]:
    """How many samples the forward passes from now on are of."""
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    return sizes


def test_trust_is_decided_on_a_few_samples() -> None:
    """It holds what comes back to every call twice."""
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(100, 2)
    objective = Objective(model, nn.MSELoss())
    sizes = noted_sizes(model)
    objective.value_gradient_and_squares((x, torch.zeros(100, 1)))
    assert sizes.count(100) == 1
    assert sizes.count(TRUST_SAMPLES) == 1
    assert max(size for size in sizes if size < 100) == TRUST_SAMPLES
    sizes.clear()
    objective.value_gradient_and_squares((x, torch.zeros(100, 1)))
    assert sizes == [100]


def test_samples_that_do_not_count_at_the_beginning_do_not_put_trust_off() -> None:
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(100, 2)
    targets = torch.ones(100, dtype=torch.long)
    targets[:60] = -100  # ignored
    objective = Objective(model, nn.CrossEntropyLoss())
    objective.value_gradient_and_squares((x, targets))
    sizes = noted_sizes(model)
    objective.value_gradient_and_squares((x, targets))
    assert sizes == [100]


def test_micro_batches_leave_room_for_what_linear_layers_hold() -> None:
    model = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    data = torch.randn(400, 2).double(), torch.zeros(400, 1).double()
    put_out = 8 * (30 + 1)
    objective = Objective(model, nn.MSELoss(), activation_memory=100 * 3 * put_out)
    objective.value_and_gradient(data)  # probes
    sizes = noted_sizes(model)
    objective.value_and_gradient(data)
    plain = max(sizes)
    sizes.clear()
    found = objective.value_gradient_and_squares(data)
    kept = objective.findings.bytes_per_sample
    assert objective.findings.layer_bytes_per_sample == put_out
    largest = int(objective.activation_memory // (kept + 2 * put_out))
    assert max(size for size in sizes if size != TRUST_SAMPLES) == largest < plain
    whole = Objective(model, nn.MSELoss()).value_gradient_and_squares(data)
    torch.testing.assert_close(found.squares, whole.squares)


# Autocast -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "conv"])
def test_squares_under_autocast(model: str) -> None:
    problem = make(model, "mse")
    data = tuple(side.float() for side in problem.data)
    objective = Objective(problem.model.float(), problem.loss)
    with torch.autocast("cpu", torch.bfloat16), objective.network.algebra():
        found = objective.value_gradient_and_squares(data)
    problem.model.double()
    assert found.squares.dtype == torch.float32
    exact = dense.squares(problem)
    assert float((found.squares - exact).norm()) < 0.05 * float(exact.norm())

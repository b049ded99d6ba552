"""The tape against the function itself, run anew: the same bits, in the same place."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tests.tape import Tape

Function = Callable[[], Any]


def tensors_in(nest: Any) -> Iterator[Tensor]:
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, dict):
        yield from tensors_in(list(nest.values()))
    elif isinstance(nest, list | tuple):
        for part in nest:
            yield from tensors_in(part)


def bits(nest: Any) -> list[bytes]:
    found = (t.detach().resolve_conj().resolve_neg().reshape(-1) for t in tensors_in(nest))
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in found]


def change(tensors: list[Tensor]) -> None:
    """Other numbers in place."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.mul_(torch.rand_like(tensor.real) + 0.5)
            elif tensor.dtype is torch.bool:
                tensor.logical_not_()
            else:
                tensor.copy_(tensor.flip(0))


def check(function: Function, inputs: list[Tensor]) -> None:
    """Replays give the function's own bits and leave behind what it leaves behind.

    Args:
        function: reads the inputs, and may write to them.
        inputs: which are changed between replays.
    """
    before = bits(inputs)
    tape = Tape.record(function)
    assert bits(inputs) == before
    places = [tensor.data_ptr() for tensor in tensors_in(tape.result)]
    for seed in range(3):
        change(inputs)
        saved = [tensor.detach().clone() for tensor in inputs]
        torch.manual_seed(seed)
        expected, left_behind = copied(function()), bits(inputs)
        with torch.no_grad():
            for tensor, numbers in zip(inputs, saved, strict=True):
                tensor.copy_(numbers)
        torch.manual_seed(seed)
        tape.replay()
        assert bits(tape.result) == expected
        assert bits(inputs) == left_behind
        assert [tensor.data_ptr() for tensor in tensors_in(tape.result)] == places


def copied(nest: Any) -> list[bytes]:
    found = bits(nest)
    assert found  # else nothing is compared
    return found


# Operations ---------------------------------------------------------------------------------------

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.rand(2, 6, 4, dtype=torch.float64, generator=GENERATOR)
MASK = torch.rand(6, 4, generator=GENERATOR) > 0.5
C = torch.randn(4, 4, dtype=torch.complex64, generator=GENERATOR)
INDICES = torch.tensor([3, 0, 1, 1, 2, 3])


def in_place(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[2:5].t()[1].mul_(y[0, 1])
    z[MASK] = 3.0
    z[0] = 2.0
    return z.add_(y, alpha=2).clamp_(min=0.1).log_()


def out_arguments(x: Tensor, y: Tensor) -> Any:
    product, values, indices = torch.empty(0, dtype=x.dtype), x.new_empty(6), INDICES.new_empty(6)
    torch.mm(x, y.t(), out=product)
    torch.max(x, 1, out=(values, indices))
    torch.add(x, y, out=x)
    return product, values, indices


def filled(x: Tensor, y: Tensor) -> Any:
    made = torch.empty_like(x).copy_(y), x.new_zeros(3), torch.full((2,), 0.5), torch.eye(3)
    return *made, torch.arange(5), torch.tensor([1.0, 2.0]).add_(x[0, 0]), torch.linspace(0, 1, 4)


def foreach(x: Tensor, y: Tensor) -> Any:
    rows = list(x.unbind())
    sums = torch._foreach_add(rows, list(y.unbind()))
    torch._foreach_mul_(sums, 2.0)
    torch._foreach_copy_(rows, sums)
    return sums, torch._foreach_norm(rows)


def views(x: Tensor, y: Tensor) -> Any:
    first, *others = (x * y).split([1, 2, 3])
    return first.expand(3, 4), [part.t() for part in others], x.t()[1:].reshape(-1), y.view(-1)[::2]


def several(x: Tensor, y: Tensor) -> Any:
    return x.max(1), x.sort(0, descending=True), x.topk(2), torch.var_mean(y), torch.aminmax(x)


def indexed(x: Tensor, y: Tensor) -> Any:
    rows = INDICES + 0
    return x[rows], x[:, rows % 4], y.gather(1, rows.unsqueeze(1) % 4), x.index_add(0, rows, y)


def masked(x: Tensor, y: Tensor) -> Any:
    return torch.where(x > y, x, 0.0), x.masked_fill(MASK, 1.0), (x > 0).sum(), x.isfinite().all()


def linear_algebra(x: Tensor, y: Tensor) -> Any:
    factor, info = torch.linalg.cholesky_ex(x.t() @ x + torch.eye(4, dtype=x.dtype))
    solved = torch.linalg.solve_triangular(factor, y.t(), upper=False)
    return factor, info, solved, torch.cholesky_solve(y.t(), factor), torch.linalg.eigh(x.t() @ x)


def mixed_types(x: Tensor, y: Tensor) -> Any:
    low = x.float() * 2 + 1
    return low, low.bfloat16() @ y.bfloat16().t(), low.double() - x, (x > 0) * 3, x.to(torch.int64)


def complex_numbers(x: Tensor, y: Tensor) -> Any:
    spectrum = torch.fft.rfft(x)
    return C.conj() @ C, C.conj(), (C.conj() * 2j).imag, spectrum.abs(), torch.fft.irfft(spectrum)


def random_numbers(x: Tensor, y: Tensor) -> Any:
    noise = torch.rand(3), torch.randn_like(x), torch.randperm(5), torch.bernoulli(x.sigmoid())
    return *noise, F.dropout(x, 0.3), x.clone().uniform_()


def brought_to_host(x: Tensor, y: Tensor) -> Any:
    place = torch.zeros(4, dtype=torch.float64)
    place.copy_(x.sum(0), non_blocking=True)
    return place, y.sum().to("cpu", non_blocking=True, copy=True)


def without_autograd(x: Tensor, y: Tensor) -> Any:
    with torch.inference_mode():
        product = F.linear(x, y)
        flat = product.t().reshape(-1).relu_()
    return product, flat


def under_autocast(x: Tensor, y: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return x.float() @ y.float().t(), F.softmax((x.float() @ y.float().t()), 1)


OPERATIONS = [
    in_place,
    out_arguments,
    filled,
    foreach,
    views,
    several,
    indexed,
    masked,
    linear_algebra,
    mixed_types,
    complex_numbers,
    random_numbers,
    brought_to_host,
    without_autograd,
    under_autocast,
]


@pytest.mark.parametrize("function", OPERATIONS, ids=lambda f: f.__name__)
def test_operations(function: Callable[[Tensor, Tensor], Any]) -> None:
    x, y = X.clone(), Y.clone()
    check(partial(function, x, y), [x, y])


@pytest.mark.parametrize("seed", range(20))
def test_random_compositions(seed: int) -> None:
    """Operations drawn at random, some of them in place on views, with gradients in the end."""
    generator = torch.Generator().manual_seed(seed)

    def draw(end: int) -> int:
        return int(torch.randint(end, (), generator=generator))

    inputs = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    makes: list[Callable[[Tensor, Tensor], Tensor]] = [
        torch.add,
        torch.mul,
        torch.mm,
        lambda a, b: a.t() - b,
        lambda a, b: torch.cat([a[:2], b[2:]]),
        lambda a, b: torch.stack(a.tanh().unbind(), 1),
        lambda a, b: a.clone().add_(b),
        lambda a, b: torch.where(a > b, a, b.sin()),
        lambda a, b: a.sort(1)[0] + b.cumsum(0),
        lambda a, b: a.softmax(0) * b.max(1, keepdim=True)[0],
    ]
    chosen = [(makes[draw(len(makes))], draw(3 + i), draw(3 + i)) for i in range(12)]

    def function() -> Any:
        known: list[Tensor] = list(inputs)
        for make, a, b in chosen:
            known.append(make(known[a], known[b]) / 2)
        loss = sum((tensor.square().mean() for tensor in known), torch.zeros(()))
        detached = known[-1].detach().clone()
        detached[:, 1].mul_(known[-2].detach()[0])
        return known[3:], loss, torch.autograd.grad(loss, inputs), detached

    check(function, inputs)


# Models -------------------------------------------------------------------------------------------


def parameters_and(model: nn.Module, *others: Tensor) -> list[Tensor]:
    return [*(p for p in model.parameters()), *others]


def test_mlp_with_gradients() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
    x, targets = torch.randn(10, 5), torch.randint(3, (10,))
    targets[::3] = -100

    def function() -> Any:
        losses = F.cross_entropy(model(x), targets, ignore_index=-100, reduction="none")
        return losses, torch.autograd.grad(losses.mean(), list(model.parameters()))

    check(function, parameters_and(model, x, targets))


def test_convolutions_with_gradients() -> None:
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.MaxPool2d(2)
    model = nn.Sequential(*layers, nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x, targets = torch.randn(4, 2, 8, 8), torch.randint(3, (4,))

    def function() -> Any:
        loss = F.cross_entropy(model(x), targets)
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    check(function, parameters_and(model, x))


def test_recurrent_net_with_gradients() -> None:
    model, x = nn.LSTM(3, 6), torch.randn(7, 4, 3)
    weight = torch.randn(6, 6, requires_grad=True)

    def function() -> Any:
        with torch.no_grad():  # which has another workspace
            alone, _ = model(x)
        outputs, _ = model(x)
        state = torch.zeros(4, 6)
        for output in outputs.unbind():
            state = torch.tanh(output + state @ weight.t())
        loss = state.square().sum()
        return alone, state, torch.autograd.grad(loss, [weight, *model.parameters()])

    check(function, [*parameters_and(model, x), weight])


def test_batch_norm_updates_its_statistics() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(9, 3)
    counted = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    check(lambda: model(x), parameters_and(model, x, *counted))


def test_gauss_newton_products() -> None:
    """v → JᵀHJv by double backward, with H of a cross-entropy."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 3))
    parameters = list(model.parameters())
    x = torch.randn(10, 5)
    vector = [torch.randn_like(p) for p in parameters]

    def function() -> Any:
        outputs = model(x)
        zeros = torch.zeros_like(outputs, requires_grad=True)
        transposed = torch.autograd.grad(outputs, parameters, zeros, create_graph=True)
        (tangents,) = torch.autograd.grad(transposed, zeros, vector)
        p = outputs.detach().softmax(1)
        curved = p * tangents - p * (p * tangents).sum(1, keepdim=True)
        return torch.autograd.grad(outputs, parameters, curved)

    check(function, parameters_and(model, x, *vector))


def test_per_sample_gradients() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    x, targets = torch.randn(10, 5), torch.randint(3, (10,))
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def loss_of_one(values: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(model, values, (x,))
        return F.cross_entropy(outputs, target)

    def function() -> Any:
        rows = torch.vmap(torch.func.grad(loss_of_one), (None, 0, 0))(parameters, x, targets)
        return [row.square().sum(0) for row in rows.values()]

    check(function, parameters_and(model, x, targets))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode() -> None:
    x, direction = torch.randn(4, 3), torch.randn(4, 3)
    constant = torch.randn(2, 3)

    def function() -> Any:
        return torch.func.jvp(lambda x: torch.cat([x.sin(), constant]).prod(0), (x,), (direction,))

    check(function, [x, direction, constant])


class Cubed(torch.autograd.Function):
    """x³, with a backward pass by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = 3 * gradient * x * x
        return found


def test_custom_function() -> None:
    x = torch.randn(5, requires_grad=True)

    def function() -> Any:
        cubed: Tensor = Cubed.apply(x)  # type: ignore[no-untyped-call]
        return cubed, torch.autograd.grad(cubed.sum(), x)

    check(function, [x])


@pytest.mark.parametrize("foreach", [False, True])
def test_optimiser_step(foreach: bool) -> None:
    """A step changes parameters and state at every replay, and not while it is recorded."""
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    momentum = [torch.zeros_like(p) for p in model.parameters()]

    def function() -> Tensor:
        parameters: list[Tensor] = list(model.parameters())
        loss: Tensor = model(x).square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            if foreach:
                torch._foreach_mul_(momentum, 0.9)
                torch._foreach_add_(momentum, gradients)
                torch._foreach_sub_(parameters, momentum, alpha=0.1)
            else:
                for p, m, gradient in zip(parameters, momentum, gradients, strict=True):
                    p.sub_(m.mul_(0.9).add_(gradient), alpha=0.1)
        return loss

    check(function, parameters_and(model, x, *momentum))


def test_training_by_replays_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    other, x = copy.deepcopy(model), torch.randn(20, 3)

    def step(model: nn.Module) -> Tensor:
        loss: Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
        parameters = list(model.parameters())
        torch._foreach_sub_(
            [p.data for p in parameters], torch.autograd.grad(loss, parameters), alpha=0.1
        )
        return loss.detach()

    tape = Tape.record(partial(step, model))  # which draws no random numbers
    state = torch.get_rng_state()
    losses = []
    for _ in range(5):
        tape.replay()
        losses.append(tape.result.clone())
    torch.set_rng_state(state)
    assert bits(losses) == bits([step(other) for _ in range(5)])
    assert bits(list(model.parameters())) == bits(list(other.parameters()))


# As a CUDA graph ----------------------------------------------------------------------------------


def test_nothing_is_there_before_the_first_replay() -> None:
    x = torch.ones(3)
    tape = Tape.record(lambda: (doubled := x * 2, doubled + 1, x))
    doubled, more, same = tape.result
    assert doubled.isnan().all()
    assert more.isnan().all()
    assert same is x
    assert x.tolist() == [1, 1, 1]
    tape.replay()
    assert more.tolist() == [3, 3, 3]


def test_memory_that_a_recording_does_not_write_to_keeps_what_is_put_there() -> None:
    tape = Tape.record(lambda: (place := torch.empty(3), place * 2))
    place, doubled = tape.result
    place.fill_(4)
    tape.replay()
    assert doubled.tolist() == [8, 8, 8]


def test_generators_are_advanced_by_replays_alone() -> None:
    generator, other = (torch.Generator().manual_seed(3) for _ in range(2))
    tape = Tape.record(lambda: torch.rand(3, generator=generator))
    for _ in range(2):
        tape.replay()
        assert bits(tape.result) == bits(torch.rand(3, generator=other))


def test_numbers_of_python_stay_as_they_were() -> None:
    x, weights = torch.ones(3), [2.0]
    tape = Tape.record(lambda: x * weights[0])
    weights[0] = 5.0
    tape.replay()
    assert tape.result.tolist() == [2, 2, 2]


def test_memory_is_read_where_it_was() -> None:
    """A parameter that was given other memory is still read in its old place."""
    p = nn.Parameter(torch.ones(3))
    old = p.data
    tape = Tape.record(lambda: p * 2)
    p.data = torch.full((3,), 7.0)
    old.fill_(4)
    tape.replay()
    assert tape.result.tolist() == [8, 8, 8]


def test_graphs_of_a_recording_outlive_replays() -> None:
    """As for products, whose linearisation is recorded by itself."""
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)
    v = torch.randn(3, 4)
    linearised = Tape.record(lambda: torch.tanh(torch.tanh(x @ w) @ w))
    linearised.replay()
    outputs = linearised.result
    product = Tape.record(lambda: torch.autograd.grad(outputs, w, v, retain_graph=True)[0])
    for _ in range(2):
        change([w, x, v])
        linearised.replay()
        product.replay()
        (expected,) = torch.autograd.grad(torch.tanh(torch.tanh(x @ w) @ w), w, v)
        assert bits(product.result) == bits(expected)


def test_replays_build_no_graph_and_touch_no_versions() -> None:
    w = torch.randn(3, requires_grad=True)
    place = torch.zeros(3)

    def function() -> Tensor:
        place.copy_(w.detach())
        return w * 2

    tape = Tape.record(function)
    result, version = tape.result, place._version
    graph = result.grad_fn
    with torch.enable_grad():
        tape.replay()
    assert result.grad_fn is graph
    assert (result._version, place._version) == (0, version)


def test_replays_are_not_under_autocast() -> None:
    x = torch.randn(4, 4)
    tape = Tape.record(lambda: x @ x)
    with torch.autocast("cpu", torch.bfloat16):
        tape.replay()
    assert bits(tape.result) == bits(x @ x)


def test_a_replay_within_a_recording_is_a_part_of_it() -> None:
    x = torch.ones(3)
    inner = Tape.record(lambda: x * 3)

    def function() -> Tensor:
        inner.replay()
        first = inner.result.clone()
        x.add_(1)
        inner.replay()
        return first + inner.result

    outer = Tape.record(function)
    x.fill_(2)
    outer.replay()
    assert outer.result.tolist() == [15, 15, 15]
    assert x.tolist() == [3, 3, 3]


# Refused ------------------------------------------------------------------------------------------


class ReadsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float(gradient.numpy().sum())  # past all dispatch


def read_backward(x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    copied: Tensor = ReadsBackward.apply(x)  # type: ignore[no-untyped-call]
    return torch.autograd.grad(copied.sum(), x)


HOST_READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x.sum() > 0),
    "if": lambda x: x if x.sum() > 0 else -x,
    "is_nonzero": lambda x: torch.is_nonzero(x[0]),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "shape": lambda x: x.new_zeros(int(x[0])),
    "checked": lambda x: torch.linalg.cholesky(torch.eye(3) + x.square().diag()),
    "backward": read_backward,
    "vmap": lambda x: torch.vmap(lambda row: row * x.sum().item())(x),
}
SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "mask": lambda x: x[x > 0],
    "assigned to a mask": lambda x: x.clone().index_put_((x > 0,), torch.ones(2)),
    "unique": lambda x: x.unique(),
    "repeated": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0])),
}


def readable() -> Tensor:
    return torch.tensor([1.0, -2.0, 3.0])


@pytest.mark.parametrize("read", HOST_READS.values(), ids=HOST_READS.keys())
def test_numbers_are_not_read_on_the_host(read: Callable[[Tensor], Any]) -> None:
    x = readable()
    read(x)  # nothing else is wrong with it
    with pytest.raises(RuntimeError, match="reads numbers on the host while recording"):
        Tape.record(lambda: read(x))


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES.keys())
def test_shapes_do_not_depend_on_numbers(make: Callable[[Tensor], Any]) -> None:
    x = readable()
    make(x)
    with pytest.raises(RuntimeError, match="makes a shape depend on numbers while recording"):
        Tape.record(lambda: make(x))


def test_shapes_that_are_known_otherwise() -> None:
    x, repeats = readable(), torch.tensor([1, 2, 0])
    check(lambda: x.repeat_interleave(repeats, output_size=3), [x, repeats])


def test_an_error_that_is_caught_ends_the_recording_all_the_same() -> None:
    x = readable()

    def function() -> Tensor:
        with pytest.raises(RuntimeError):
            x.sum().item()
        with pytest.raises(RuntimeError, match="reads numbers on the host"):
            x.add(1)
        return x

    with pytest.raises(RuntimeError, match="reads numbers on the host"):
        Tape.record(function)


def test_results_of_another_dtype_are_no_results() -> None:
    tape = Tape.record(lambda: torch.zeros(3))
    torch.set_default_dtype(torch.float64)
    with pytest.raises(RuntimeError, match=r"gave \[3\] in torch.float64, and was recorded with"):
        tape.replay()


def test_what_failed_left_nothing_behind() -> None:
    x, state = readable(), torch.get_rng_state()

    def function() -> None:
        x.add_(torch.rand(3))
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        Tape.record(function)
    assert torch.equal(x, readable())
    assert torch.equal(torch.get_rng_state(), state)
    assert x.tolist() == [1, -2, 3]  # nothing is recorded any more


def test_no_recording_within_a_recording() -> None:
    with pytest.raises(RuntimeError, match="cannot be recorded while"):
        Tape.record(lambda: Tape.record(lambda: torch.zeros(1)))


def test_memory_that_was_freed_is_not_read() -> None:
    """A GPU would read whatever is there by then."""
    x, freed = torch.ones(3), [torch.ones(3)]
    tape = Tape.record(lambda: x + (freed[0] + 1))
    tape.replay()
    torch.testing.assert_close(tape.result, torch.full((3,), 3.0))
    freed.clear()
    with pytest.raises(RuntimeError, match="was freed after the recording"):
        tape.replay()

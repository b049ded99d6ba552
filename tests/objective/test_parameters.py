"""One flat vector over the parameters that are trained."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from krylov_descent import KSD
from krylov_descent.objective.network import Network
from krylov_descent.objective.parameters import FlatParameters

SHAPES = st.lists(
    st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=5
).filter(lambda shapes: any(torch.Size(shape).numel() for shape in shapes))


def _flat(*tensors: Tensor, weight_decay: float = 0.0) -> FlatParameters:
    return FlatParameters(tensors, [weight_decay] * len(tensors))


def _of_model(model: nn.Module) -> FlatParameters:
    return Network(model, nn.MSELoss(), None, None).parameters


@given(SHAPES, st.sampled_from([torch.float32, torch.float64]))
def test_copy_pieces_flatten_and_assign_are_inverse(
    shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    tensors = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    by_hand = torch.cat([p.detach().reshape(-1) for p in tensors])
    flat = _flat(*tensors)

    theta = flat.copy()
    assert theta.dtype == flat.dtype == dtype
    assert theta.shape == (flat.numel,)
    assert torch.equal(theta, by_hand)
    assert [piece.shape for piece in flat.pieces(theta)] == [p.shape for p in tensors]
    assert torch.equal(flat.flatten(flat.pieces(theta)), theta)

    other = torch.randn(flat.numel, dtype=dtype)
    flat.assign(other)
    assert torch.equal(flat.copy(), other)
    flat.assign(theta)
    assert all(
        torch.equal(p, piece) for p, piece in zip(tensors, flat.pieces(by_hand), strict=True)
    )


def test_parameters_keep_their_own_storage() -> None:
    model = nn.Linear(3, 2)
    before = [(p, p.data_ptr()) for p in model.parameters()]
    flat = _of_model(model)
    flat.assign(torch.zeros(flat.numel))
    after = [(p, p.data_ptr()) for p in model.parameters()]
    assert all(p is q and at == then for (p, at), (q, then) in zip(before, after, strict=True))
    assert all(not p.any() and p.grad is None and p.requires_grad for p in model.parameters())


def test_the_copy_does_not_follow_the_parameters() -> None:
    p = nn.Parameter(torch.ones(3))
    flat = _flat(p)
    theta = flat.copy()
    flat.assign(torch.zeros(3))
    assert torch.equal(theta, torch.ones(3))
    assert not theta.requires_grad


def test_pieces_are_views() -> None:
    flat = _flat(nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3)))
    vector = torch.zeros(7)
    flat.pieces(vector)[1].add_(1)
    assert torch.equal(vector, torch.tensor([0.0, 0, 0, 0, 1, 1, 1]))


def test_a_parameter_with_strides_of_its_own_is_read_and_written_in_logical_order() -> None:
    p = nn.Parameter(torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last))
    flat = _flat(p)
    assert torch.equal(flat.copy(), torch.arange(24.0))
    flat.assign(torch.arange(24.0) * 2)
    assert torch.equal(p.detach(), torch.arange(24.0).reshape(1, 2, 3, 4) * 2)


def test_flatten_counts_none_as_zeros() -> None:
    flat = _flat(nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 1)))
    assert torch.equal(flat.flatten([None, torch.full((2, 1), 3.0)]), torch.tensor([0.0, 0, 3, 3]))


def test_tied_weights_count_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    flat = _of_model(model)
    assert flat.numel == 9
    flat.assign(torch.arange(9.0))
    assert torch.equal(model(torch.eye(3)), _square(torch.arange(9.0)))


def _square(vector: Tensor) -> Tensor:
    weight = vector.reshape(3, 3)
    return (weight @ weight).T


def test_a_module_under_two_names_counts_once() -> None:
    layer = nn.Linear(3, 3)
    assert _of_model(nn.Sequential(layer, nn.Tanh(), layer)).numel == 12


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    before = model.weight.clone()
    flat = _of_model(model)
    assert flat.numel == 2
    flat.assign(torch.ones(2))
    assert torch.equal(model.weight, before)
    assert torch.equal(model.bias.detach(), torch.ones(2))


def test_frozen_parameters_may_have_any_dtype() -> None:
    model = nn.Linear(3, 2)
    model.register_parameter("steps", nn.Parameter(torch.zeros(2, dtype=torch.int64), False))
    model.register_parameter("scale", nn.Parameter(torch.zeros(2, dtype=torch.float16), False))
    assert _of_model(model).numel == 8


def test_same_as_sees_tensors_order_and_decay() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert _flat(p, q).same_as(_flat(p, q))
    assert not _flat(p, q).same_as(_flat(q, p))
    assert not _flat(p, q).same_as(_flat(p))
    assert not _flat(p, q).same_as(_flat(p, q, weight_decay=0.1))


# Weight decay -----------------------------------------------------------------------------------


def _two_groups() -> FlatParameters:
    p = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    q = nn.Parameter(torch.tensor([[3.0]], dtype=torch.float64))
    r = nn.Parameter(torch.tensor([5.0], dtype=torch.float64))
    groups = [{"params": [p], "weight_decay": 0.1}, {"params": [q], "weight_decay": 2.0}]
    return FlatParameters.from_groups([*groups, {"params": [r]}])


def test_weight_decay_of_each_group() -> None:
    flat = _two_groups()
    lam = torch.tensor([0.1, 0.1, 2.0, 0.0], dtype=torch.float64)
    theta = torch.tensor([1.0, -2.0, 3.0, 5.0], dtype=torch.float64)
    assert flat.decay_value() == pytest.approx(float((lam * theta**2).sum() / 2), rel=1e-15)

    gradient = torch.ones(4, dtype=torch.float64)
    flat.add_decay(gradient)
    assert torch.equal(gradient, 1 + lam * theta)

    vector = torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
    product = torch.ones(4, dtype=torch.float64)
    flat.add_decay(product, vector)
    assert torch.equal(product, 1 + lam * vector)

    diagonal = torch.ones(4, dtype=torch.float64)
    flat.add_decay_constant(diagonal)
    assert torch.equal(diagonal, 1 + lam)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_one_weight_decay_for_all(decay: float) -> None:
    p, q = nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.tensor([[4.0]]))
    flat = _flat(p, q, weight_decay=decay)
    for vector in (None, torch.tensor([3.0, 5.0, 7.0])):
        result = torch.ones(3)
        flat.add_decay(result, vector)
        assert torch.equal(result, 1 + decay * (flat.copy() if vector is None else vector))
    assert flat.decay_value() == decay / 2 * (1 + 4 + 16)


def test_weight_decay_is_summed_in_float64() -> None:
    # In float32 the squares of the small ones would vanish beside 1e8.
    p = nn.Parameter(torch.cat([torch.tensor([1e4]), torch.full((1000,), 0.1)]))
    expected = float(p.detach().double().square().sum())
    assert _flat(p, weight_decay=2.0).decay_value() == pytest.approx(expected, rel=1e-12)
    assert float(p.detach().square().sum()) != pytest.approx(expected, rel=1e-9)


# Refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
def test_no_trainable_parameter_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"no trainable parameters.*`params`"):
        _of_model(model)


def test_parameters_without_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no trainable parameters.*`params`"):
        _flat(nn.Parameter(torch.empty(0, 3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2, dtype=dtype)
    with pytest.raises(TypeError, match=f"parameters must be float32.*{re.escape(str(dtype))}"):
        _of_model(model)


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"parameters must be float32.*torch\.int64"):
        _flat(torch.arange(3))


def test_mixed_dtypes_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(
        ValueError, match=r"parameters must share one dtype.*float32.*float64.*to\("
    ):
        _of_model(model)


def test_mixed_devices_are_refused() -> None:
    here, elsewhere = torch.ones(2), torch.ones(2, device="meta")
    with pytest.raises(ValueError, match=r"parameters must share one device.*cpu, meta.*model\.to"):
        _flat(here, elsewhere)


def test_the_same_tensor_twice_is_refused() -> None:
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="`params` names the same tensor more than once"):
        _flat(p, p)


def test_a_tensor_from_elsewhere_is_refused() -> None:
    stranger = nn.Parameter(torch.ones(7))
    with pytest.raises(ValueError, match=r"`params` holds a tensor of shape \(7,\).*`model`"):
        Network(nn.Linear(2, 2), nn.MSELoss(), None, [stranger])


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`model` must be a torch.nn.Module, found function"):
        Network(lambda x: x, nn.MSELoss(), None, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"found generator: give the model itself"):
        KSD(nn.Linear(2, 2).parameters(), nn.MSELoss())  # type: ignore[arg-type]


# Values swapped in for a while --------------------------------------------------------------------


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def _under_two_names() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer)


@pytest.mark.parametrize("make", [_tied, _under_two_names])
def test_swapped_parameters_come_back(make: type[nn.Module]) -> None:
    model = make()
    network = Network(model, nn.MSELoss(), None, None)
    before = list(model.named_parameters(remove_duplicate=False))
    x = torch.randn(2, 3)
    values = [torch.zeros_like(p) for p in network.parameters.tensors]

    swapped = network.call_with(values, network.names, lambda: model(x))
    assert not swapped.any()  # every place the parameter has was swapped
    with pytest.raises(ZeroDivisionError):
        network.call_with(values, network.names, lambda: 1 // 0)

    after = list(model.named_parameters(remove_duplicate=False))
    assert all(
        name == other and p is q for (name, p), (other, q) in zip(before, after, strict=True)
    )
    assert all(isinstance(p, nn.Parameter) for _, p in after)


@pytest.mark.parametrize("size", [5, 7])
def test_a_vector_of_another_length_is_refused_and_nothing_is_written(size: int) -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(ValueError, match=f"a vector of 6 numbers is needed, found {size}"):
        _flat(parameter).assign(torch.zeros(size))
    assert bool((parameter == 1).all())

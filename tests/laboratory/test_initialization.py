import math

import pytest
import torch
from scipy import stats
from torch import nn

from krylov_descent.laboratory.choices import UnknownNameError
from krylov_descent.laboratory.initialization import INITIALIZATIONS, initialize


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(200, 300, dtype=dtype), nn.Sigmoid(), nn.Linear(300, 4, dtype=dtype)
    )


def weights(model: nn.Sequential, i: int) -> torch.Tensor:
    layer = model[i]
    assert isinstance(layer, nn.Linear)
    return layer.weight.detach()


def biases(model: nn.Sequential, i: int) -> torch.Tensor:
    layer = model[i]
    assert isinstance(layer, nn.Linear)
    return layer.bias.detach()


def test_sparse_gives_each_unit_fifteen_standard_normal_weights() -> None:
    model = network()
    initialize(model, "sparse", seed=0)
    for i in (0, 2):
        assert (weights(model, i) != 0).sum(1).eq(15).all()
        assert biases(model, i).eq(0).all()
    values = weights(model, 0)[weights(model, 0) != 0]
    assert stats.kstest(values.numpy(), "norm").pvalue > 0.01
    # Every input is as likely as the others: counts are near 300 · 15 / 200 = 22.5.
    used = (weights(model, 0) != 0).sum(0)
    assert stats.chisquare(used.numpy()).pvalue > 0.01


def test_sparse_with_fewer_than_fifteen_inputs_uses_all() -> None:
    model = nn.Sequential(nn.Linear(5, 8))
    initialize(model, "sparse", seed=0)
    assert weights(model, 0).ne(0).all()


def test_glorot_is_uniform_within_its_bound() -> None:
    model = network()
    initialize(model, "glorot", seed=0)
    bound = math.sqrt(6 / 500)
    uniform = stats.uniform(-bound, 2 * bound)
    assert stats.kstest(weights(model, 0).flatten().numpy(), uniform.cdf).pvalue > 0.01
    assert biases(model, 0).eq(0).all()


def test_torch_is_distributed_as_a_fresh_linear_layer() -> None:
    model = network()
    initialize(model, "torch", seed=0)
    torch.manual_seed(1)
    fresh = network()
    for ours, theirs in (
        (weights(model, 0), weights(fresh, 0)),
        (biases(model, 0), biases(fresh, 0)),
    ):
        assert stats.ks_2samp(ours.flatten().numpy(), theirs.flatten().numpy()).pvalue > 0.01


@pytest.mark.parametrize("name", INITIALIZATIONS)
def test_the_seed_decides_and_the_global_state_does_not(name: str) -> None:
    first, second, other = network(), network(), network()
    initialize(first, name, seed=3)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    initialize(second, name, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    initialize(other, name, seed=4)
    assert torch.equal(weights(first, 2), weights(second, 2))
    assert not torch.equal(weights(first, 2), weights(other, 2))


def test_float32_is_the_rounding_of_float64() -> None:
    single, double = network(), network(torch.float64)
    initialize(single, "sparse", seed=0)
    initialize(double, "sparse", seed=0)
    assert torch.equal(weights(double, 0).float(), weights(single, 0))


@pytest.mark.gpu
def test_the_gpu_starts_where_the_cpu_does() -> None:
    host, device = network(), network().to("cuda")
    initialize(host, "sparse", seed=0)
    initialize(device, "sparse", seed=0)
    assert torch.equal(weights(device, 0).cpu(), weights(host, 0))


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'glorot'"):
        initialize(network(), "glorott", seed=0)

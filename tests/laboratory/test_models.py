import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from krylov_descent.laboratory.models import autoencoder, classifier, linear_layers

Array = npt.NDArray[np.float64]


def logistic(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def by_hand(model: nn.Sequential, x: Array, linear: set[int]) -> Array:
    """The network in NumPy; map i is followed by logistic units unless i is in `linear`."""
    maps = [module for module in model if isinstance(module, nn.Linear)]
    for i, layer in enumerate(maps):
        x = x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
        x = x if i in linear else logistic(x)
    return x


def shapes(model: nn.Sequential) -> list[tuple[int, int]]:
    return [(m.in_features, m.out_features) for m in model if isinstance(m, nn.Linear)]


def test_the_autoencoder_is_mirrored_with_a_linear_code() -> None:
    model = autoencoder((7, 5, 4, 2), dtype=torch.float64)
    assert shapes(model) == [(7, 5), (5, 4), (4, 2), (2, 4), (4, 5), (5, 7)]
    x = np.random.default_rng(0).random((3, 7))
    expected = by_hand(model, x, linear={2, 5})
    np.testing.assert_allclose(model(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-12)


def test_the_code_can_be_logistic() -> None:
    model = autoencoder((6, 3, 2), code="logistic", dtype=torch.float64)
    x = np.random.default_rng(0).random((3, 6))
    expected = by_hand(model, x, linear={3})
    np.testing.assert_allclose(model(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-12)


def test_the_classifier_ends_in_logits() -> None:
    model = classifier((6, 5, 4, 3), dtype=torch.float64)
    x = np.random.default_rng(0).random((2, 6))
    expected = by_hand(model, x, linear={2})
    np.testing.assert_allclose(model(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-12)


def test_the_papers_curves_network_is_six_layers_down_and_six_up() -> None:
    sizes = (784, 400, 200, 100, 50, 25, 5)
    count = sum(p.numel() for p in autoencoder(sizes, device="meta").parameters())
    both_ways = [*sizes, *sizes[-2::-1]]
    assert count == sum((a + 1) * b for a, b in itertools.pairwise(both_ways))
    assert len(autoencoder(sizes, device="meta")) == 12 + 10


def test_linear_layers_tells_which_have_logistic_units() -> None:
    assert [logistic for _, logistic in linear_layers(autoencoder((5, 4, 3, 2)))] == [
        True,
        True,
        False,
        True,
        True,
        False,
    ]


def test_device_and_dtype_are_honoured() -> None:
    for model in (
        autoencoder((3, 2), device="meta", dtype=torch.float64),
        classifier((3, 2), device="meta", dtype=torch.float64),
    ):
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize("sizes", [(), (4,), (4, 0)])
def test_impossible_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="`sizes`"):
        autoencoder(sizes)
    with pytest.raises(ValueError, match="`sizes`"):
        classifier(sizes)


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(ValueError, match="`code`"):
        autoencoder((4, 2), code="tanh")  # type: ignore[arg-type]

import math

import pytest
import torch
from torch import nn

from krylov_descent.laboratory.choices import UnknownNameError
from krylov_descent.laboratory.physics.equations import EQUATIONS
from krylov_descent.laboratory.problems import PROBLEMS, load_problem
from krylov_descent.laboratory.problems.curves import PAPER as CURVES_PAPER
from krylov_descent.laboratory.problems.mnist import PUBLISHED as MNIST_PUBLISHED
from krylov_descent.laboratory.problems.problem import (
    CLASSIFICATION_ERROR,
    SQUARED_ERROR,
    Problem,
    bernoulli_cross_entropy,
    softmax_cross_entropy,
)
from krylov_descent.laboratory.problems.sequences import TASKS
from krylov_descent.laboratory.rbm import PretrainingEpoch


@pytest.fixture(scope="module")
def small() -> Problem:
    return load_problem("curves", size="small")


def bottom_weight(model: nn.Sequential) -> torch.Tensor:
    layer = model[0]
    assert isinstance(layer, nn.Linear)
    return layer.weight.detach()


def test_the_losses_are_their_definitions_summed_over_a_sample() -> None:
    logits, targets = torch.randn(4, 6).double() * 3, torch.rand(4, 6).double()
    p = 1 / (1 + torch.exp(-logits))
    expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).sum(1)
    torch.testing.assert_close(bernoulli_cross_entropy(logits, targets), expected)
    classes = torch.tensor([0, 5, 2, 2])
    probabilities = logits.exp() / logits.exp().sum(1, keepdim=True)
    expected = -probabilities[torch.arange(4), classes].log()
    torch.testing.assert_close(softmax_cross_entropy(logits, classes), expected)


def test_the_metrics_are_the_papers() -> None:
    logits = torch.tensor([[0.0, 100.0], [0.0, 0.0]])
    targets = torch.tensor([[0.5, 0.0], [1.0, 0.0]])
    assert SQUARED_ERROR.per_sample(logits, targets).tolist() == [1.0, 0.5]
    outputs = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 1.0]])
    assert CLASSIFICATION_ERROR.per_sample(outputs, torch.tensor([1, 2])).tolist() == [0.0, 1.0]
    assert SQUARED_ERROR.text(0.1734) == "0.173"
    assert CLASSIFICATION_ERROR.text(0.017) == "1.70%"


def test_the_criterion_is_the_same_objective(small: Problem) -> None:
    images, targets = small.test
    model = small.make_model()
    mean = small.loss(model(images), targets).mean()
    torch.testing.assert_close(small.criterion(model(images), targets) / len(images), mean)


def test_the_mean_image_as_output_bias_costs_the_plateau(small: Problem) -> None:
    """Data, loss and metric together: the plateau of the published HF log is about 124.9 / 16.9."""
    images = small.train[0]
    logits = torch.logit(images.mean(0).clamp(1e-6, 1 - 1e-6)).expand_as(images)
    assert small.loss(logits, images).mean().item() == pytest.approx(124.9, rel=0.05)
    assert small.metric.per_sample(logits, images).mean().item() == pytest.approx(16.9, rel=0.05)


def test_the_same_seed_gives_the_same_start_and_leaves_the_global_state(small: Problem) -> None:
    before = torch.get_rng_state()
    first, second = small.make_model(seed=1), small.make_model(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(bottom_weight(first), bottom_weight(small.make_model(seed=2)))


def test_the_problems_default_initialisation_is_the_sparse_one(small: Problem) -> None:
    assert bottom_weight(small.make_model(seed=0)).ne(0).sum(1).eq(15).all()
    model = small.make_model(seed=0, initialization="glorot", dtype=torch.float64)
    glorot = bottom_weight(model)
    assert glorot.dtype == torch.float64
    assert glorot.abs().max() <= math.sqrt(6 / 884)


def test_the_curves_autoencoder_is_the_papers(small: Problem) -> None:
    problem = load_problem("curves", validation=10)
    linear = [m for m in problem.make_model() if isinstance(m, nn.Linear)]
    assert [m.out_features for m in linear[:6]] == [400, 200, 100, 50, 25, 5]
    assert problem.title == "CURVES (re-created)"
    assert problem.weight_decay == 2e-5
    assert (len(problem.train[0]), len(problem.test[0])) == (20_000, 10_000)
    assert problem.validation is not None
    assert len(problem.validation[0]) == 10
    six = load_problem("curves", size="small", code_size=6).make_model()
    assert 6 in [m.out_features for m in six if isinstance(m, nn.Linear)]
    assert small.paper is None


def test_the_published_numbers_are_those_of_table_2() -> None:
    assert CURVES_PAPER.krylov_dimension == 80
    assert CURVES_PAPER.bfgs_iterations == 30
    ksd = CURVES_PAPER.row("KSD")
    assert (ksd.train, ksd.test, ksd.time) == (0.17, 0.25, 0.2)
    hf = CURVES_PAPER.row("HF")
    assert (hf.train, hf.test, hf.time) == (0.13, 0.19, 1.0)
    rows = {
        name: [(r.train, r.test, r.time) for r in rows[:2]]
        for name, rows in MNIST_PUBLISHED.items()
    }
    assert rows == {
        "mnist-autoencoder": [(1.8, 2.5, 0.2), (1.7, 2.7, 1.0)],
        "mnist-classifier": [(0.0, 0.0170, 0.6), (0.0, 0.0201, 1.0)],
        "mnist-classifier-pretrained": [(0.0, 0.0129, 0.6), (0.0, 0.0140, 1.0)],
    }
    with pytest.raises(UnknownNameError, match="published method"):
        CURVES_PAPER.row("Adam")


def test_pretraining_is_an_initialisation_by_name(small: Problem) -> None:
    epochs: list[PretrainingEpoch] = []
    model = small.make_model(seed=0, initialization="rbm", report=epochs.append)
    assert [(e.layer, e.epoch) for e in epochs] == [
        (i, j) for i in range(1, 5) for j in range(1, 6)
    ]
    assert epochs[4].error < epochs[0].error
    images, targets = small.test
    with torch.no_grad():
        pretrained = small.metric.per_sample(model(images), targets).mean()
        sparse = small.metric.per_sample(small.make_model(seed=0)(images), targets).mean()
    assert pretrained < 0.5 * sparse


def test_moving_keeps_an_autoencoders_images_once(small: Problem) -> None:
    moved = small.to("cpu", torch.float64)
    assert moved.train[0].dtype == torch.float64
    assert moved.train[0] is moved.train[1]
    assert moved.validation is not None
    torch.testing.assert_close(moved.validation[0].float(), small.validation[0])  # type: ignore[index]


def test_moving_keeps_classes_integers(small: Problem) -> None:
    classes = torch.arange(len(small.test[0]))
    labelled = Problem(
        **{**small.__dict__, "test": (small.test[0], classes), "validation": None}
    ).to("cpu", torch.float64)
    assert labelled.test[1].dtype == torch.int64
    assert labelled.validation is None


def test_unknown_names_and_options_suggest_the_nearest(small: Problem) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'curves'"):
        load_problem("curvs")
    with pytest.raises(UnknownNameError, match="did you mean 'mnist-autoencoder'"):
        load_problem("mnist-autoencodr")
    with pytest.raises(UnknownNameError, match="did you mean 'code_size'"):
        load_problem("curves", code_sise=6)
    with pytest.raises(UnknownNameError, match="option of 'mnist-classifier'"):
        load_problem("mnist-classifier", code_size=6)
    with pytest.raises(UnknownNameError, match="did you mean 'sparse'"):
        small.make_model(initialization="sparce")
    with pytest.raises(ValueError, match="`size`"):
        load_problem("curves", size="tiny")  # type: ignore[arg-type]


def test_every_entry_describes_itself() -> None:
    learnt = {"curves", "faces", "speech", "starcraft", *MNIST_PUBLISHED, *TASKS}
    assert set(PROBLEMS) == learnt | {*EQUATIONS}
    for name, entry in PROBLEMS.items():
        assert entry.name == name
        assert entry.title
        assert entry.summary.endswith(".")
        assert name in EQUATIONS or "validation" in [option.name for option in entry.options]

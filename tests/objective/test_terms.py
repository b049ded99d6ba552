"""An objective of several terms, compared with sums written by hand in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import Objective, Term
from krylov_descent.curvature.products import Curvature
from krylov_descent.objective.batches import Batch, InMemory
from krylov_descent.objective.losses import LossContractError
from krylov_descent.objective.subsets import SubsetSizes
from krylov_descent.objective.term_batches import TermBatch, shares
from krylov_descent.objective.term_samples import TermSamples
from krylov_descent.optimizers import term_steps
from tests.terms import laplace, points, small_net, terms_of


def by_hand(net: nn.Module, weights: tuple[float, float, float] = (1.0, 5.0, 0.5)) -> Any:
    """The sum of the three terms, in torch's own words."""
    sensors = points(7, 2)
    return (
        weights[0] * laplace(net, points(20).requires_grad_()).square().mean()
        + weights[1] * net(points(6, 1)).square().mean()
        + weights[2] * nn.functional.mse_loss(net(sensors), sensors.sum(1, keepdim=True))
    )


def prepared(net: nn.Module, terms: dict[str, Term], **options: Any) -> tuple[Objective, InMemory]:
    objective = Objective(net, terms, **options)
    return objective, samples_of_step(objective, 0)


def samples_of_step(objective: Objective, step: int) -> InMemory:
    assert objective.terms is not None
    group = {"seed": 0, "steps": step}
    term_steps.draw(objective, group, {})
    term_steps.evaluate(objective, group)
    assert objective.terms.samples is not None
    return objective.terms.samples


@pytest.mark.parametrize("micro_batch", [None, 7, 1])
def test_value_and_gradient_are_those_of_the_weighted_sum(micro_batch: int | None) -> None:
    net = small_net()
    objective, samples = prepared(net, terms_of(), micro_batch=micro_batch)
    expected = by_hand(net)
    gradient = torch.cat(
        [g.reshape(-1) for g in torch.autograd.grad(expected, list(net.parameters()))]
    )
    found = objective.value_and_gradient(samples)
    assert found.value == pytest.approx(expected.item(), rel=1e-12)
    assert objective.value(samples) == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(found.gradient, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("micro_batch", [None, 7])
def test_a_curvature_product_is_that_of_the_dense_gauss_newton_matrix(
    micro_batch: int | None,
) -> None:
    """Σ_t w_t · 2/N_t · J_tᵀJ_t, with J_t row by row from autograd."""
    net = small_net()
    objective, samples = prepared(net, terms_of(), micro_batch=micro_batch)
    sensors = points(7, 2)
    outputs = [
        (1.0, laplace(net, points(20).requires_grad_())),
        (5.0, net(points(6, 1))[:, 0]),
        (0.5, net(sensors)[:, 0]),
    ]
    size = sum(p.numel() for p in net.parameters())
    matrix = torch.zeros(size, size).double()
    for weight, values in outputs:
        for value in values:
            row = torch.autograd.grad(
                value, list(net.parameters()), retain_graph=True, materialize_grads=True,
                allow_unused=True,
            )  # fmt: skip
            flat = torch.cat([g.reshape(-1) for g in row])
            matrix += 2 * weight / len(values) * torch.outer(flat, flat)
    vector = torch.randn(size, generator=torch.Generator().manual_seed(3)).double()
    product = Curvature("gauss-newton").at(objective, samples)
    torch.testing.assert_close(product(vector), matrix @ vector, rtol=1e-9, atol=1e-11)


def test_pieces_of_a_batch_have_every_sample_once_with_its_factor() -> None:
    _, samples = prepared(small_net(), terms_of())
    whole = samples.batch
    assert isinstance(whole, TermBatch)
    assert whole.size == 33
    factors = {name: float(pair[1][0]) for name, pair in whole.targets.items()}
    assert factors == pytest.approx(
        {"equation": 33 / 20, "boundary": 5 * 33 / 6, "data": 0.5 * 33 / 7}
    )

    def rows(batch: Batch) -> list[tuple[float, ...]]:
        found = []
        for name, pair in batch.targets.items():
            inputs = batch.inputs[name].tolist()
            found += [(*x, f) for x, f in zip(inputs, pair[1].tolist(), strict=True)]
        assert len(found) == batch.size
        return found

    everything = sorted(rows(whole))
    for pieces in (
        list(whole.split(5)),
        list(whole.split(1)),
        [whole.rows(0, 11), whole.rows(11, 33)],
        [whole.every(8, first) for first in range(8)],
        [whole.select(torch.arange(0, 33, 2)), whole.select(torch.arange(1, 33, 2))],
    ):
        assert sorted(row for piece in pieces for row in rows(piece)) == everything
    assert [whole.every(8, first).size for first in range(8)] == [5, 4, 4, 4, 4, 4, 4, 4]
    assert whole.spread(3).size == 9
    assert [whole.rows(0, stop).size for stop in (0, 1, 33)] == [0, 3, 33]


def test_shares_of_a_subset() -> None:
    none = dict.fromkeys(("inside", "edge"))
    sizes = {"inside": 10_000, "edge": 400}
    assert shares(1000, sizes, none) == {"inside": 962, "edge": 400}
    assert shares(100, sizes, none) == {"inside": 97, "edge": 50}
    assert shares(10_400, sizes, none) == sizes
    assert shares(1000, sizes, {"inside": 300, "edge": None}) == {"inside": 300, "edge": 400}
    assert shares(1, sizes, none) == {"inside": 1, "edge": 1}


def test_subsets_are_drawn_term_by_term_and_estimate_the_whole() -> None:
    """Means over B and C have the mean of the whole; B and C are disjoint in each term."""
    net = small_net()
    objective, samples = prepared(net, terms_of())
    assert isinstance(samples, TermSamples)
    sizes = SubsetSizes(12, 9, 8)
    found: list[float] = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        curvature, search = samples.draw(sizes, generator)
        assert {name: len(x) for name, x in curvature.batch.inputs.items()} == {
            "equation": 8, "boundary": 4, "data": 4
        }  # fmt: skip
        for name in samples.batch.inputs:
            drawn = torch.cat([curvature.batch.inputs[name], search.batch.inputs[name]])
            expected = min(len(drawn), len(samples.batch.inputs[name]))
            assert len(drawn.unique(dim=0)) == expected
        found += [objective.value(curvature), objective.value(search)]
    mean, spread = torch.tensor(found).mean(), torch.tensor(found).std()
    assert abs(float(mean) - objective.value(samples)) < 4 * float(spread) / math.sqrt(len(found))


def test_all_samples_are_both_sets_without_a_copy() -> None:
    _, samples = prepared(small_net(), terms_of())
    assert isinstance(samples, TermSamples)
    curvature, search = samples.draw(SubsetSizes("auto", "auto", 8), torch.Generator())
    assert curvature is samples is search


def test_a_term_may_weigh_nothing_and_weights_may_change() -> None:
    net, terms = small_net(), terms_of(data=0.0)
    objective, samples = prepared(net, terms)
    assert objective.value(samples) == pytest.approx(by_hand(net, (1, 5, 0)).item(), rel=1e-12)
    assert samples_of_step(objective, 1) is samples  # nothing has changed
    terms["data"].weight = 2.0
    changed = samples_of_step(objective, 2)
    assert changed is not samples
    assert objective.value(changed) == pytest.approx(by_hand(net, (1, 5, 2)).item(), rel=1e-12)


def test_two_sets_of_points_are_two_arguments() -> None:
    net, left, right = small_net(), points(9), points(9, 4)
    objective, samples = prepared(
        net, {"periodic": Term(lambda n, a, b: n(a) - n(b), (left, right))}
    )
    expected = (net(left) - net(right)).square().mean()
    assert objective.value(samples) == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
def test_residuals_may_use_torch_func() -> None:
    net = small_net()

    def by_func(model: nn.Module, x: Tensor) -> Any:
        trace = torch.func.vmap(
            lambda row: torch.func.hessian(lambda z: model(z)[0])(row).diagonal().sum()
        )
        return trace(x) + 1.0

    objective, samples = prepared(net, {"equation": Term(by_func, points(20))})
    expected = laplace(net, points(20).requires_grad_()).square().mean()
    assert objective.value_and_gradient(samples).value == pytest.approx(expected.item(), rel=1e-10)


def mixing(net: nn.Module, x: Tensor) -> Tensor:
    values: Tensor = net(x)
    return values - values.mean()


def failing(net: nn.Module, x: Tensor) -> Tensor:
    raise ZeroDivisionError("of the user")


@pytest.mark.parametrize(
    ("residual", "words"),
    [
        (mixing, "samples are mixed"),
        (lambda net, x: net(x).mean(), r"shape \(\) for"),
        (lambda net, x: net(x).t(), r"shape \(1, 8\) for 8 points"),
        (lambda net, x: (net(x),), "must be a tensor, found tuple"),
        (lambda net, x: net(x) - x[:, 0], "samples are mixed"),  # [m, 1] - [m]
        (lambda net, x: net(x) + torch.rand(1), "two different losses"),
    ],
)
def test_an_error_in_a_residual_names_its_term(residual: Any, words: str) -> None:
    terms = {"boundary": Term(lambda net, x: net(x), points(5)), "heat": Term(residual, points(20))}
    with pytest.raises(LossContractError, match=f"term 'heat': .*{words}"):
        prepared(small_net(), terms)


def test_a_coefficient_outside_of_the_model_is_refused() -> None:
    outside = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    terms = {"heat": Term(lambda net, x: outside * net(x), points(20))}
    with pytest.raises(LossContractError, match=r"term 'heat': .* not one of the model's"):
        prepared(small_net(), terms)


def test_an_error_of_the_user_gets_a_note() -> None:
    with pytest.raises(ZeroDivisionError, match="of the user") as caught:
        prepared(small_net(), {"heat": Term(failing, points(20))})
    assert caught.value.__notes__ == ["This was raised in the term 'heat'."]


def test_a_residual_without_a_graph_is_refused() -> None:
    terms = {"heat": Term(lambda net, x: net(x).detach(), points(20))}
    objective, samples = prepared(small_net(), terms)
    with pytest.raises(ValueError, match="does not depend on any trainable parameter"):
        objective.value_and_gradient(samples)


@pytest.mark.parametrize("drawn", [None, 3.0, torch.zeros(0, 2)])
def test_a_sampler_that_draws_no_points_is_named(drawn: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"term 'heat', points that were drawn: "):
        prepared(small_net(), {"heat": Term(laplace, lambda: drawn)})


def test_points_of_another_dtype_are_named() -> None:
    with pytest.raises(ValueError, match=r"term 'heat': its points are torch.float32 .*float64"):
        prepared(small_net(), {"heat": Term(laplace, points(20).float())})


# Of which a type checker knows nothing.
AnyTerm: Any = Term
AnyObjective: Any = Objective


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: AnyTerm(points(3), points(3)), TypeError, r"Term\(residual, points\)"),
        (lambda: Term(laplace, points(0)), ValueError, "at least one sample"),
        (lambda: Term(laplace, (points(3), points(4))), ValueError, "disagree on the number"),
        (lambda: Term(laplace, points(3), weight=-1.0), ValueError, "`weight`"),
        (lambda: Term(laplace, points(3), weight=math.nan), ValueError, "`weight`"),
        (lambda: Term(laplace, points(3), resample=0), ValueError, "`resample`"),
        (lambda: AnyTerm(laplace, points(3), resample="often"), ValueError, "`resample`"),
        (lambda: Term(laplace, points(3), subset_size=0), ValueError, "`subset_size`"),
        (lambda: AnyTerm(laplace, [1.0, 2.0]), TypeError, "tensors"),
        (lambda: AnyTerm((points(3), None), 3), TypeError, "`loss` must be callable"),
        (
            lambda: Term(
                (points(3), torch.zeros(3).long()), nn.CrossEntropyLoss(torch.tensor([2.0, 1.0]))
            ),
            LossContractError,
            "plain mean over samples",
        ),
        (lambda: Objective(small_net(), {}), ValueError, "no terms"),
        (lambda: AnyObjective(small_net(), {"a": laplace}), TypeError, "Term for each name"),
        (lambda: AnyObjective(small_net(), {1: terms_of()["data"]}), TypeError, "for each name"),
        (lambda: AnyObjective(small_net(), terms_of()["data"]), TypeError, "dict of terms by name"),
        (lambda: AnyObjective(small_net(), [terms_of()["data"]]), TypeError, "dict of terms by"),
        (
            lambda: Objective(small_net(), terms_of(), forward=lambda m, x: m(x)),
            TypeError,
            "`forward` has no meaning beside",
        ),
    ],
)
def test_bad_arguments(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()

"""A square root of the loss's curvature in the outputs."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from krylov_descent.curvature.preconditioners.output_root import (
    Form,
    form_of,
    root_times_signs,
)
from krylov_descent.objective.losses import Loss, SampleLoss
from krylov_descent.runtime.random_signs import signs_like


def logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").sum(1)


def of_classes(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def hessian_of_one(loss: Loss, z: Tensor, target: Tensor) -> Tensor:
    """The dense matrix of one sample [C, C], by autograd."""

    def total(row: Tensor) -> Tensor:
        return SampleLoss(loss).per_sample(row.unsqueeze(0), target.unsqueeze(0), 1).sum()

    found: Tensor = torch.autograd.functional.hessian(total, z)
    return found


CASES: dict[str, tuple[Loss, Tensor, Form]] = {
    "squared": (nn.MSELoss(), torch.tensor([0.1, 0.2, 0.3]), "diagonal"),
    "logistic, a callable": (logistic, torch.tensor([0.0, 1.0, 0.4]), "diagonal"),
    "logistic": (nn.BCEWithLogitsLoss(), torch.tensor([0.0, 1.0, 0.4]), "diagonal"),
    "classes": (nn.CrossEntropyLoss(), torch.tensor(1), 1),
    "classes, a callable": (of_classes, torch.tensor(1), 1),
    "weighted classes": (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5]).double()),
        torch.tensor(1),
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_second_moments_are_the_loss_hessian(name: str) -> None:
    loss, target, form = CASES[name]
    target = target.double() if target.is_floating_point() else target
    z = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    count = 20_000
    outputs, targets = z.repeat(count, 1), target.expand(count, *target.shape)
    hessian = SampleLoss(loss).output_hessian(outputs, targets, count)
    assert form_of(hessian, [outputs]) == form
    (root,) = root_times_signs(hessian, [outputs], form)
    exact = hessian_of_one(loss, z, target)
    error = (root.t() @ root / count - exact).abs().max()
    # The deviation of a mean of products of signs is 1/√count, 0.7%.
    assert float(error) < 0.03 * float(exact.abs().max())


def classes_last(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none").sum(1)


@pytest.mark.parametrize(("dimension", "loss"), [(1, nn.CrossEntropyLoss()), (2, classes_last)])
def test_classes_and_positions(dimension: int, loss: Loss) -> None:
    """RRᵀ is the exact matrix of each position: with s = eᵢ in place of signs, column by column."""
    torch.manual_seed(0)
    outputs = torch.randn(3, 4, 2).double().movedim(1, dimension)
    targets = torch.randint(4, (3, 2))
    targets[0, 1] = -100  # ignored
    hessian = SampleLoss(loss).output_hessian(outputs, targets, 3)
    assert form_of(hessian, [outputs]) == dimension
    (root,) = root_times_signs(hessian, [outputs], dimension)
    (signs,) = signs_like([outputs])
    p = outputs.softmax(dimension).movedim(dimension, 1)
    for sample in range(3):
        for position in range(2):
            own = p[sample, :, position]
            R = torch.diag(own.sqrt()) - own.outer(own.sqrt())
            torch.testing.assert_close(R @ R.t(), torch.diag(own) - own.outer(own))
            if (sample, position) == (0, 1):
                R = torch.zeros_like(R)
            found, s = (t.movedim(dimension, 1)[sample, :, position] for t in (root, signs))
            torch.testing.assert_close(found, R @ s)


def test_outputs_of_one_shape_have_signs_of_their_own() -> None:
    torch.manual_seed(0)
    outputs = [torch.randn(500, 3).double() for _ in range(2)]

    def both(z: list[Tensor], y: Tensor) -> Tensor:
        return sum(((part - y) ** 2).sum(1) for part in z)  # type: ignore[return-value]

    hessian = SampleLoss(both).output_hessian(outputs, torch.zeros(500, 3).double(), 500)
    assert form_of(hessian, outputs) == "diagonal"
    roots = root_times_signs(hessian, outputs, "diagonal")
    assert float((roots[0] * roots[1]).mean().abs()) < 0.3  # of 2
    assert not torch.equal(*roots)


@pytest.mark.parametrize("sign", [-1, 1])
def test_what_couples_outputs_is_refused(sign: int) -> None:
    outputs = [torch.randn(5, 3).double() for _ in range(2)]

    def coupled(z: list[Tensor], _: Tensor) -> Tensor:
        return ((z[0] + sign * z[1]) ** 2).sum(1)

    hessian = SampleLoss(coupled).output_hessian(outputs, torch.zeros(5), 5)
    with pytest.raises(ValueError, match=r"`preconditioner='kronecker'`.*use 'fisher-diagonal'"):
        form_of(hessian, outputs)


def test_other_couplings_in_one_output_are_refused() -> None:
    outputs = torch.randn(5, 3).double()
    loss = SampleLoss(lambda z, y: z.sum(1) ** 2 + (z**2).sum(1))
    with pytest.raises(ValueError, match="use 'fisher-diagonal'"):
        form_of(loss.output_hessian(outputs, outputs, 5), [outputs])


def test_negative_curvature_counts_as_none() -> None:
    outputs = torch.tensor([[0.5, 1.0], [2.0, 0.1]]).double()
    hessian = SampleLoss(lambda z, y: z.pow(3).sum(1) - 3 * z.pow(2).sum(1)).output_hessian(
        outputs, outputs, 2
    )
    (root,) = root_times_signs(hessian, [outputs], "diagonal")
    torch.testing.assert_close(root.square(), (6 * outputs - 6).clamp(min=0))


def test_signs_are_as_good_as_random() -> None:
    (signs,) = signs_like([torch.empty(10_000, 8, dtype=torch.float64)])
    assert torch.equal(signs.abs(), torch.ones_like(signs))
    correlation = signs.t() @ signs / len(signs) - torch.eye(8)
    assert float(correlation.abs().max()) < 4 / 100  # four deviations
    assert float(signs.mean(0).abs().max()) < 4 / 100
    neighbours = (signs[1:] * signs[:-1]).mean(0)
    assert float(neighbours.abs().max()) < 4 / 100


def test_what_says_nothing_is_not_judged() -> None:
    """NaN, and samples that do not count."""
    outputs = torch.tensor([[torch.nan, 1.0]])
    hessian = SampleLoss(logistic).output_hessian(outputs, torch.zeros(1, 2), 1)
    assert form_of(hessian, [outputs]) is None
    ignored = SampleLoss(nn.CrossEntropyLoss())
    hessian = ignored.output_hessian(torch.randn(4, 3), torch.full((4,), -100), 4)
    assert form_of(hessian, [torch.randn(4, 3)]) is None


def test_two_classes_are_not_taken_for_a_diagonal() -> None:
    for count in (1, 2, 3):
        outputs, targets = torch.randn(count, 2), torch.zeros(count, dtype=torch.int64)
        hessian = SampleLoss(nn.CrossEntropyLoss()).output_hessian(outputs, targets, count)
        assert form_of(hessian, [outputs]) == 1

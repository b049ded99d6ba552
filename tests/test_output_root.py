"""A square root of the loss's curvature in the outputs."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from krylov_descent.losses import Loss, SampleLoss
from krylov_descent.output_root import LARGEST_DENSE, is_diagonal, root_times_signs, signs_like


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


CASES: dict[str, tuple[Loss, Tensor, bool]] = {
    "squared": (nn.MSELoss(), torch.tensor([0.1, 0.2, 0.3]), True),
    "logistic, a callable": (logistic, torch.tensor([0.0, 1.0, 0.4]), True),
    "logistic": (nn.BCEWithLogitsLoss(), torch.tensor([0.0, 1.0, 0.4]), True),
    "classes": (nn.CrossEntropyLoss(), torch.tensor(1), False),
    "classes, a callable": (of_classes, torch.tensor(1), False),
    "weighted classes": (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5]).double()),
        torch.tensor(1),
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_second_moments_are_the_loss_hessian(name: str) -> None:
    loss, target, diagonal = CASES[name]
    target = target.double() if target.is_floating_point() else target
    z = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    count = 20_000
    outputs, targets = z.repeat(count, 1), target.expand(count, *target.shape)
    hessian = SampleLoss(loss).output_hessian(outputs, targets, count)
    assert is_diagonal(hessian, [outputs]) is diagonal
    (root,) = root_times_signs(hessian, [outputs], diagonal=diagonal)
    exact = hessian_of_one(loss, z, target)
    error = (root.t() @ root / count - exact).abs().max()
    # The deviation of a mean of products of signs is 1/√count, 0.7%.
    assert float(error) < 0.03 * float(exact.abs().max())


def test_positions_beside_the_classes_are_apart() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(3, 4, 2).double(), torch.randint(4, (3, 2))
    loss = SampleLoss(nn.CrossEntropyLoss(reduction="sum"))
    hessian = loss.output_hessian(outputs, targets, 3)
    (root,) = root_times_signs(hessian, [outputs], diagonal=False)
    signs = signs_like(outputs)
    p = outputs.softmax(1)
    for sample in range(3):
        for position in range(2):
            own = p[sample, :, position]
            values, vectors = torch.linalg.eigh(torch.diag(own) - own.outer(own))
            expected = vectors @ (values.clamp(min=0).sqrt() * signs[sample, :, position])
            torch.testing.assert_close(root[sample, :, position], expected)


def test_negative_curvature_counts_as_none() -> None:
    outputs = torch.tensor([[0.5, 1.0], [2.0, 0.1]]).double()
    hessian = SampleLoss(lambda z, y: z.pow(3).sum(1) - 3 * z.pow(2).sum(1)).output_hessian(
        outputs, outputs, 2
    )
    (root,) = root_times_signs(hessian, [outputs], diagonal=True)
    torch.testing.assert_close(root.square(), (6 * outputs - 6).clamp(min=0))


def test_signs_are_as_good_as_random() -> None:
    signs = signs_like(torch.empty(10_000, 8, dtype=torch.float64))
    assert torch.equal(signs.abs(), torch.ones_like(signs))
    correlation = signs.t() @ signs / len(signs) - torch.eye(8)
    assert float(correlation.abs().max()) < 4 / 100  # four deviations
    assert float(signs.mean(0).abs().max()) < 4 / 100
    neighbours = (signs[1:] * signs[:-1]).mean(0)
    assert float(neighbours.abs().max()) < 4 / 100


def test_what_is_not_finite_is_not_judged() -> None:
    outputs = torch.tensor([[torch.nan, 1.0]])
    hessian = SampleLoss(logistic).output_hessian(outputs, torch.zeros(1, 2), 1)
    assert is_diagonal(hessian, [outputs]) is None


def test_more_classes_than_can_be_formed_are_refused() -> None:
    outputs = torch.randn(2, LARGEST_DENSE + 1)
    hessian = SampleLoss(nn.CrossEntropyLoss()).output_hessian(outputs, torch.tensor([0, 1]), 2)
    with pytest.raises(ValueError, match=r"`preconditioner='kronecker'`.*use 'fisher-diagonal'"):
        root_times_signs(hessian, [outputs], diagonal=False)

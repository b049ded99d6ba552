"""KSD with Kronecker factors as its preconditioner."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, FisherDiagonal, Identity, KroneckerFactors, Status
from krylov_descent.optimizers.ksd.preconditioner_schedule import (
    CHOICE,
    DIAGONAL,
    FOURTH_ROOT,
    KRONECKER,
    NOT_YET,
    ROOT_OF_DIAGONAL,
    PreconditionerSchedule,
)
from tests import dense
from tests.optimizers.nets import classes, net
from tests.problems import make, physics_informed


def regression() -> tuple[nn.Linear, Tensor, Tensor]:
    """Inputs that are strongly correlated: in coordinates, a diagonal says little."""
    torch.manual_seed(0)
    mixing = torch.linalg.qr(torch.randn(20, 20).double())[0] * torch.logspace(0, -2, 20)
    x = torch.randn(500, 20).double() @ mixing.double() @ torch.randn(20, 20).double()
    y = x @ torch.randn(20, 1).double() + 0.1 * torch.randn(500, 1).double()
    return nn.Linear(20, 1).double(), x, y


@torch.no_grad()
def excess(model: nn.Linear, x: Tensor, y: Tensor) -> float:
    X = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    best = (y - X @ torch.linalg.lstsq(X, y).solution).square().mean()
    return float((y - model(x)).square().mean() - best) / float(best)


def test_a_single_direction_is_that_of_newton() -> None:
    found = {}
    for preconditioner in (KroneckerFactors(1e-20, after=0), "fisher-diagonal"):
        model, x, y = regression()
        KSD(model, nn.MSELoss(), dimension=1, subset_size=1.0, preconditioner=preconditioner).step(
            (x, y)
        )
        found[type(preconditioner).__name__] = excess(model, x, y)
    assert found["KroneckerFactors"] < 1e-6
    assert found["str"] > 1


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian", "fisher"])
@pytest.mark.parametrize("name", ["mlp", "conv", "attention"])
def test_steps_go_down(name: str, curvature: Any, loss: str) -> None:
    problem = make(name, loss)
    before = dense.value(problem)
    optimizer = KSD(
        problem.model,
        problem.loss,
        dimension=4,
        curvature=curvature,
        preconditioner=KroneckerFactors(after=0),
    )
    assert optimizer.step(problem.data).status is Status.MOVED
    assert dense.value(problem) < before


def test_the_first_steps_have_the_diagonal() -> None:
    """To the bit; and those that follow have not."""
    runs = []
    for preconditioner in ("fisher-diagonal", KroneckerFactors(after=2), "kronecker"):
        problem = make("mlp", "mse")
        options: dict[str, Any] = {"dimension": 3, "preconditioner": preconditioner}
        optimizer = KSD(problem.model, problem.loss, **options)
        runs.append([optimizer.step(problem.data).loss_after for _ in range(3)])
    diagonal, two, twenty = runs
    assert diagonal == twenty
    assert diagonal[:2] == two[:2]
    assert diagonal[2] != two[2]


def test_the_name_has_factors_after_10_steps() -> None:
    schedule = PreconditionerSchedule("kronecker", 1e-4)
    for steps, expected, another in (
        (0, FisherDiagonal, True),
        (9, FisherDiagonal, False),
        (10, KroneckerFactors, True),
        (11, KroneckerFactors, False),
        (3, FisherDiagonal, True),  # an earlier state was loaded
    ):
        assert schedule.begin({CHOICE: NOT_YET}, steps) == another
        assert type(schedule.current) is expected
        assert type(schedule.last) is KroneckerFactors
    plain = PreconditionerSchedule("identity", 1e-4)
    assert not plain.begin({CHOICE: NOT_YET}, 0)
    assert type(plain.current) is Identity


@pytest.mark.parametrize(
    ("after", "error", "problem"),
    [(-1, ValueError, "at least 0"), (1.5, TypeError, "whole number")],
)
def test_a_wrong_number_of_first_steps_is_refused(
    after: Any, error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=f"`after` must be.*{problem}"):
        KroneckerFactors(after=after)


def test_resuming_goes_on_bit_for_bit() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(60, 5), torch.randn(60, 3)

    def start() -> tuple[nn.Module, KSD]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        factors = KroneckerFactors(after=3)
        return model, KSD(model, nn.MSELoss(), dimension=3, subset_size=20, preconditioner=factors)

    model, optimizer = start()
    for _ in range(2):
        optimizer.step((x, y))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    twin, resumed = start()
    twin.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for _ in range(3):  # of which the first has the diagonal, and the others factors
        optimizer.step((x, y))
        resumed.step((x, y))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_layer_of_zeros_does_not_decide_which_layers_have_factors() -> None:
    """Behind it no layer has a gradient at the first step; a resumed run would see the others."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 5), torch.randn(60, 3)

    def start() -> tuple[nn.Sequential, KSD]:
        last = nn.Linear(4, 3)
        nn.init.zeros_(last.weight)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), last)
        factors = KroneckerFactors(after=0)
        return model, KSD(model, nn.MSELoss(), dimension=3, preconditioner=factors)

    model, optimizer = start()
    optimizer.step((x, y))
    twin, resumed = start()
    twin.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step((x, y))
    resumed.step((x, y))
    assert isinstance(optimizer.preconditioner, KroneckerFactors)
    factors_of_two_layers = 1 + 2 * 4  # and the diagonal
    assert len(optimizer.preconditioner.tensors) == factors_of_two_layers
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.filterwarnings("ignore:.*mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_factors_work_in_bfloat16(loss: str) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(200, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    targets = torch.randint(3, (200,)) if loss == "cross_entropy" else torch.randn(200, 3)
    chosen = nn.CrossEntropyLoss() if loss == "cross_entropy" else nn.MSELoss()
    optimizer = KSD(model, chosen, dimension=4, preconditioner=KroneckerFactors(after=0))
    with torch.autocast("cpu", torch.bfloat16):
        results = [optimizer.step((x, targets)) for _ in range(3)]
    assert all(result.status is Status.MOVED for result in results)
    assert results[-1].loss_after < results[0].loss_before


def test_a_loss_of_another_form_leaves_the_parameters_alone() -> None:
    model = nn.Linear(3, 4)
    before = copy.deepcopy(model.state_dict())
    optimizer = KSD(
        model, lambda z, y: z.sum(1) ** 2 + z[:, 0] ** 2, dimension=2, preconditioner="kronecker"
    )
    with pytest.raises(ValueError, match="use 'fisher-diagonal'"):
        optimizer.step((torch.randn(10, 3), torch.arange(10)))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_what_is_not_finite_on_b_is_told() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 4), torch.randn(10, 3), torch.arange(10) % 4
    factors = KroneckerFactors(after=0)
    optimizer = KSD(model, nn.CrossEntropyLoss(), dimension=2, preconditioner=factors)
    assert optimizer.step((x, y)).status is Status.MOVED
    result = optimizer.step((x, y), curvature_data=(x * torch.nan, y))
    assert result.status is Status.NOT_FINITE
    assert "a curvature product on B is not finite" in result.reason
    assert optimizer.step((x, y)).status is Status.MOVED


def test_a_loss_in_other_units_makes_the_same_step() -> None:
    """Squares of gradients have the square of the unit, the curvature has the unit."""

    def loss_after(unit: float) -> float:
        def loss(z: Tensor, y: Tensor) -> Tensor:
            return unit * ((z - y) ** 2).mean(1)

        problem = make("conv", "mse")
        factors = KroneckerFactors(1e-3, after=0)
        optimizer = KSD(problem.model, loss, dimension=2, epsilon=1e-2, preconditioner=factors)
        return optimizer.step(problem.data).loss_after / unit

    found = [loss_after(unit) for unit in (0.01, 1.0, 100.0)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[2] == pytest.approx(found[1], rel=1e-6)


def test_a_sharded_basis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`basis='sharded'`.*KroneckerFactors"):
        KSD(nn.Linear(2, 1), nn.MSELoss(), basis="sharded", preconditioner="kronecker")


def test_an_empty_parameter_is_no_matter() -> None:
    model = nn.Linear(3, 2).double()
    model.extra = nn.Parameter(torch.empty(0, dtype=torch.float64))
    data = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    factors = KroneckerFactors(after=0)
    optimizer = KSD(model, nn.MSELoss(), dimension=2, preconditioner=factors)
    assert optimizer.step(data).status is Status.MOVED


def margins(outputs: Tensor, targets: Tensor) -> Tensor:
    """Its second derivative in the outputs is neither diagonal nor that of a softmax."""
    return (outputs.diff(dim=1) ** 2).sum(1) + (outputs**4).sum(1)


class Stepping(nn.Module):
    """A recurrent module, which has no Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(2, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.reshape(-1, 2, 2))[0][:, -1]
        return found


@pytest.mark.parametrize(
    ("model", "loss", "options", "expected"),
    [
        (net(), nn.CrossEntropyLoss(), {}, KRONECKER),
        (net(), margins, {}, DIAGONAL),
        (net(), nn.CrossEntropyLoss(), {"activation_memory": 500, "micro_batch": 60}, DIAGONAL),
        (nn.Sequential(nn.Linear(4, 2000), nn.Linear(2000, 3)), nn.MSELoss(), {}, DIAGONAL),
        (Stepping(), nn.CrossEntropyLoss(), {}, FOURTH_ROOT),
    ],
    ids=["linear layers", "no root", "little memory", "wide layers", "no linear layers"],
)
def test_auto_takes_factors_where_they_can_be_had_and_are_cheap(
    model: nn.Module, loss: Any, options: dict[str, Any], expected: int
) -> None:
    x, labels = classes()
    targets = torch.randn(len(x), 3) if isinstance(loss, nn.MSELoss) else labels
    optimizer = KSD(model, loss, dimension=2, bfgs_iterations=2, **options)
    for _ in range(2):
        optimizer.step((x, targets))
    assert optimizer.param_groups[0][CHOICE] == expected
    kind = KroneckerFactors if expected == KRONECKER else FisherDiagonal
    assert isinstance(optimizer.preconditioner, kind)


def test_auto_takes_the_root_for_a_forward_pass_that_differentiates() -> None:
    problem = physics_informed()
    optimizer = KSD(problem.model, problem.loss, dimension=2)
    optimizer.step(problem.data)
    assert optimizer.param_groups[0][CHOICE] == ROOT_OF_DIAGONAL
    optimizer.step(problem.data)
    found = optimizer.preconditioner
    assert isinstance(found, FisherDiagonal)
    assert found.exponent == 0.5
    assert float(found.diagonal.min()) >= 1e-2
    assert float(found.diagonal.max()) == 1


def test_auto_starts_a_classifier_without_a_preconditioner() -> None:
    def first(model: nn.Module, loss: nn.Module, given: str = "auto") -> type:
        x, labels = classes()
        others = torch.randint(2, model(x).shape).float()
        targets = labels if isinstance(loss, nn.CrossEntropyLoss) else others
        optimizer = KSD(model, loss, preconditioner=given)
        optimizer.step((x, targets))
        return type(optimizer._schedule.current)

    assert first(net(), nn.CrossEntropyLoss()) is Identity
    assert first(net(), nn.CrossEntropyLoss(), "kronecker") is FisherDiagonal
    assert first(net(), nn.MSELoss()) is FisherDiagonal
    # Two classes, and an autoencoder of grey pixels.
    two = nn.Sequential(net(), nn.Tanh(), nn.Linear(3, 1))
    assert first(two, nn.BCEWithLogitsLoss()) is Identity
    assert first(net(), nn.BCEWithLogitsLoss()) is FisherDiagonal
    # One layer has no hidden units that could saturate.
    assert first(nn.Linear(4, 3), nn.CrossEntropyLoss()) is FisherDiagonal
    schedule = PreconditionerSchedule("auto", 1e-4, plain_start=True)
    kinds = [type(schedule.current) for steps in range(12) if schedule.begin({CHOICE: 1}, steps)]
    assert kinds == [Identity, KroneckerFactors]


def test_a_recurrent_net_has_the_fourth_root_from_its_first_step_on() -> None:
    ends = []
    for given in ("auto", FisherDiagonal(exponent=0.25)):
        torch.manual_seed(0)
        model, data = Stepping(), classes()
        optimizer = KSD(model, nn.CrossEntropyLoss(), preconditioner=given)
        for _ in range(2):
            assert optimizer.step(data).status.moved
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1])


def test_auto_has_the_diagonal_for_a_sharded_basis() -> None:
    optimizer = KSD(net(), nn.CrossEntropyLoss(), basis="sharded")
    assert isinstance(optimizer.preconditioner, FisherDiagonal)
    optimizer.step(classes())
    assert optimizer.param_groups[0][CHOICE] == NOT_YET


def test_a_resumed_run_has_the_choice_of_its_state() -> None:
    schedule = PreconditionerSchedule("auto", 1e-4)
    schedule.begin({CHOICE: KRONECKER}, 30)
    assert isinstance(schedule.current, KroneckerFactors)
    schedule.begin({CHOICE: ROOT_OF_DIAGONAL}, 30)
    assert isinstance(schedule.current, FisherDiagonal)
    assert schedule.current.exponent == 0.5
    assert schedule.begin({CHOICE: DIAGONAL}, 30)
    assert schedule.current.exponent == 1
    assert not schedule.begin({CHOICE: DIAGONAL}, 31)

"""Steps on an objective of terms: results, points that change, resuming, and trouble."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, LBFGS, FirstOrder, HessianFree, NonlinearCG, Status, Term
from krylov_descent.objective import contract_probe
from tests.engines import RECORDING, check_alike, device_of, use
from tests.terms import laplace, points, small_net, terms_of

METHODS: dict[str, Any] = {
    "KSD": KSD,
    "HessianFree": HessianFree,
    "NonlinearCG": NonlinearCG,
    "LBFGS": LBFGS,
    "Adam": lambda net, terms: FirstOrder(net, terms, torch.optim.Adam, batch_size=10, lr=1e-2),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_steps_on_terms(method: str) -> None:
    net = small_net()
    optimizer = METHODS[method](net, terms_of())
    results = [optimizer.step() for _ in range(4)]
    assert results[-1].loss < 0.9 * results[0].loss
    if method != "Adam":  # its loss is that of the mini-batches on their way
        for result in results:
            terms = result.terms
            total = terms["equation"] + 5 * terms["boundary"] + 0.5 * terms["data"]
            assert total == pytest.approx(result.loss, rel=1e-9)
    assert "| equation " in str(results[-1])


def test_terms_are_the_same_problem_as_one_loss_of_pooled_residuals() -> None:
    """Two terms of equal size and weight, against one residual at all points."""
    together, apart = small_net(), small_net()
    first, second = points(40).split(20)
    halves = {"a": Term(laplace, first, weight=0.5), "b": Term(laplace, second, weight=0.5)}
    one = KSD(together, {"all": Term(laplace, points(40))}, preconditioner="identity")
    two = KSD(apart, halves, preconditioner="identity")
    for _ in range(3):
        ours, theirs = two.step(), one.step()
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)


def test_what_is_held_out_is_reported_and_takes_no_part() -> None:
    net, other = small_net(), small_net()
    shown = Term(laplace, points(20), held_out=points(50, 9))
    optimizer, plain = KSD(net, {"heat": shown}), KSD(other, {"heat": Term(laplace, points(20))})
    for _ in range(3):
        expected = laplace(net, points(50, 9).requires_grad_()).square().mean().item()
        result, reference = optimizer.step(), plain.step()
        assert result.held_out == {"heat": pytest.approx(expected, rel=1e-9)}
        assert result.loss == pytest.approx(reference.loss, rel=1e-6)
    assert "held out)" in str(result)
    assert not reference.held_out
    data = Term((points(4), points(4, 1).sum(1, keepdim=True)), nn.MSELoss(), held_out=(
        points(3, 2), points(3, 3).sum(1, keepdim=True)
    ))  # fmt: skip
    assert set(KSD(small_net(), {"data": data}).step().held_out) == {"data"}


def test_a_term_of_one_point_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, check = [], contract_probe.probe

    def counted(*args: Any) -> Any:
        checked.append(args)
        return check(*args)

    monkeypatch.setattr(contract_probe, "probe", counted)
    terms = {"heat": Term(laplace, points(20)), "end": Term(lambda net, x: net(x), points(1))}
    optimizer = KSD(small_net(), terms)
    for _ in range(2):
        optimizer.step()
    assert len(checked) == 2


def test_terms_may_have_one_point_each() -> None:
    terms = {name: Term(lambda net, x: net(x), points(1, i)) for i, name in enumerate("abc")}
    assert KSD(small_net(), terms).step().status is Status.MOVED


def test_an_unknown_coefficient_is_found() -> None:
    """-c u'' = sin x on readings of u = sin x / 2, so c = 2."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
            self.coefficient = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

    def equation(model: Any, x: Tensor) -> Any:
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return -model.coefficient * second - x.sin()

    x = torch.linspace(0, 3, 40, dtype=torch.float64).unsqueeze(1)
    model = Model()
    optimizer = KSD(
        model,
        {"equation": Term(equation, x), "data": Term((x, x.sin() / 2), nn.MSELoss(), weight=10.0)},
    )
    for _ in range(12):
        optimizer.step()
    assert float(model.coefficient.detach()) == pytest.approx(2, rel=1e-2)


# Points that change -------------------------------------------------------------------------------


class Sampler:
    """Draws points, and counts how often."""

    def __init__(self, count: int = 30) -> None:
        self.count, self.calls = count, 0

    def __call__(self) -> Tensor:
        self.calls += 1
        return torch.rand(self.count, 2).double()


def test_points_are_drawn_anew_every_so_many_steps() -> None:
    term = Term(laplace, Sampler(), resample=2)
    optimizer, seen = KSD(small_net(), {"heat": term}), []
    for _ in range(6):
        optimizer.step()
        seen.append(term.points)
    assert [a is b for a, b in itertools.pairwise(seen)] == [True, False] * 2 + [True]
    assert not torch.equal(seen[0], seen[2])


def test_points_are_drawn_anew_when_the_error_on_fresh_ones_runs_away() -> None:
    """Three points are soon fitted while the equation holds nowhere else."""
    term = Term(laplace, Sampler(3))
    optimizer, kept = KSD(small_net(), {"heat": term}), []
    for _ in range(8):
        before = term.batch if optimizer.steps else None
        result = optimizer.step()
        assert set(result.held_out) == {"heat"}
        kept.append(before is None or term.batch is before)
    assert kept[0]
    assert not all(kept)
    # Many points say of the equation what fresh ones say.
    many = Term(laplace, Sampler(400))
    optimizer = KSD(small_net(), {"heat": many})
    optimizer.step()
    first = many.points
    optimizer.step()
    assert many.points is first


def test_the_random_numbers_of_the_user_are_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    KSD(small_net_kept(before), {"heat": Term(laplace, Sampler())}).step()
    assert torch.equal(torch.get_rng_state(), before)


def small_net_kept(state: Tensor) -> nn.Module:
    net = small_net()
    torch.set_rng_state(state)
    return net


@pytest.mark.parametrize("resample", ["auto", 2])
def test_a_resumed_run_has_the_same_points(resample: Any) -> None:
    def training() -> KSD:
        return KSD(small_net(), {"heat": Term(laplace, Sampler(4), resample=resample)})

    whole = training()
    for _ in range(3):
        whole.step()
    resumed = training()
    with torch.no_grad():
        for p, value in zip(
            resumed.objective.parameters.tensors, whole.objective.parameters.tensors, strict=True
        ):
            p.copy_(value)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for _ in range(4):
        ours, theirs = resumed.step(), whole.step()
        assert (ours.loss, ours.loss_after, ours.held_out) == (
            theirs.loss, theirs.loss_after, theirs.held_out
        )  # fmt: skip


def test_what_is_kept_when_points_change() -> None:
    """Previous steps, the number of directions and the sizes of the sets."""
    term = Term(laplace, points(5000))
    optimizer = KSD(small_net(), {"heat": term})
    for _ in range(3):
        optimizer.step()
    group = optimizer.param_groups[0]
    group["set_doublings"] = 1
    directions = group["directions"]
    term.points = points(5000, 8)
    before = [step.clone() for step in optimizer._previous_steps()]
    assert len(before) == 3
    result = optimizer.step()
    assert result.rank <= directions + 3
    assert result.curvature_samples == result.objective_samples == 2000
    assert result.status is Status.MOVED
    assert torch.equal(optimizer._previous_steps()[1], before[0])


# Trouble ------------------------------------------------------------------------------------------


def test_nan_at_a_point_refuses_the_step_and_names_the_term() -> None:
    inside = points(20)
    inside[13] = float("nan")
    net = small_net()
    terms = {"heat": Term(laplace, inside), "edge": Term(lambda n, x: n(x), points(4))}
    before = [p.detach().clone() for p in net.parameters()]
    result = KSD(net, terms).step()
    assert result.status is Status.NOT_FINITE
    assert result.reason == (
        "the term 'heat' is not finite for 1 of its 20 samples, the first at index 13"
    )
    assert all(map(torch.equal, before, net.parameters()))


@pytest.mark.parametrize("method", [KSD, HessianFree])
def test_data_and_sets_beside_terms_are_refused(method: Any) -> None:
    optimizer = method(small_net(), terms_of())
    pair = points(3), points(3)
    with pytest.raises(TypeError, match="have their own points and data"):
        optimizer.step(pair)
    with pytest.raises(TypeError, match=r"`curvature_data`.* cannot be given beside terms"):
        optimizer.step(curvature_data=pair)


def test_closures_are_called_once_in_both_of_torchs_forms() -> None:
    optimizer, calls = KSD(small_net(), terms_of()), []
    optimizer.step(lambda: calls.append(1))
    optimizer.step(closure=lambda: calls.append(2))
    assert calls == [1, 2]


def test_checkpoint_tools_can_create_the_state() -> None:
    net = small_net()
    optimizer = KSD(net, terms_of())
    before = [p.detach().clone() for p in net.parameters()]
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    assert optimizer.step(closure=None) is None
    assert all("previous_step" in optimizer.state[p] for p in net.parameters())
    assert all(map(torch.equal, before, net.parameters()))
    optimizer.param_groups[0]["lr"] = 1.0
    assert optimizer.step().status is Status.MOVED  # zero gradients alone mean nothing


def test_a_sampler_that_fails_leaves_everything_as_it_was() -> None:
    sampler = Sampler()

    def draw() -> Tensor:
        if sampler.calls > 3:
            raise RuntimeError("no more points")
        return sampler()

    net = small_net()
    optimizer = KSD(net, {"heat": Term(laplace, draw, resample=1)})
    while sampler.calls < 4:
        optimizer.step()
    before, steps = [p.detach().clone() for p in net.parameters()], optimizer.steps
    with pytest.raises(RuntimeError, match="no more points"):
        optimizer.step()
    assert optimizer.steps == steps
    assert all(map(torch.equal, before, net.parameters()))


@pytest.mark.parametrize("engine", RECORDING)
def test_terms_can_be_recorded(engine: str) -> None:
    """With weights and points that change, which a recording must see."""
    device = device_of(engine)
    found = []
    for name in (engine, "eager"):
        net = small_net().to(device)
        inside, edge = points(60).to(device), points(12, 1).to(device)
        terms = {"wave": Term(second_derivative, inside), "edge": Term(lambda n, x: n(x), edge)}
        optimizer = use(name, KSD(net, terms, dimension=4, bfgs_iterations=4))
        results = [optimizer.step() for _ in range(3)]
        terms["edge"].weight = 7.0
        results += [optimizer.step() for _ in range(2)]
        terms["wave"].points = points(60, 3).to(device)
        results += [optimizer.step() for _ in range(2)]
        found.append(results)
    check_alike(found[0], found[1], rel=1e-3)


def second_derivative(net: nn.Module, x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return second[:, 0] - 1.0

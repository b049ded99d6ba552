"""KSD with parameter groups, frozen parameters, hooks, GradScaler, autocast and buffers."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import (
    KSD,
    FirstOrder,
    HessianFree,
    KroneckerFactors,
    NonlinearCG,
    Status,
)
from krylov_descent.objective.losses import LossContractError
from krylov_descent.optimizers.ksd.ksd_state import PREVIOUS_STEP


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def samples() -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.randn(40, 5), torch.randn(40, 3)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


# Groups -------------------------------------------------------------------------------------------


def test_each_group_has_its_own_weight_decay() -> None:
    (x, y), model = samples(), network()
    groups = [
        {"params": model[0].parameters(), "weight_decay": 0.3},
        {"params": model[2].parameters()},
    ]
    optimizer = KSD(model, nn.MSELoss(), groups, dimension=3, weight_decay=0.1)
    with torch.no_grad():
        penalty = 0.15 * flat(model[0]).square().sum() + 0.05 * flat(model[2]).square().sum()
        expected = float(nn.MSELoss()(model(x), y) + penalty)
    assert optimizer.step((x, y)).loss == pytest.approx(expected, rel=1e-6)
    # It may change between steps, as other options of torch's optimisers may.
    optimizer.param_groups[0]["weight_decay"] = optimizer.param_groups[1]["weight_decay"] = 0.0
    with torch.no_grad():
        expected = float(nn.MSELoss()(model(x), y))
    assert optimizer.step((x, y)).loss == pytest.approx(expected, rel=1e-6)


def test_each_group_has_its_own_learning_rate() -> None:
    scaled, whole = network(), network()
    groups = [{"params": scaled[0].parameters(), "lr": 0.25}, {"params": scaled[2].parameters()}]
    before = flat(whole[0]), flat(whole[2])
    result = KSD(scaled, nn.MSELoss(), groups, dimension=3).step(samples())
    KSD(whole, nn.MSELoss(), dimension=3).step(samples())
    assert result.status is Status.MOVED
    for layer, rate, start in ((0, 0.25, before[0]), (2, 1.0, before[1])):
        step, full = flat(scaled[layer]) - start, flat(whole[layer]) - start
        torch.testing.assert_close(step, rate * full, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("named", [False, True])
def test_params_are_taken_as_torch_takes_them(named: bool) -> None:
    given, default = network(), network()
    params: Any = given.named_parameters() if named else given.parameters()
    optimizer = KSD(given, nn.MSELoss(), params, dimension=3)
    reference = KSD(default, nn.MSELoss(), dimension=3)
    optimizer.step(samples())
    reference.step(samples())
    assert torch.equal(flat(given), flat(default))
    names = [name for name, _ in given.named_parameters()]
    assert reference.param_groups[0]["param_names"] == names
    assert optimizer.param_groups[0].get("param_names") == (names if named else None)


def test_only_the_given_parameters_are_trained() -> None:
    model = network()
    before = flat(model[0]), flat(model[2])
    optimizer = KSD(model, nn.MSELoss(), model[2].parameters(), dimension=3)
    assert optimizer.step(samples()).status is Status.MOVED
    assert torch.equal(flat(model[0]), before[0])
    assert not torch.equal(flat(model[2]), before[1])
    assert set(optimizer.state) == set(model[2].parameters())


def test_a_group_can_be_added() -> None:
    model = network()
    optimizer = KSD(model, nn.MSELoss(), model[2].parameters(), dimension=3)
    optimizer.step(samples())
    bias = next(p for p in model[2].parameters() if p.dim() == 1)
    before, d = flat(model[0]), optimizer.state[bias][PREVIOUS_STEP].clone()
    optimizer.add_param_group({"params": list(model[0].parameters()), "weight_decay": 0.1})
    result = optimizer.step(samples())
    assert result.status is Status.MOVED
    assert result.rank == 4  # the previous step counts, with zeros for the new parameters
    assert not torch.equal(flat(model[0]), before)
    assert not torch.equal(optimizer.state[bias][PREVIOUS_STEP], d)
    assert set(optimizer.state) == set(model.parameters())


def test_a_layer_that_was_replaced_is_told() -> None:
    model = network()
    optimizer = KSD(model, nn.MSELoss(), dimension=3)
    optimizer.step(samples())
    model[0] = copy.deepcopy(model[0])
    before = flat(model)
    with pytest.raises(ValueError, match="where a layer was replaced make a new optimiser"):
        optimizer.step(samples())
    assert torch.equal(flat(model), before)


def test_a_layer_that_lends_its_parameters_to_another_one_is_no_matter() -> None:
    model = network()
    optimizer = KSD(model, nn.MSELoss(), dimension=3)
    optimizer.step(samples())
    other = nn.Linear(5, 4)
    for name, p in list(model[0].named_parameters()):
        setattr(other, name, p)
    model[0] = other
    assert optimizer.step(samples()).status is Status.MOVED


def test_a_layer_in_another_precision_than_the_rest_is_told() -> None:
    model = network()
    optimizer = KSD(model, nn.MSELoss(), dimension=3)
    optimizer.step(samples())
    model[2].double()
    before = flat(model)
    with pytest.raises(ValueError, match="all trainable parameters must share one dtype"):
        optimizer.step(samples())
    assert torch.equal(flat(model), before)
    model[2].float()
    assert optimizer.step(samples()).status is Status.MOVED


def test_a_model_that_is_set_to_training_between_steps_is_seen() -> None:
    model = network().insert(1, nn.Dropout()).eval()
    optimizer = KSD(model, nn.MSELoss(), dimension=3)
    optimizer.step(samples())
    model.train()
    with pytest.raises(LossContractError, match="Dropout"):
        optimizer.step(samples())
    model.eval()
    assert optimizer.step(samples()).status is Status.MOVED


def test_a_group_of_strangers_is_refused() -> None:
    model = network()
    before = flat(model)
    with pytest.raises(ValueError, match=r"`params` holds a tensor .* not a parameter of `model`"):
        KSD(model, nn.MSELoss(), [nn.Parameter(torch.zeros(3))])
    optimizer = KSD(model, nn.MSELoss(), model.parameters())
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="not a parameter of `model`"):
        optimizer.step(samples())
    assert torch.equal(flat(model), before)


def test_parameters_can_be_frozen_and_thawed_between_steps() -> None:
    model = network()
    optimizer = KSD(model, nn.MSELoss(), dimension=3)
    optimizer.step(samples())
    model[0].requires_grad_(False)
    weight = next(model[0].parameters())
    frozen, kept = flat(model[0]), optimizer.state[weight][PREVIOUS_STEP].clone()
    assert optimizer.step(samples()).status is Status.MOVED
    assert torch.equal(flat(model[0]), frozen)
    assert torch.equal(optimizer.state[weight][PREVIOUS_STEP], kept)
    model[0].requires_grad_(True)
    assert optimizer.step(samples()).status is Status.MOVED
    assert not torch.equal(flat(model[0]), frozen)


def test_an_empty_call_makes_no_state_for_frozen_parameters() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = KSD(model, nn.MSELoss())
    optimizer.step()
    assert set(optimizer.state) == set(model[2].parameters())


def test_parameters_keep_their_storage() -> None:
    model = network()
    before = [p.data_ptr() for p in model.parameters()]
    KSD(model, nn.MSELoss(), dimension=3).step(samples())
    assert [p.data_ptr() for p in model.parameters()] == before


# Hooks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_optimizer", [partial(KSD, dimension=3), HessianFree, NonlinearCG])
def test_a_state_that_was_kept_in_another_precision_is_put_right(make_optimizer: Any) -> None:
    model, data = network(), samples()
    optimizer = make_optimizer(model, nn.MSELoss())
    for _ in range(3):
        assert optimizer.step(data).status.moved
        for state in optimizer.state.values():
            for key, kept in state.items():
                if isinstance(kept, Tensor):
                    state[key] = kept.double()


@pytest.mark.parametrize(
    "make_optimizer",
    [
        partial(KSD, dimension=3),
        partial(KSD, dimension=3, preconditioner=KroneckerFactors(after=1)),
        HessianFree,
        NonlinearCG,
        partial(FirstOrder, optimizer=torch.optim.Adam, batch_size=10),
    ],
)
def test_the_model_may_change_its_precision_between_steps(make_optimizer: Any) -> None:
    model, (x, y) = network(), samples()
    optimizer = make_optimizer(model, nn.MSELoss())
    losses = [optimizer.step((x, y)).loss for _ in range(2)]
    model.double()
    losses += [optimizer.step((x.double(), y.double())).loss for _ in range(2)]
    vectors = [
        t
        for p in model.parameters()
        for t in optimizer.state[p].values()
        if isinstance(t, Tensor) and t.shape == p.shape
    ]
    assert {t.dtype for t in vectors} <= {torch.float64}
    state = optimizer.state_dict()
    model.float()
    optimizer.load_state_dict(state)
    losses += [optimizer.step((x, y)).loss for _ in range(2)]
    assert losses[-1] < losses[2] < losses[0]


def test_step_hooks_are_called_around_the_step() -> None:
    model = network()
    optimizer, heard = KSD(model, nn.MSELoss(), dimension=3), list[Any]()
    before = flat(model)

    def pre(found: Any, args: Any, kwargs: Any) -> None:
        heard.append(("pre", found is optimizer, torch.equal(flat(model), before), args, kwargs))

    def post(found: Any, args: Any, kwargs: Any) -> None:
        heard.append(("post", found is optimizer, torch.equal(flat(model), before), args, kwargs))

    handles = optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)
    data = samples()
    optimizer.step(data)
    assert [call[:3] for call in heard] == [("pre", True, True), ("post", True, False)]
    assert all(call[3][-1] is data and call[4] == {} for call in heard)
    for handle in handles:
        handle.remove()
    optimizer.step(data)
    assert len(heard) == 2


def test_a_pre_hook_may_change_the_data() -> None:
    (x, y), model = samples(), network()
    optimizer = KSD(model, nn.MSELoss(), dimension=3)
    optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: ((*args[:-1], (x[:10], y[:10])), kwargs)
    )
    assert optimizer.step((x, y)).samples == 10


def test_state_dict_hooks_are_called() -> None:
    optimizer, heard = KSD(network(), nn.MSELoss(), dimension=3), list[str]()
    optimizer.register_state_dict_pre_hook(lambda optimizer: heard.append("save"))
    optimizer.register_load_state_dict_post_hook(lambda optimizer: heard.append("load"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert heard == ["save", "load"]


# Precision ----------------------------------------------------------------------------------------


def test_grad_scaler_is_refused_and_leaves_no_trace() -> None:
    (x, y), model, twin = samples(), network(), network()
    before, optimizer = flat(model), KSD(model, nn.MSELoss(), dimension=3)
    scaler = torch.amp.GradScaler("cpu")
    for arguments in ((), ((x, y),)):
        scaler.scale(nn.MSELoss()(model(x), y)).backward()
        with pytest.raises(RuntimeError, match=r"does not work with GradScaler.*step\(data\)"):
            scaler.step(optimizer, *arguments)
        optimizer.zero_grad()
        assert torch.equal(flat(model), before)
    optimizer.step((x, y))
    KSD(twin, nn.MSELoss(), dimension=3).step((x, y))
    assert torch.equal(flat(model), flat(twin))


def test_a_disabled_grad_scaler_passes_the_step_on() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    result: Any = scaler.step(KSD(network(), nn.MSELoss(), dimension=3), samples())
    assert result.status is Status.MOVED


def test_autocast_is_for_the_forward_pass_alone() -> None:
    (x, y), model = samples(), network()
    seen: set[torch.dtype] = set()
    model.register_forward_hook(lambda module, args, output: seen.add(output.dtype))

    class Watched:
        """The identity, which looks at the vectors."""

        def update(self, objective: Any, data: Any) -> Any:
            found = objective.value_and_gradient(data)
            assert found.gradient.dtype == torch.float32
            return found

        def solve(self, vector: Tensor) -> Tensor:
            assert vector.dtype == torch.float32
            assert not torch.is_autocast_enabled("cpu")
            return vector.clone()

        multiply = solve

    optimizers = [
        KSD(model, nn.MSELoss(), dimension=3, preconditioner=preconditioner)
        for preconditioner in ("fisher-diagonal", Watched())
    ]
    with torch.no_grad():
        value = float(nn.MSELoss()(model(x), y))
    seen.clear()
    for _ in range(2):
        for optimizer in optimizers:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                result = optimizer.step((x, y))
            assert result.status is Status.MOVED
            assert result.noise > 1e-6  # that of bfloat16
    assert seen == {torch.bfloat16}
    assert all(s[PREVIOUS_STEP].dtype == torch.float32 for s in optimizers[0].state.values())
    with torch.no_grad():
        assert float(nn.MSELoss()(model(x), y)) < 0.8 * value
    # Outside of autocast the same optimiser works in float32 again.
    seen.clear()
    assert optimizers[0].step((x, y)).noise < 1e-6
    assert seen == {torch.float32}


def test_small_gradients_make_no_products_overflow_in_half_precision() -> None:
    """A vector of length 1 in a D of 1e-12 has numbers that float16 does not know."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return 1e-5 * (outputs.float() - targets).square().mean(1)

    optimizer = KSD(network(), loss, dimension=3)
    with torch.autocast("cpu", dtype=torch.float16):
        assert optimizer.step(samples()).status.moved


def test_a_step_under_no_grad_is_a_step() -> None:
    """The loop of torch.optim often runs so."""
    model, twin = network(), network()
    with torch.no_grad():
        KSD(model, nn.MSELoss(), dimension=3).step(samples())
    KSD(twin, nn.MSELoss(), dimension=3).step(samples())
    assert torch.equal(flat(model), flat(twin))


# Buffers ------------------------------------------------------------------------------------------


def test_buffers_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    model(samples()[0])  # statistics of some data
    model.eval()
    before = [buffer.clone() for buffer in model.buffers()]
    optimizer = KSD(model, nn.MSELoss(), dimension=3)
    for _ in range(2):
        assert optimizer.step(samples()).status is Status.MOVED
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))
    assert not model.training


def test_a_buffer_that_the_forward_pass_changes_is_as_before() -> None:
    class Counting(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = network()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return self.inner(x)

    model = Counting()
    # The identity: vmap, which the Fisher diagonal needs, allows no change in place.
    optimizer = KSD(model, nn.MSELoss(), dimension=3, preconditioner="identity")
    assert optimizer.step(samples()).status is Status.MOVED
    assert float(model.calls) == 0.0

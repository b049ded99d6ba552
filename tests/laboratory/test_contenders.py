import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from krylov_descent.laboratory.choices import UnknownNameError
from krylov_descent.laboratory.contenders import CONTENDERS, competitor, contender
from krylov_descent.laboratory.problems.curves import PAPER as CURVES_PAPER
from krylov_descent.laboratory.problems.problem import PaperSettings, Problem
from krylov_descent.laboratory.problems.tuned_rates import TunedRate
from krylov_descent.optimizers.first_order import FirstOrder
from krylov_descent.optimizers.result import Status
from tests.laboratory.tiny import tiny_problem


def make(name: str, problem: Problem | None = None, **options: Any) -> Any:
    problem = problem or tiny_problem()
    return contender(name).make(problem, problem.make_model(), 7, options)


def in_the_paper() -> Problem:
    """With the settings of CURVES."""
    return replace(tiny_problem(), paper=CURVES_PAPER)


@pytest.mark.parametrize("name", [*CONTENDERS, "torch.optim.RMSprop", "torch.optim.Rprop"])
def test_each_trains_the_problem(name: str) -> None:
    optimizer = make(name, in_the_paper() if name == "ksd-paper" else None)
    result = optimizer.step(tiny_problem().train)
    assert result.status is Status.MOVED
    assert optimizer.param_groups[0]["seed"] == 7
    # Rprop has no weight decay to be given.
    assert optimizer.param_groups[0].get("weight_decay", 1e-4) == 1e-4


def test_the_papers_settings_are_the_problems() -> None:
    optimizer = make("ksd-paper", in_the_paper())
    assert optimizer.dimension == 80
    assert optimizer.bfgs_iterations == 30
    assert optimizer.subset_sizes.curvature == "paper"
    assert make("ksd", in_the_paper()).dimension == "auto"
    assert make("ksd-paper", in_the_paper(), dimension=5).dimension == 5


@pytest.mark.parametrize("paper", [None, PaperSettings(krylov_dimension=None, curvature_samples=3)])
def test_settings_that_the_paper_does_not_have_are_refused(paper: PaperSettings | None) -> None:
    with pytest.raises(ValueError, match="'ksd-paper' has no settings for 'Tiny': the paper did"):
        make("ksd-paper", replace(tiny_problem(), paper=paper))


def test_the_effective_settings_are_all_of_them() -> None:
    ksd = contender("ksd-paper").effective(in_the_paper(), {"epsilon": 1e-3})
    assert ksd.keys() == {option.name for option in contender("ksd-paper").options}
    assert (ksd["dimension"], ksd["subset_size"], ksd["epsilon"]) == (80, "paper", 1e-3)
    assert (ksd["weight_decay"], ksd["curvature"]) == (1e-4, "gauss-newton")
    sgd = contender("sgd").effective(tiny_problem(), {})
    assert (sgd["lr"], sgd["momentum"], sgd["batch_size"]) == (0.01, 0.9, 128)
    path = contender("torch.optim.RMSprop").effective(tiny_problem(), {"lr": 0.5})
    assert (path["lr"], path["alpha"]) == (0.5, 0.99)
    for settings in (ksd, sgd, path):
        json.dumps(settings, allow_nan=False)


def test_a_rate_that_was_tuned_is_taken_and_told() -> None:
    tuned = TunedRate(rate=0.25, tried=4, epochs=9, form="tiny-small")
    problem = replace(tiny_problem(), rates={"adam": tuned})
    entry = contender("adam")
    assert make("adam", problem).param_groups[0]["lr"] == 0.25
    assert entry.effective(problem, {})["lr"] == 0.25
    assert entry.rate(problem, {}) == "0.25, best of 4 on tiny-small after 9 epochs"
    assert make("adam", problem, lr=0.5).param_groups[0]["lr"] == 0.5
    assert entry.rate(problem, {"lr": 0.5}) == "0.5, as given"
    assert contender("sgd").rate(problem, {}) == "0.01, not tuned for this problem"
    assert contender("ksd").rate(problem, {}) is None


def test_hessian_free_has_martens_settings() -> None:
    optimizer = make("hf", in_the_paper())
    assert optimizer.chunk_size == 5_000
    assert optimizer.damping == 45.0
    assert make("hf", in_the_paper(), damping=3.0).damping == 3.0


def test_presets_give_way_to_options() -> None:
    group = make("sgd").param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.01, 0.9, True)
    group = make("sgd", lr=0.5).param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.5, 0.9, True)


def test_a_dotted_path_leads_to_a_torch_optimiser() -> None:
    found = contender("torch.optim.RMSprop")
    assert (found.name, found.title) == ("torch.optim.RMSprop", "RMSprop")
    optimizer = make("torch.optim.RMSprop", lr=0.25, batch_size=9)
    assert isinstance(optimizer, FirstOrder)
    assert isinstance(optimizer.inner, torch.optim.RMSprop)
    assert (optimizer.param_groups[0]["lr"], optimizer.batch_size) == (0.25, 9)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kds", "Unknown optimizer 'kds': did you mean 'ksd'"),
        ("foo", "Unknown optimizer 'foo'. Known: "),  # nothing is near
        ("addam", "did you mean 'adam'"),
        ("torch.optim.Adm", "nothing found at 'torch.optim.Adm'"),
        ("no.such.module", "nothing found at 'no.such.module'"),
        ("torch.nn.Linear", "must be a class of torch optimisers"),
        ("torch.optim.LBFGS", "needs the full batch"),
    ],
)
@pytest.mark.parametrize("find", [contender, competitor])
def test_an_unknown_optimiser_is_told(
    name: str, message: str, find: Callable[[str], object]
) -> None:
    with pytest.raises(UnknownNameError, match=message):
        find(name)


@pytest.mark.parametrize(
    ("name", "option", "nearest"),
    [
        ("ksd", "dimensions", "dimension"),
        ("hf", "dampening", "damping"),
        ("lbfgs", "window", None),
        ("adam", "beta", "betas"),
        ("sgd", "momentun", "momentum"),
        ("torch.optim.RMSprop", "alfa", "alpha"),
        ("adam", "optimizer", None),  # that is what the name is for
        ("ksd", "seed", None),
    ],
)
def test_an_unknown_option_is_told(name: str, option: str, nearest: str | None) -> None:
    with pytest.raises(UnknownNameError) as caught:
        make(name, None, **{option: 1})
    message = str(caught.value)
    assert message.startswith(f"Unknown option of {name!r} {option!r}")
    assert nearest is None or f"did you mean {nearest!r}?" in message


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ksd", {"dimension": 0}, "`dimension` must be at least 1"),
        (
            "ksd",
            {"dimension": "many"},
            "`dimension` must be 'auto' or a whole number, found 'many'",
        ),
        ("ksd", {"micro_batch": 1.5}, "`micro_batch` must be a whole number or None, found 1.5"),
        ("adam", {"lr": "fast"}, "`lr` must be a number, found 'fast'"),
        ("adam", {"clip_norm": True}, "`clip_norm` must be a number or None, found True"),
        ("adam", {"betas": 3}, "betas"),
    ],
)
def test_a_wrong_value_is_a_value_error(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, None, **options)


def test_a_whole_number_is_a_number_too() -> None:
    assert make("adam", lr=1, clip_norm=None).param_groups[0]["lr"] == 1


@pytest.mark.parametrize("name", ["torch.bfloat16", "bfloat16"])
def test_a_precision_is_found_by_its_name(name: str) -> None:
    assert make("ksd", basis_dtype=name).layout.storage.dtype is torch.bfloat16


@pytest.mark.parametrize("name", [*CONTENDERS, "torch.optim.RMSprop"])
def test_every_option_has_a_default_and_a_meaning(name: str) -> None:
    options = {option.name: option for option in contender(name).options}
    assert not set(options) & {"model", "loss", "params", "seed", "forward", "optimizer"}
    assert options["weight_decay"].default == "the problem's"
    for option in options.values():
        assert option.default
        assert option.meaning, option.name
        assert "\n" not in option.meaning


def test_options_show_what_this_contender_starts_with() -> None:
    sgd = {option.name: option.default for option in contender("sgd").options}
    assert (sgd["lr"], sgd["momentum"], sgd["batch_size"]) == ("0.01", "0.9", "128")
    ksd = {option.name: option for option in contender("ksd").options}
    assert ksd["curvature"].default == "gauss-newton"
    assert ksd["dimension"].default == "auto"
    assert ksd["dimension"].meaning.startswith("K, the dimension of the Krylov subspace.")

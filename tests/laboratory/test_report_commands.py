"""The lines that make the runs of a report again."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from krylov_descent.laboratory.limits import Limits
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.settings import RunSettings
from tests.laboratory.example_runs import AUTOENCODER, config, write_comparison, write_run
from tests.laboratory.report_page import report

SETTINGS = RunSettings(
    problem="curves",
    problem_options={"size": "small", "train": 30},
    initialization="sparse",
    dtype="float32",
    limits=Limits(seconds=5.0, early_stop=None),
)


def run_of(root: Path, settings: RunSettings, **more: Any) -> RunFolder:
    """A run that was made with these settings, by its configuration."""
    path = root / f"{settings.optimizer}-{settings.seed}"
    problem = AUTOENCODER | {"name": settings.problem, "options": settings.problem_options}
    configuration = config(settings.optimizer, settings.optimizer, problem=problem)
    configuration["optimizer"]["options"] = settings.optimizer_options
    for key in ("initialization", "seed", "device", "dtype"):
        configuration[key] = getattr(settings, key)
    configuration |= {"limits": asdict(settings.limits), "command": settings.command(path)}
    return write_run(path, configuration | more, ending="seconds")


def grid(root: Path, *optimizers: str, seeds: tuple[int, ...] = (0,)) -> list[RunFolder]:
    """Runs of a comparison."""
    return [
        run_of(root, replace(SETTINGS, optimizer=name, seed=seed))
        for seed in seeds
        for name in optimizers
    ]


def test_a_comparison_is_one_command(tmp_path: Path) -> None:
    folders = grid(tmp_path, "ksd", "adam", seeds=(3, 4))
    page = report(folders, tmp_path, target=0.5)
    assert page.commands == [
        "ksd compare curves --small --problem-set train=30 --optimizers ksd,adam "
        "--initialization sparse --seed 3 --seeds 2 --seconds 5.0 --device cpu --target 0.5 "
        "--folder runs/again"
    ]
    assert "--seeds" not in report(folders[:2], tmp_path).commands[0]


@pytest.mark.parametrize(
    "other",
    [
        replace(SETTINGS, optimizer="hf", seed=1),  # not all optimisers with all seeds
        replace(SETTINGS, optimizer="hf", optimizer_options={"window": 3}),
        replace(SETTINGS, optimizer="hf", limits=Limits(seconds=6.0, early_stop=None)),
        replace(SETTINGS, optimizer="hf", limits=Limits(seconds=5.0)),
        replace(SETTINGS, optimizer="hf", dtype="float64"),
        replace(SETTINGS, optimizer="hf", initialization="glorot"),
    ],
)
def test_what_a_comparison_cannot_make_is_a_line_for_each_run(
    tmp_path: Path, other: RunSettings
) -> None:
    folders = [*grid(tmp_path, "ksd", "adam"), run_of(tmp_path, other)]
    lines = report(folders, tmp_path).commands[0].splitlines()
    assert [line.split()[:2] for line in lines] == [*3 * [["ksd", "train"]], ["ksd", "report"]]
    assert len({line.rpartition("--folder ")[2] for line in lines[:3]}) == 3


def test_runs_of_several_ranks_are_not_a_comparison(tmp_path: Path) -> None:
    folders = [run_of(tmp_path, SETTINGS, ranks=2)]
    assert report(folders, tmp_path).commands[0].startswith("ksd train")


def test_new_runs_have_a_folder_of_their_own(tmp_path: Path) -> None:
    configuration = config()
    configuration["command"] = "ksd train curves --set 'betas=(0.8, 0.9)' --folder 'my runs/ksd'"
    folders = [write_run(tmp_path / "one" / "ksd", configuration)]
    assert report(folders, tmp_path).commands == [
        "ksd train curves --set 'betas=(0.8, 0.9)' --folder runs/again/ksd\nksd report runs/again"
    ]
    folders += [write_run(tmp_path / "two" / "ksd", config(dimension=80))]
    lines = report(folders, tmp_path).commands[0].splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == [
        "runs/again/one/ksd",
        "runs/again/two/ksd",
        "runs/again",
    ]


def test_problems_of_one_page_do_not_share_a_folder(tmp_path: Path) -> None:
    other = config(problem={**AUTOENCODER, "options": {"code_size": 6}})
    folders = [*write_comparison(tmp_path)[:1], write_run(tmp_path / "six", other)]
    commands = report(folders, tmp_path).commands
    assert [line.rpartition(" ")[2] for line in "\n".join(commands).splitlines()] == [
        "runs/again/problem-1/ksd-20",
        "runs/again/problem-1",
        "runs/again/problem-2/six",
        "runs/again/problem-2",
    ]

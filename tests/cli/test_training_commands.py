import json
import re
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from krylov_descent.cli import main
from krylov_descent.laboratory import accounting, training
from krylov_descent.laboratory.limits import Limits
from krylov_descent.laboratory.problems import Problem
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.runs import settings_in
from krylov_descent.laboratory.training import Training
from krylov_descent.optimizers.first_order import FirstOrder
from tests.cli.asking import ADAM, TINY, Ksd, fits


def test_a_run_is_told_and_recorded(ksd: Ksd) -> None:
    answer = ksd(*ADAM, "--iterations", "2", "--tensorboard")
    assert answer.code == 0
    folder = Path("runs/curves-small-adam-0")
    table = answer.out[answer.out.index("squared error per image") :]
    assert fits(table)
    assert re.search(r"Adam( +[\d.]+){3} +2 +2\.0 +[\d.]+ +iterations", table)
    caption = " ".join(table.split())
    assert "errors at the lowest validation error; steps to seconds of the whole run" in caption
    assert "It ended because the limit on iterations was reached.\n" in answer.out
    assert answer.out.endswith(f"Run folder: {folder}\n")
    assert len(RunFolder(folder).rows()) == 3
    assert list((folder / "events").iterdir())
    lines = [line for line in answer.out.splitlines() if line.startswith("Adam on CURVES")]
    assert len(lines) == 2  # without a terminal: the first and the last
    assert "iteration 0," in lines[0]
    assert "iteration 2," in lines[1]


@pytest.mark.parametrize(
    ("limit", "ending"),
    [
        (["--passes", "2.5"], "passes"),
        (["--seconds", "0"], "seconds"),
        (["--target", "1e9"], "solved"),
    ],
)
def test_limits(ksd: Ksd, limit: list[str], ending: str) -> None:
    assert ksd(*ADAM, *limit).code == 0
    outcome = RunFolder(Path("runs/curves-small-adam-0")).outcome()
    assert outcome is not None
    assert outcome["ending"] == ending
    assert ending != "passes" or outcome["last"]["iteration"] == 3


def test_a_run_that_diverges_says_nan(ksd: Ksd) -> None:
    words = ["--optimizer", "sgd", "--set", "lr=1e12", "--set", "batch_size=5", "--no-early-stop"]
    answer = ksd("train", "curves", *TINY, *words, "--iterations", "99", "--folder", "run")
    assert answer.code == 0
    assert "It ended because the loss or a step was NaN or infinite" in answer.out
    folder = RunFolder(Path("run"))
    assert (folder.outcome() or {})["ending"] == "diverged"
    assert folder.rows()[-1]["status"] == "not_finite"
    assert "nan" in folder.rows()[-1]["reason"]
    for text in Path("run/metrics.jsonl").read_text().splitlines():
        json.loads(text, parse_constant=pytest.fail)
    assert ksd("report", "run").code == 0


def test_what_the_paper_did_not_train_has_no_settings_of_it(ksd: Ksd) -> None:
    for words in (["train", "curves", "--optimizer"], ["compare", "curves", "--optimizers"]):
        refused = ksd(*words, "ksd-paper", *TINY).sentence
        assert "'ksd-paper' has no settings for 'CURVES (re-created), small, 30 images'" in refused
        assert not Path("runs").exists()


def test_the_rate_and_its_origin_are_told_and_recorded(ksd: Ksd) -> None:
    tuned = "0.004, best of 4 on curves-small after 150 epochs"
    assert f"Adam: rate {tuned}\n" in ksd(*ADAM, "--iterations", "1", "--folder", "run").out
    optimizer = RunFolder(Path("run")).config()["optimizer"]
    assert optimizer["rate"] == tuned
    assert (optimizer["settings"]["lr"], optimizer["settings"]["batch_size"]) == (0.004, 128)
    given = ksd(*ADAM, "--iterations", "1", "--folder", "other", "--set", "lr=0.5")
    assert "Adam: rate 0.5, as given\n" in given.out


def test_going_on_elsewhere_is_told(ksd: Ksd) -> None:
    assert ksd(*ADAM, "--iterations", "1", "--folder", "run").code == 0
    assert ksd("train", "--resume", "run", "--iterations", "2").err == ""
    path = Path("run/config.json")
    config = json.loads(path.read_text())
    config["environment"] |= {"torch": "1.0", "cpu": "abacus"}
    path.write_text(json.dumps(config))
    told = ksd("train", "--resume", "run", "--iterations", "3").err
    assert "The run was begun with torch 1.0 (now " in told
    assert "cpu abacus (now " in told
    (before,) = RunFolder(Path("run")).config()["earlier_environments"]
    assert (before["cpu"], before["until_iteration"]) == ("abacus", 2)


def test_a_busy_machine_is_told(ksd: Ksd, monkeypatch: pytest.MonkeyPatch) -> None:
    step = FirstOrder.step

    def sleepy(self: FirstOrder, *data: Any) -> Any:
        time.sleep(0.5)
        return step(self, *data)

    monkeypatch.setattr(FirstOrder, "step", sleepy)
    monkeypatch.setattr(accounting, "NOTED_SECONDS", 0.4)
    assert "Adam: The machine was busy: the run had " in " ".join(
        ksd(*ADAM, "--iterations", "1", "--folder", "run").out.split()
    )
    folder = RunFolder(Path("run"))
    assert "of a processor" in (folder.outcome() or {})["note"]
    assert folder.rows()[-1]["cpu_seconds"] < folder.rows()[-1]["seconds"] - 0.4


def test_a_note_of_one_of_several_seeds_names_it(ksd: Ksd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "busy_machine", lambda *_: "The machine was busy")
    words = ["compare", "curves", *TINY, "--optimizers", "adam", "--seconds", "0.05"]
    lines = ksd(*words, "--seeds", "2", "--folder", "runs").out.splitlines()
    assert [line for line in lines if "busy" in line] == [
        f"Adam {seed}: The machine was busy" for seed in (0, 1)
    ]


def test_the_recorded_command_makes_the_same_run(ksd: Ksd) -> None:
    words = ["--set", "betas=(0.8, 0.9)", "--initialization", "glorot", "--dtype", "float64"]
    assert ksd(*ADAM, *words, "--iterations", "2", "--no-early-stop", "--seed", "3").code == 0
    folder = RunFolder(Path("runs/curves-small-adam-3"))
    config = folder.config()
    copy = Path("copy")
    command = shlex.split(config["command"].replace(str(folder.path), str(copy)))
    assert command[0] == "ksd"
    assert ksd(*command[1:]).code == 0
    assert settings_in(RunFolder(copy)) == settings_in(folder)
    assert [row["train"] for row in RunFolder(copy).rows()] == [
        row["train"] for row in folder.rows()
    ]


def test_a_second_run_in_the_same_folder_is_refused(ksd: Ksd) -> None:
    assert ksd(*ADAM, "--iterations", "1").code == 0
    assert "holds a run already: go on with it by --resume" in ksd(*ADAM).sentence


def test_resuming_takes_new_limits_and_refuses_new_settings(ksd: Ksd) -> None:
    folder = RunFolder(Path("run"))
    assert ksd(*ADAM, "--iterations", "2", "--no-early-stop", "--folder", "run").code == 0
    for words, sentence in (
        (["--seed", "1"], "started with seed = 0, not 1"),
        (["--optimizer", "ksd"], 'optimizer = "adam", not "ksd"'),
        (["--set", "lr=0.1"], 'optimizer_options = {}, not {"lr": 0.1}'),
        (["--problem-set", "train=31"], "problem_options = "),
        (["--dtype", "float64"], 'dtype = "float32", not "float64"'),
        (["mnist-classifier"], 'problem = "curves", not "mnist-classifier"'),
    ):
        assert sentence in ksd("train", "--resume", "run", *words).sentence, words
    assert len(folder.rows()) == 3
    # The same settings in so many words are no others.
    same = ["curves", "--optimizer", "adam", "--seed", "0", *TINY]
    assert ksd("train", "--resume", "run", *same, "--passes", "4").code == 0
    assert len(folder.rows()) == 5
    limits = settings_in(folder).limits
    assert limits == Limits(passes=4.0, early_stop=None)
    assert folder.config()["command"].endswith("--passes 4.0 --no-early-stop --folder run")


def test_resuming_keeps_the_target_or_takes_a_new_one(ksd: Ksd) -> None:
    folder = RunFolder(Path("run"))
    assert ksd(*ADAM, "--iterations", "1", "--target", "1e-6", "--folder", "run").code == 0
    assert "--target 1e-06" in folder.config()["command"]
    assert ksd("train", "--resume", "run", "--iterations", "2").code == 0
    assert settings_in(folder).limits == Limits(iterations=2, target=1e-6)
    assert ksd("train", "--resume", "run", "--target", "1e9").code == 0
    assert settings_in(folder).limits == Limits(iterations=2, target=1e9)
    assert len(folder.rows()) == 3


def test_a_damaged_run_folder_is_one_sentence(ksd: Ksd) -> None:
    assert ksd(*ADAM, "--iterations", "1", "--folder", "run").code == 0
    checkpoint = Path("run/checkpoint.pt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:5_000])
    assert "run/checkpoint.pt is damaged" in ksd("train", "--resume", "run").sentence
    checkpoint.unlink()
    assert "there is no checkpoint at run/checkpoint.pt" in ksd("train", "--resume", "run").sentence
    metrics = Path("run/metrics.jsonl")
    metrics.write_bytes(b"\xff" + metrics.read_bytes())
    assert "run/metrics.jsonl is damaged: it is not" in ksd("train", "--resume", "run").sentence
    Path("run/config.json").write_text("[]")
    for words in (["train", "--resume", "run"], ["words", "run"]):
        assert "run/config.json is damaged: it is not a JSON object" in ksd(*words).sentence
    assert "is not a JSON object" in ksd("report", "run").err
    Path("run/config.json").write_text("{")
    assert "run/config.json is damaged" in ksd("train", "--resume", "run").sentence
    Path("run/config.json").write_text("{}")
    for words in (["train", "--resume", "run"], ["words", "run"]):
        assert "run/config.json is damaged or of another version: 'problem'" in ksd(*words).sentence


def test_a_run_that_fails_in_its_first_step_leaves_its_folder_free(
    ksd: Ksd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("`micro_batch` must be a whole number")

    with monkeypatch.context() as broken:
        broken.setattr(FirstOrder, "step", fail)
        assert "`micro_batch` must be" in ksd(*ADAM, "--folder", "run").sentence
        assert not Path("run").exists()
        # What else lies there stays.
        Path("run").mkdir()
        Path("run/notes.txt").write_text("mine")
        assert "`micro_batch` must be" in ksd(*ADAM, "--folder", "run").sentence
        assert [path.name for path in Path("run").iterdir()] == ["notes.txt"]
    # A wrong value that is found before the run begins touches nothing.
    Path("run/checkpoint.pt").write_text("of a run whose configuration was lost")
    assert "did you mean" in ksd(*ADAM, "--folder", "run", "--set", "beta=1").sentence
    assert Path("run/checkpoint.pt").exists()
    assert ksd(*ADAM, "--folder", "run", "--iterations", "1").code == 0


def test_a_run_that_fails_later_or_goes_on_stays(ksd: Ksd, monkeypatch: pytest.MonkeyPatch) -> None:
    step = FirstOrder.step

    def fail_second(self: FirstOrder, *data: Any) -> Any:
        if self.steps > 0:
            raise ValueError("broken")
        return step(self, *data)

    with monkeypatch.context() as broken:
        broken.setattr(FirstOrder, "step", fail_second)
        assert ksd(*ADAM, "--folder", "run").sentence == "broken"
        assert len(RunFolder(Path("run")).rows()) == 2
        assert "holds a run already" in ksd(*ADAM, "--folder", "run").sentence
    assert ksd(*ADAM, "--folder", "begun", "--seconds", "0").code == 0
    with monkeypatch.context() as broken:
        broken.setattr(FirstOrder, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(["train", "--resume", "begun", "--iterations", "1"])
    assert ksd("train", "--resume", "begun", "--iterations", "1").code == 0


def test_truth_values_are_understood_where_an_option_takes_one(ksd: Ksd) -> None:
    folder = RunFolder(Path("run"))
    words = ["--set", "cuda_graphs=No", "--set", "amsgrad=on", "--problem-set", "original=off"]
    assert ksd(*ADAM, *words, "--iterations", "1", "--folder", "run").code == 0
    settings = settings_in(folder)
    assert settings.optimizer_options == {"cuda_graphs": False, "amsgrad": True}
    assert settings.problem_options["original"] is False
    # Also on the way back, where the optimiser is the folder's.
    words = ["--set", "cuda_graphs=false", "--set", "amsgrad=YES", "--iterations", "2"]
    assert ksd("train", "--resume", "run", *words).code == 0


def test_the_precision_of_the_basis_is_set_by_name(ksd: Ksd) -> None:
    words = ["train", "curves", *TINY, "--set", "dimension=2", "--iterations", "1"]
    for number, name in enumerate(("torch.bfloat16", "bfloat16")):
        run = ["--folder", f"run{number}", "--set", f"basis_dtype={name}"]
        assert ksd(*words, *run).code == 0
        assert settings_in(RunFolder(Path(f"run{number}"))).optimizer_options["basis_dtype"] == name
        assert ksd("train", "--resume", f"run{number}", "--iterations", "2").code == 0
    assert "`basis_dtype`" in ksd(*words, "--set", "basis_dtype=bf16").sentence


def test_ctrl_c_before_the_first_checkpoint_says_what_is_there(
    ksd: Ksd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as early:
        early.setattr(Problem, "make_model", interrupt)
        answer = ksd(*ADAM, "--folder", "run")
    assert answer.code == 130
    assert answer.out.endswith(
        "Ended before anything was written. To begin again: the same command\n"
    )
    assert not Path("run").exists()
    with monkeypatch.context() as later:
        later.setattr(Training, "run", interrupt)
        answer = ksd(*ADAM, "--folder", "run", "--iterations", "1")
    assert answer.code == 130
    assert answer.out.endswith(
        "Ended before the first checkpoint: it will begin from the start.\n"
        "To go on: ksd train --resume run\n"
    )
    assert ksd("train", "--resume", "run").code == 0


def test_a_file_where_the_folder_should_be_is_one_sentence(ksd: Ksd) -> None:
    Path("runs").write_text("")
    assert "the run folder runs/curves-small-adam-0 cannot be" in ksd(*ADAM).sentence


# Comparing and reporting ----------------------------------------------------------------------


def test_a_comparison_is_made_once_and_filled_up(ksd: Ksd, tmp_path: Path) -> None:
    words = ["compare", "curves", *TINY, "--seconds", "0.05", "--optimizers"]
    first = ksd(*words, "adam,sgd,adam")
    assert first.code == 0
    base = Path("runs/compare-curves-small-0")
    assert first.out.endswith(f"Report: {base}/report.html\n")
    before = {name: (base / name / "metrics.jsonl").read_text() for name in ("adam", "sgd")}
    starts = [json.loads(text.splitlines()[0])["train"] for text in before.values()]
    assert starts[0] == starts[1]
    shutil.rmtree(base / "sgd")
    second = ksd(*words, "adam,sgd,torch.optim.RMSprop")
    assert second.code == 0
    assert "Adam: there already" in second.out
    assert "SGD (Nesterov): there already" not in second.out
    assert (base / "adam" / "metrics.jsonl").read_text() == before["adam"]
    for title in ("Adam", "SGD (Nesterov)", "RMSprop"):
        assert re.search(rf"^ {re.escape(title)} .* seconds", second.out, re.MULTILINE)
    assert len(list(base.glob("*/outcome.json"))) == 3
    # More time is more to do; another start is another comparison.
    assert "there already" not in ksd(*words, "adam", "--seconds", "0.1").out
    outcome = RunFolder(base / "adam").outcome()
    assert outcome is not None
    assert outcome["last"]["seconds"] >= 0.1
    # Less time than a run was given is told, and the run stays as it is.
    less = ksd(*words, "adam")
    assert less.code == 0
    assert "Adam: there already, made with 0.1 s\n" in less.out
    assert settings_in(RunFolder(base / "adam")).limits.seconds == 0.1
    refused = ksd(*words, "adam", "--initialization", "glorot", "--folder", str(base))
    assert 'was started with initialization = "sparse", not "glorot"' in refused.sentence


def test_a_comparison_that_one_cannot_take_part_in_is_refused_before_the_first_run(
    ksd: Ksd,
) -> None:
    words = ["compare", "curves", *TINY, "--seconds", "0", "--optimizers"]
    refused = ksd(*words, "adam,logistic-regression").sentence
    assert "'logistic-regression' is for classification with one class per sample" in refused
    assert not Path("runs").exists()
    base = Path("runs/compare-curves-small-0")
    assert ksd(*words, "sgd", "--seed", "1", "--folder", str(base)).code == 0
    assert "sgd was started with seed = 1, not 0" in ksd(*words, "adam,sgd").sentence
    assert not (base / "adam").exists()


def test_a_comparison_goes_on_with_what_was_begun(ksd: Ksd) -> None:
    base = Path("runs/compare-curves-small-0")
    words = ["compare", "curves", *TINY, "--optimizers", "adam", "--seconds", "0.1"]
    assert ksd(*words).code == 0
    folder = RunFolder(base / "adam")
    before = [row["train"] for row in folder.rows()]
    (folder.path / "outcome.json").unlink()
    assert ksd(*words).code == 0
    assert [row["train"] for row in folder.rows()][: len(before)] == before
    assert folder.finished


def test_a_comparison_of_several_seeds_adds_to_one_of_a_single_seed(ksd: Ksd) -> None:
    words = ["compare", "curves", *TINY, "--seconds", "0.05", "--optimizers", "adam,sgd"]
    base = Path("runs/compare-curves-small-0")
    assert ksd(*words).code == 0
    several = ksd(*words, "--seeds", "2", "--target", "200")
    assert several.code == 0
    assert "Adam, seed 0: there already" in several.out
    assert "Adam, seed 1: there already" not in several.out
    found = {path.parent.name: json.loads(path.read_text()) for path in base.glob("*/config.json")}
    seeds = {name: config["seed"] for name, config in found.items()}
    assert seeds == {"adam": 0, "sgd": 0, "adam-seed-1": 1, "sgd-seed-1": 1}
    for row in ("Adam 0", "Adam 1", "SGD (Nesterov) 1"):
        assert f" {row} " in several.out
    page = (base / "report.html").read_text()
    assert "target 200" in page
    # The page's own command makes the same runs.
    line = page.partition("<code>")[2].partition("</code>")[0]
    again = shlex.split(re.sub("<[^>]*>", "", line))
    assert again[0] == "ksd"
    assert ksd(*again[1:]).code == 0
    folder = Path("runs/again")
    assert {path.parent.name for path in folder.glob("*/config.json")} == set(found)
    for name, config in found.items():
        made = json.loads((folder / name / "config.json").read_text())
        for key in ("problem", "optimizer", "initialization", "seed", "dtype", "limits"):
            assert made[key] == config[key]
    answer = ksd("report", str(base), "--target", "0.5", "-o", "page.html")
    assert answer.code == 0
    assert "No method reached a test error of 0.5." in Path("page.html").read_text()


def test_a_report_of_different_problems(ksd: Ksd, tmp_path: Path) -> None:
    assert ksd(*ADAM, "--iterations", "1").code == 0
    words = [*ADAM, "--iterations", "1", "--problem-set", "code_size=3", "--folder", "runs/three"]
    assert ksd(*words).code == 0
    Path("runs/curves-small-adam-0/checkpoint.pt").write_bytes(b"")
    answer = ksd("report", "runs", "-o", "page.html")
    assert answer.code == 0
    assert answer.out == "Report: page.html\n"
    assert "No pictures for curves: the checkpoint" in answer.err
    page = Path("page.html").read_text()
    assert "data:image/png" in page  # of the other one


def test_an_equation_is_compared_with_pictures(ksd: Ksd) -> None:
    words = ["compare", "poisson-2d-small", "--optimizers", "ksd,adam", "--seconds", "0.3"]
    answer = ksd(*words)
    assert answer.code == 0
    assert "relative L2 error of the solution" in answer.out
    page = Path("runs/compare-poisson-2d-small-0/report.html").read_text()
    assert 'alt="the solution by KSD"' in page
    assert 'alt="the error of Adam, from 0 to' in page
    again = ksd("report", "runs", "--output", "again.html")
    assert again.code == 0
    assert Path("again.html").read_text().count("<img") == page.count("<img") == 5


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--small"], "poisson-2d-small has one size and one set of points: leave out --small"),
        (["--dtype", "float32"], "is trained in torch.float64, found torch.float32: leave it out"),
        (["--dtype", "float128"], "Unknown dtype 'float128': did you mean 'float32'?"),
    ],
)
def test_what_an_equation_does_not_take_is_told(ksd: Ksd, words: list[str], sentence: str) -> None:
    assert sentence in ksd("train", "poisson-2d-small", *words).sentence

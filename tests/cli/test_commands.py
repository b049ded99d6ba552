import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import typer

from krylov_descent.cli import COMMANDS, main
from krylov_descent.cli.options import pairs
from krylov_descent.laboratory.contenders import CONTENDERS
from krylov_descent.laboratory.problems import PROBLEMS
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.replays import file_name
from krylov_descent.laboratory.reproduce import EXHIBITS, HF, PAPER, Cell, Exhibit
from krylov_descent.laboratory.runs import RunSettings, settings_of
from krylov_descent.laboratory.sources import SOURCES, Source
from krylov_descent.laboratory.training import Limits
from tests.laboratory.replay_files import write_matchup

OPTIONS = {"train": 30, "validation": 10, "test": 10}
TINY = ["--small", *(w for k, v in OPTIONS.items() for w in ("--problem-set", f"{k}={v}"))]
ADAM = ["train", "curves", *TINY, "--optimizer", "adam"]


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line of an error that a person can mend."""
        assert self.code == 1
        assert self.err.startswith("ksd: ")
        assert self.err.count("\n") == 1, self.err
        return self.err.removeprefix("ksd: ").strip()


Ksd = Callable[..., Answer]


@pytest.fixture
def ksd(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ksd:
    """The command in this process, on a terminal of 80 columns, in a folder of its own."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(list(words))
        out, err = (re.sub(r"\x1b\[[0-9;]*m", "", text) for text in capsys.readouterr())
        code = caught.value.code
        return Answer(code if isinstance(code, int) else 0, out, err)

    return call


def fits(text: str) -> bool:
    return max(map(len, text.splitlines())) <= 80 and "…" not in text.replace("--set …=", "")


# Help and lists -------------------------------------------------------------------------------


def test_the_help_names_every_command_and_where_to_begin(ksd: Ksd) -> None:
    for words in ([], ["--help"]):
        answer = ksd(*words)
        assert answer.code == (0 if words else 2)
        text = answer.out + answer.err
        for command in (*COMMANDS, data):
            assert f"│ {command.__name__} " in text
        assert "$ ksd compare curves --small" in text
        assert fits(text)


def data() -> None:
    """Stands for the group of that name."""


@pytest.mark.parametrize("command", [command.__name__ for command in COMMANDS])
def test_each_help_teaches_by_examples_that_parse(ksd: Ksd, command: str) -> None:
    answer = ksd(command, "--help")
    assert answer.code == 0
    examples = re.findall(r"^ \$ (ksd .*)$", answer.out, re.MULTILINE)
    assert examples
    for example in examples:
        words = shlex.split(example)
        assert words[:2] == ["ksd", command]
        for word in words[2:]:
            if word.startswith("--"):
                assert word in answer.out, f"{word} is no option of {command}"


def test_the_help_of_train_says_what_options_are_for(ksd: Ksd) -> None:
    text = ksd("train", "--help").out
    for heading in ("What to train", "When to stop", "Where and how"):
        assert heading in text
    assert "Ctrl-C" in text
    assert "--resume" in text


def test_problems_are_listed(ksd: Ksd) -> None:
    answer = ksd("problems")
    assert answer.code == 0
    assert fits(answer.out)
    assert re.findall(r"^  ([a-z0-9-]+) ", answer.out, re.MULTILINE) == ["name", *PROBLEMS]


def test_a_problem_shows_its_options(ksd: Ksd) -> None:
    answer = ksd("problems", "curves")
    for option in ("train", "validation", "test", "code_size", "original", "size", "seed"):
        assert f"\n  {option} " in answer.out
    assert "Autoencoder of 28×28 images" in answer.out
    assert "images to train on" in answer.out
    assert "how many of the last training images" in ksd("problems", "mnist-classifier").out


def test_optimizers_are_listed_on_few_lines(ksd: Ksd) -> None:
    answer = ksd("optimizers")
    assert answer.code == 0
    assert fits(answer.out)
    assert re.findall(r"^  ([a-z-]+) ", answer.out, re.MULTILINE) == ["name", *CONTENDERS]
    assert len(answer.out.splitlines()) < 20
    assert "torch.optim.RMSprop" in answer.out


def test_an_optimiser_shows_its_options(ksd: Ksd) -> None:
    answer = ksd("optimizers", "ksd")
    assert fits(answer.out)
    assert re.search(r"\n  dimension +20 +K, the dimension of the Krylov", answer.out)
    answer = ksd("optimizers", "torch.optim.RMSprop")
    assert re.search(r"\n  alpha +0.99 +smoothing constant", answer.out)


def test_data_files_are_listed(ksd: Ksd, tmp_path: Path) -> None:
    answer = ksd("data", "list", "--data", str(tmp_path))
    assert answer.code == 0
    assert f"Data folder: {tmp_path}\n" in answer.out
    assert fits(answer.out.partition("\n")[2])
    for name in SOURCES:
        assert f"  {name} " in answer.out
    assert "ksd data fetch" in answer.out


def test_damaged_data_fail_the_verification(ksd: Ksd, tmp_path: Path) -> None:
    assert ksd("data", "verify", "--data", str(tmp_path)).code == 0
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"x")
    answer = ksd("data", "verify", "--data", str(tmp_path))
    assert answer.code == 1
    assert re.search(r"t10k-labels-idx1-ubyte.gz +DAMAGED +1", answer.out)
    answer = ksd("train", "mnist-classifier", "--data", str(tmp_path), "--problem-set", "size=x")
    assert "`size` must be 'small'" in answer.sentence


# Values and errors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("dimension=80", {"dimension": 80}),
        ("bfgs-iterations=30", {"bfgs_iterations": 30}),
        ("lr=1e-3", {"lr": 1e-3}),
        ("curvature=hessian", {"curvature": "hessian"}),
        ("curvature='hessian'", {"curvature": "hessian"}),
        ("curvature=gauss-newton", {"curvature": "gauss-newton"}),
        ("original=True", {"original": True}),
        ("subset_size=(0.5, 100)", {"subset_size": (0.5, 100)}),
        ("micro_batch=None", {"micro_batch": None}),
        ("file=a=b", {"file": "a=b"}),
        ("empty=", {"empty": ""}),
        ("odd={1}", {"odd": "{1}"}),  # a set has no place in config.json
    ],
)
def test_key_and_value(word: str, expected: dict[str, object]) -> None:
    assert pairs([word]) == expected


def test_several_pairs_and_none() -> None:
    assert pairs(["a=1", "b=2", "a=3"]) == {"a": 3, "b": 2}
    assert pairs(None) == {}


@pytest.mark.parametrize("word", ["dimension", "=3", ""])
def test_what_is_no_pair_is_wrong_usage(word: str) -> None:
    with pytest.raises(typer.BadParameter, match="must be KEY=VALUE"):
        pairs([word])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train"], "ksd problems"),
        (["train", "curves", "--set", "dimension"], "must be KEY=VALUE"),
        (["train", "curves", "--iterations", "0"], "--iterations"),
        (["train", "curves", "--iterations", "many"], "--iterations"),
        (["train", "curves", "--no-such-option"], "--no-such-option"),
        (["train", "--resume", "x", "--folder", "y"], "--folder"),
        (["compare"], "PROBLEM"),
        (["compare", "curves", "--optimizers", " , "], "--optimizers"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_wrong_usage_is_exit_code_2(ksd: Ksd, words: list[str], hint: str) -> None:
    answer = ksd(*words)
    assert answer.code == 2
    assert hint in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "curvs"], "Unknown problem 'curvs': did you mean 'curves'?"),
        (["train", "curves", "--optimizer", "adm", *TINY], "did you mean 'adam'?"),
        (["compare", "curves", "--optimizers", "ksd,lbfg"], "did you mean 'lbfgs'?"),
        ([*ADAM, "--set", "beta=1"], "did you mean 'betas'?"),
        ([*ADAM, "--problem-set", "code=6"], "did you mean 'code_size'?"),
        ([*ADAM, "--initialization", "spars"], "did you mean 'sparse'?"),
        ([*ADAM, "--dtype", "float99"], "Unknown dtype 'float99'"),
        ([*ADAM, "--device", "cuda:77"], "there is no 'cuda:77' here"),
        (["train", "--resume", "nowhere"], "nowhere is not a run folder"),
        (["report", "nowhere"], "nowhere is not a run folder and holds none"),
        (["reproduce", "tabel2"], "did you mean 'table2'?"),
        (["reproduce", "table2", "--rows", "mnist"], "did you mean 'mnist-"),
        (["reproduce", "table2", "--show"], "holds no run of table2 yet"),
        (["problems", "curve"], "did you mean 'curves'?"),
        (["optimizers", "ksdd"], "did you mean 'ksd'?"),
        (["data", "fetch", "mnis"], "did you mean 'mnist'?"),
        (["train", "curves", "--problem-set", "original=True", "--data", "."], "digs3pts_1.mat is"),
    ],
)
def test_what_a_person_can_mend_is_one_sentence_and_exit_code_1(
    ksd: Ksd, words: list[str], sentence: str, tmp_path: Path
) -> None:
    assert sentence in ksd(*words).sentence
    assert list(tmp_path.iterdir()) == []


# Training -------------------------------------------------------------------------------------


def test_a_run_is_told_and_recorded(ksd: Ksd) -> None:
    answer = ksd(*ADAM, "--iterations", "2", "--tensorboard")
    assert answer.code == 0
    folder = Path("runs/curves-small-adam-0")
    table = answer.out[answer.out.index("squared error per image") :]
    assert fits(table)
    assert re.search(r"Adam( +[\d.]+){3} +2 +2\.0 +[\d.]+ +iterations", table)
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


def test_the_recorded_command_makes_the_same_run(ksd: Ksd) -> None:
    words = ["--set", "betas=(0.8, 0.9)", "--initialization", "glorot", "--dtype", "float64"]
    assert ksd(*ADAM, *words, "--iterations", "2", "--no-early-stop", "--seed", "3").code == 0
    folder = RunFolder(Path("runs/curves-small-adam-3"))
    config = folder.config()
    copy = Path("copy")
    command = shlex.split(config["command"].replace(str(folder.path), str(copy)))
    assert command[0] == "ksd"
    assert ksd(*command[1:]).code == 0
    again = RunFolder(copy).config()
    assert settings_of(again) == settings_of(config)
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
    limits = settings_of(folder.config()).limits
    assert limits == Limits(passes=4.0, early_stop=None)
    assert folder.config()["command"].endswith("--passes 4.0 --no-early-stop --folder run")


def test_resuming_keeps_the_target_or_takes_a_new_one(ksd: Ksd) -> None:
    folder = RunFolder(Path("run"))
    assert ksd(*ADAM, "--iterations", "1", "--target", "1e-6", "--folder", "run").code == 0
    assert "--target 1e-06" in folder.config()["command"]
    assert ksd("train", "--resume", "run", "--iterations", "2").code == 0
    assert settings_of(folder.config()).limits == Limits(iterations=2, target=1e-6)
    assert ksd("train", "--resume", "run", "--target", "1e9").code == 0
    assert settings_of(folder.config()).limits == Limits(iterations=2, target=1e9)
    assert len(folder.rows()) == 3


def test_a_damaged_run_folder_is_one_sentence(ksd: Ksd) -> None:
    assert ksd(*ADAM, "--iterations", "1", "--folder", "run").code == 0
    checkpoint = Path("run/checkpoint.pt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:5_000])
    assert "run/checkpoint.pt is damaged" in ksd("train", "--resume", "run").sentence
    checkpoint.unlink()
    assert "there is no checkpoint at run/checkpoint.pt" in ksd("train", "--resume", "run").sentence
    Path("run/config.json").write_text("{")
    assert "run/config.json is damaged" in ksd("train", "--resume", "run").sentence


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
    refused = ksd(*words, "adam", "--initialization", "glorot", "--folder", str(base))
    assert 'was started with initialization = "sparse", not "glorot"' in refused.sentence


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


def test_a_report_of_different_problems(ksd: Ksd, tmp_path: Path) -> None:
    assert ksd(*ADAM, "--iterations", "1").code == 0
    words = [*ADAM, "--iterations", "1", "--problem-set", "code_size=3", "--folder", "runs/three"]
    assert ksd(*words).code == 0
    Path("runs/curves-small-adam-0/checkpoint.pt").write_bytes(b"")
    answer = ksd("report", "runs", "-o", "page.html")
    assert answer.code == 0
    assert answer.out == "Report: page.html\n"
    assert "No reconstructions for curves: the checkpoint" in answer.err
    page = Path("page.html").read_text()
    assert "data:image/png" in page  # of the other one


# The paper's exhibits -------------------------------------------------------------------------


@pytest.fixture
def small_exhibits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table and a figure of two quick runs each."""
    settings = RunSettings(
        problem="curves",
        problem_options={"size": "small", **OPTIONS},
        limits=Limits(iterations=2),
    )
    cells = tuple(
        Cell(row="curves", column=column, settings=replace(settings, optimizer=optimizer))
        for column, optimizer in ((HF, "adam"), (PAPER, "sgd"))
    )
    mnist = RunSettings(problem="mnist-autoencoder", optimizer="adam")
    missing = Cell(row="mnist-autoencoder", column=HF, settings=mnist)
    table = Exhibit(name="table0", title="A table", cells=(*cells, missing))
    figure = Exhibit(name="figure0", title="A figure", cells=cells)
    monkeypatch.setitem(EXHIBITS, "table0", table)
    monkeypatch.setitem(EXHIBITS, "figure0", figure)


@pytest.mark.usefixtures("small_exhibits")
def test_a_table_is_made_once_and_shows_what_is_missing(ksd: Ksd) -> None:
    first = ksd("reproduce", "table0", "--rows", "curves", "--quick")
    assert first.code == 0
    base = Path("runs/reproduce-quick")
    assert f"Results: {base}/table0.json\n" in first.out
    table = first.out[first.out.index("A table") :]
    assert fits(table)
    assert re.search(r"\n  curves +\n", table)
    assert re.search(r"\n    HF +[\d.]+ +[\d.]+ *\n", table)
    assert re.search(r"\n    KSD, paper's settings +[\d.]+ +[\d.]+ +- +", table)
    assert re.search(r"\n  mnist-autoencoder +\n +HF +missing *\n", table)
    summary = json.loads((base / "table0.json").read_text())
    assert [cell["outcome"] and cell["outcome"]["ending"] for cell in summary["cells"]] == [
        "iterations",
        "iterations",
        None,
    ]
    kept = (base / "curves" / "hf" / "metrics.jsonl").read_text()
    second = ksd("reproduce", "table0", "--rows", "curves", "--quick")
    assert second.code == 0
    assert "curves, HF: there already" in second.out
    assert "curves, KSD, paper's settings: there already" in second.out
    assert (base / "curves" / "hf" / "metrics.jsonl").read_text() == kept
    assert table == second.out[second.out.index("A table") :]
    shown = ksd("reproduce", "table0", "--quick", "--show")  # MNIST is not asked for, nor fetched
    assert shown.code == 0
    assert table == shown.out[shown.out.index("A table") :]


@pytest.mark.usefixtures("small_exhibits")
def test_a_row_whose_data_are_not_there_does_not_hide_the_others(ksd: Ksd) -> None:
    Path("data/mnist").mkdir(parents=True)
    Path("data/mnist/train-images-idx3-ubyte.gz").write_bytes(b"damaged")
    answer = ksd("reproduce", "table0", "--quick", "--data", "data")
    assert "train-images-idx3-ubyte.gz is damaged" in answer.sentence
    assert re.search(r"\n    KSD, paper's settings +[\d.]+", answer.out)
    assert re.search(r"\n +HF +missing", answer.out)


def test_the_splits_of_a_row_share_a_line_and_yardsticks_stand_beside(
    ksd: Ksd, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_matchup(monkeypatch, Path("data"), games=60)
    cells = tuple(
        Cell(
            row="starcraft",
            column=column,
            settings=RunSettings(
                problem="starcraft",
                problem_options={"split": split},
                optimizer=optimizer,
                limits=Limits(iterations=1),
            ),
            split=split,
        )
        for split in range(3)
        for column, optimizer in (
            (HF, "sgd"),
            (PAPER, "adam"),
            ("Regression", "logistic-regression"),
        )
    )
    unfinished = replace(cells[0], column="Later", split=7)
    table = Exhibit(name="table0", title="A table", cells=(*cells, unfinished))
    monkeypatch.setitem(EXHIBITS, "table0", replace(table, cells=cells))
    assert ksd("reproduce", "table0", "--data", "data").code == 0
    monkeypatch.setitem(EXHIBITS, "table0", table)
    monkeypatch.setitem(SOURCES, file_name("TvZ", "Zerg"), Source("starcraft/x", None, None))
    answer = ksd("reproduce", "table0", "--data", "data")
    assert "starcraft, Regression, split 2: there already" in answer.out
    shown = answer.out[answer.out.index("A table") :]
    assert fits(shown)
    number = r"[\d.]+ ± [\d.]+%"
    assert re.search(rf"\n    HF +{number} +{number} *\n", shown)
    assert re.search(rf"\n    KSD, paper's settings +{number} +{number} +", shown)
    assert re.search(rf"\n    Regression +{number} +{number} *\n", shown)
    assert re.search(r"\n    Later +missing", shown)
    means = json.loads(Path("runs/reproduce/table0.json").read_text())["means"]
    assert [(mean["column"], mean["test"]["splits"]) for mean in means] == [
        (HF, 3),
        (PAPER, 3),
        ("Regression", 3),
    ]


def test_yardsticks_are_trained_and_compared_by_name(
    ksd: Ksd, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_matchup(monkeypatch, Path("data"), games=60)
    words = ["--data", "data", "--seconds", "0.1", "--optimizers", "adam,logistic-regression"]
    answer = ksd("compare", "starcraft", *words)
    assert answer.code == 0
    assert re.search(r"\n *Logistic +[\d.]+% +[\d.]+% +[\d.]+% .* fitted", answer.out)
    assert "Logistic regression" in Path("runs/compare-starcraft-0/report.html").read_text()
    answer = ksd("train", "starcraft", "--optimizer", "gradient-boosting", "--data", "data")
    assert answer.code == 0
    assert "It ended because the method has no iterations" in answer.out
    answer = ksd("train", "curves", *TINY, "--optimizer", "gradient-boosting")
    assert "'gradient-boosting' is for classification, 'curves' is not" in answer.sentence
    assert "logistic-regression, gradient-boosting" in ksd("optimizers").out
    assert "Scikit-learn's" in ksd("optimizers", "gradient-boosting").out


@pytest.mark.usefixtures("small_exhibits")
def test_a_figure_is_drawn(ksd: Ksd) -> None:
    answer = ksd("reproduce", "figure0", "--quick", "--folder", "here")
    assert answer.code == 0
    assert answer.out.endswith("Figure: here/figure0.png\n")
    assert Path("here/figure0.png").stat().st_size > 10_000


@pytest.mark.usefixtures("small_exhibits")
def test_the_cells_of_another_form_are_not_taken_for_these(ksd: Ksd) -> None:
    assert ksd("reproduce", "figure0", "--quick", "--folder", "here").code == 0
    config = json.loads(Path("here/curves/hf/config.json").read_text())
    config["problem"]["options"]["train"] = 31
    Path("here/curves/hf/config.json").write_text(json.dumps(config))
    answer = ksd("reproduce", "figure0", "--quick", "--folder", "here")
    assert answer.code == 1
    assert "here/curves/hf was started with problem_options" in answer.err

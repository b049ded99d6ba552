import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from krylov_descent import __version__
from krylov_descent.cli import COMMANDS, listing
from krylov_descent.cli.options import pairs
from krylov_descent.laboratory.contenders import CONTENDERS
from krylov_descent.laboratory.problems import PROBLEMS
from krylov_descent.laboratory.reproduce import EXHIBITS
from krylov_descent.laboratory.sources import FOLDER_VARIABLE, SOURCES, FileStatus
from krylov_descent.laboratory.yardsticks import YARDSTICKS
from tests.cli.asking import ADAM, TINY, Ksd, fits

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
    assert re.search(r"\n  dimension +auto +K, the dimension of the Krylov", answer.out)
    answer = ksd("optimizers", "torch.optim.RMSprop")
    assert re.search(r"\n  alpha +0.99 +smoothing constant", answer.out)


def test_data_files_are_listed(ksd: Ksd) -> None:
    answer = ksd("data", "list", "--data", "here")
    assert answer.code == 0
    assert "Data folder: here\n" in answer.out
    assert fits(answer.out)
    for name in SOURCES:
        assert f"  {name} " in answer.out
    assert "ksd data fetch" in answer.out


def test_nothing_is_to_be_fetched_where_nothing_is_missing(
    ksd: Ksd, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = FileStatus("a", Path("a"), present=True, size=1, ok=None, downloadable=True)
    optional = FileStatus("b", Path("b"), present=False, size=None, ok=None, downloadable=False)
    monkeypatch.setattr(listing, "inventory", lambda data: [there, optional])
    assert "ksd data fetch" not in ksd("data", "list").out


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["--version"], ["data"]])
def test_help_does_not_wait_for_torch(words: list[str]) -> None:
    program = f"""
import sys
from krylov_descent.cli import main
try:
    main({words})
except SystemExit:
    print({{"torch", "numpy", "scipy"}} & set(sys.modules), file=sys.stderr)
"""
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert ended.stderr.decode().splitlines()[-1] == "set()"
    assert b"ksd" in ended.stdout + ended.stderr


def test_a_terminal_without_signs_gets_plain_letters(ksd: Ksd) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "krylov_descent", "train", "--help"],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"},
    )
    assert "cpu, cuda, cuda:1, ..." in ended.stdout.decode("ascii")
    drawn = str.maketrans("─━│┃╭╮╰╯", "--||++++")  # rich has plain lines by itself
    for words in (["problems"], ["optimizers", "ksd"], ["optimizers", "hf"]):
        text = ksd(*words).out.translate(drawn).encode("ascii", "plain letters").decode()
        assert "?" not in text
        assert "28x28" in text or "1/2lambda||theta||2" in text or "Hessian" in text


def test_the_optimisers_of_the_paper_show_what_they_do(ksd: Ksd) -> None:
    text = ksd("optimizers", "ksd-paper").out
    assert re.search(r"\n  dimension +the paper's ", text)
    assert re.search(r"\n  bfgs_iterations +30 ", text)
    assert re.search(r"\n  preconditioner +fisher-diagonal ", text)
    assert "K, the dimension, is 80 for curves and 20 for mnist-autoencoder" in text
    assert "Rate: 0.004, best of 4 on curves-small" in ksd("optimizers", "adam").out


def test_the_help_names_the_exhibits(ksd: Ksd) -> None:
    *others, last = EXHIBITS
    assert f"{', '.join(others)} or {last}" in ksd("reproduce", "--help").out


def test_the_version(ksd: Ksd) -> None:
    answer = ksd("--version")
    assert (answer.code, answer.out) == (0, f"ksd {__version__}\n")


def test_the_optimisers_that_are_known_include_the_yardsticks(ksd: Ksd) -> None:
    known = ", ".join(sorted([*CONTENDERS, *YARDSTICKS]))
    for words in (["train", "curves", "--optimizer", "foo"], ["optimizers", "foo"]):
        assert ksd(*words).sentence == f"Unknown optimizer 'foo'. Known: {known}."


def test_damaged_data_fail_the_verification(ksd: Ksd, tmp_path: Path) -> None:
    assert ksd("data", "verify", "--data", str(tmp_path)).code == 0
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"x")
    answer = ksd("data", "verify", "--data", str(tmp_path))
    assert answer.code == 1
    assert re.search(r"t10k-labels-idx1-ubyte.gz +DAMAGED +1", answer.out)
    answer = ksd("train", "mnist-classifier", "--data", str(tmp_path), "--problem-set", "size=x")
    assert "`size` must be 'small'" in answer.sentence


def test_data_that_are_named_and_missing_fail_the_verification(ksd: Ksd, tmp_path: Path) -> None:
    answer = ksd("data", "verify", "mnist", "--data", str(tmp_path))
    assert answer.code == 1
    assert answer.out.count(" missing ") == 4
    assert "if one that was named is missing" in " ".join(
        ksd("data", "verify", "--help").out.split()
    )


def test_the_hints_to_fetch_data_name_the_folder_that_was_given(
    ksd: Ksd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "elsewhere")
    assert "Get what is missing: ksd data fetch --data 'my data'\n" in (
        ksd("data", "list", "--data", "my data").out
    )
    assert "Get what is missing: ksd data fetch\n" in ksd("data", "list").out
    images = Path("my data/mnist/train-images-idx3-ubyte.gz")
    images.parent.mkdir(parents=True)
    images.write_bytes(b"x")
    refused = ksd("train", "mnist-classifier", "--data", "my data").sentence
    assert "`ksd data fetch mnist/train-images-idx3-ubyte.gz --data 'my data'`" in refused


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
        (
            [*ADAM, "--problem-set", "code_size=abc"],
            "`code_size` must be a whole number, found 'abc'",
        ),
        ([*ADAM, "--problem-set", "code_size=0"], "`code_size` must be at least 1 unit, found 0"),
        (
            [*ADAM, "--problem-set", "train=abc"],
            "`train` must be a whole number or None, found 'abc'",
        ),
        ([*ADAM, "--problem-set", "seed=abc"], "`seed` must be a whole number, found 'abc'"),
        ([*ADAM, "--problem-set", "seed=-1"], "`seed` must be 0 or more and below 2**63, found -1"),
        (
            [*ADAM, "--problem-set", "original=maybe"],
            "`original` must be True or False, found 'maybe'",
        ),
        ([*ADAM, "--set", "lr=abc"], "`lr` must be a number, found 'abc'"),
        ([*ADAM, "--set", "foreach=3"], "`foreach` must be True, False or None, found 3"),
        ([*ADAM, "--seed", str(2**64)], "`seed` must be 0 or more and below 2**63, found 18446744"),
        ([*ADAM, "--problem-set", f"seed={2**64}"], "`seed` must be 0 or more and below 2**63"),
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

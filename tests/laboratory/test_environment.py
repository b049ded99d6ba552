import subprocess
from pathlib import Path

import torch

import krylov_descent
from krylov_descent.laboratory.environment import commit, differences, environment


def test_an_environment_names_what_decides_the_numbers() -> None:
    found = environment(torch.device("cpu"))
    assert found["torch"] == torch.__version__
    assert found["krylov-descent"] == krylov_descent.__version__
    assert found["gpu"] is None
    assert found["threads"] == torch.get_num_threads()
    assert found["cores"] >= 1


def test_the_date_makes_no_difference_and_what_is_not_known_neither() -> None:
    before = {"date": "2024", "torch": "2.11", "threads": 4, "gpu": None, "cpu": "A"}
    assert differences(before, before | {"date": "2025", "gpu": "H200", "cores": 8}) == ""
    now = before | {"torch": "2.13", "threads": 2}
    assert differences(before, now) == "torch 2.11 (now 2.13), threads 4 (now 2)"
    assert differences({}, now) == ""


def test_a_package_in_the_repository_of_another_has_no_commit(tmp_path: Path) -> None:
    package = tmp_path / "libraries" / "package"
    package.mkdir(parents=True)
    assert commit(package) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@b"]
    for file in (package / "__init__.py", tmp_path / "theirs.py"):
        file.write_text("")
    for words in (["init", "-q"], ["add", "theirs.py"], ["commit", "-qm", "Theirs"]):
        subprocess.run([*git, *words], check=True)
    commit.cache_clear()
    assert commit(package) is None
    subprocess.run([*git, "add", "libraries"], check=True)
    commit.cache_clear()
    assert (commit(package) or "").endswith("+changes")
    subprocess.run([*git, "commit", "-qm", "Ours"], check=True)
    commit.cache_clear()
    revision = commit(package)
    assert revision is not None
    assert len(revision) == 40

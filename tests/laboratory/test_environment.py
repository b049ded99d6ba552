import subprocess
import sys
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
    source = Path(krylov_descent.__file__).parent
    copy = tmp_path / "theirs" / source.name
    copy.mkdir(parents=True)
    for path in ("__init__.py", "laboratory/__init__.py", "laboratory/environment.py"):
        (copy / path).parent.mkdir(exist_ok=True)
        (copy / path).write_text((source / path).read_text())
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@b"]
    (tmp_path / "their.py").write_text("")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "their.py"], check=True)
    subprocess.run([*git, "commit", "-qm", "Theirs"], check=True)

    def told() -> str:
        program = "from krylov_descent.laboratory.environment import commit; print(commit())"
        ended = subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(copy.parent), "PATH": "/usr/bin:/bin"},
        )
        return ended.stdout.strip()

    assert told() == "None"
    subprocess.run([*git, "add", "theirs"], check=True)
    assert told().endswith("+changes")
    subprocess.run([*git, "commit", "-qm", "Ours"], check=True)
    assert len(told()) == 40
    assert commit() is None or len(commit() or "") >= 40

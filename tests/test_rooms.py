"""The rooms of the package: which may import which, read from the source."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "krylov_descent"
# Imports point down this list.
ROOMS = (
    "cli",
    "laboratory",
    "integrations",
    "optimizers",
    "cuda",
    "curvature",
    "objective",
    "algorithms",
    "runtime",
)
# Imported in a function, on request alone.
LAZY = {("optimizers.base", "cuda.engine")}
MOST_FLOORS = 15
# Rooms in which nothing is known of how an engine runs work.
PURE = ("optimizers", "algorithms", "objective", "curvature")
WORDS_OF_ENGINES = ("recording", "cuda.stream", "cuda.event", "triton", "tensor core", "staleness")


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path
    return found


MODULES = modules()


def imports(name: str) -> list[tuple[str, bool]]:
    """The modules of the package that a module imports, and whether in a function."""
    tree = ast.parse(MODULES[name].read_text())
    inner = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("krylov_descent"):
            module = (node.module or "").removeprefix("krylov_descent").removeprefix(".")
            for alias in node.names:
                whole = f"{module}.{alias.name}".removeprefix(".")
                found.append((whole if whole in MODULES else module, id(node) in inner))
        elif isinstance(node, ast.Import):
            found += [
                (alias.name.removeprefix("krylov_descent").removeprefix("."), id(node) in inner)
                for alias in node.names
                if alias.name.split(".")[0] == "krylov_descent"
            ]
    return [(module, lazy) for module, lazy in found if module != name]


def room_of(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def test_the_package_has_few_rooms_and_no_loose_modules() -> None:
    entries = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert entries <= {"__init__.py", "__main__.py", "py.typed", *ROOMS}
    assert len(ROOMS) <= 9


@pytest.mark.parametrize("name", sorted(n for n in MODULES if room_of(n) in ROOMS))
def test_imports_point_down(name: str) -> None:
    own = ROOMS.index(room_of(name))
    for module, lazy in imports(name):
        if (name, module) in LAZY:
            assert lazy
            continue
        if not module:  # the version of the package, for the laboratory and the command line
            assert room_of(name) in ("cli", "laboratory")
            continue
        assert ROOMS.index(room_of(module)) >= own, f"{name} imports {module}"
        assert room_of(module) != "cuda" or room_of(name) == "cuda", f"{name} imports {module}"


@cache
def floor(name: str) -> int:
    below = [module for module, lazy in imports(name) if module and not lazy]
    return 1 + max((floor(module) for module in below), default=0)


def test_imports_have_no_circles_and_few_floors() -> None:
    # A circle would recurse for ever.
    floors = {name: floor(name) for name in MODULES if room_of(name) in (*PURE, "runtime", "cuda")}
    assert max(floors.values()) <= MOST_FLOORS, max(floors, key=lambda name: floors[name])


@pytest.mark.parametrize("name", sorted(n for n in MODULES if room_of(n) in PURE))
def test_the_method_knows_nothing_of_how_it_is_run(name: str) -> None:
    text = MODULES[name].read_text().lower()
    assert not [word for word in WORDS_OF_ENGINES if word in text]


def test_training_on_a_cpu_loads_no_gpu_machinery() -> None:
    program = """
import sys, torch
from torch import nn
torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)  # which may load Triton by itself
before = set(sys.modules)
from krylov_descent import KSD, HessianFree, NonlinearCG, LBFGS
x, y = torch.randn(40, 3), torch.randn(40, 1)
for kind in (KSD, HessianFree, NonlinearCG, LBFGS):
    kind(nn.Linear(3, 1), nn.MSELoss()).step((x, y))
loaded = set(sys.modules) - before
assert not [m for m in loaded if m.startswith("krylov_descent.cuda") or m == "triton"], loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True)

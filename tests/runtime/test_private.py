"""Each private function of torch and Triton is there, and does what the public way does.

A test here fails when a release of torch has lost one. No other file of the library uses any.
"""

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate

import krylov_descent
from krylov_descent.runtime import private
from krylov_descent.runtime.private import (
    DispatchMode,
    StorageWeakRef,
    add_each,
    base_of,
    compiled_from,
    compiler_is_loaded,
    copy_each,
    current_dispatch_mode,
    default_store,
    end_allocation,
    fix_cache_keys,
    forward_hooks,
    function_of,
    has_note,
    holds_hooks,
    is_called_directly,
    is_hook_of_replicate,
    leaf_of,
    leave_note,
    norms_of,
    scales_by_frequency,
    schema_of,
    specialised_places,
    storage_at,
    storage_number,
    transforms_are_active,
    views_like,
    will_be_computed,
    writes_of,
)

aten = torch.ops.aten


def pieces() -> list[Tensor]:
    return [torch.randn(3, 4), torch.randn(5), torch.randn(())]


@pytest.fixture(params=["private", "public"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the private functions, and as if torch had lost them."""
    if request.param == "public":
        for name in ("_foreach_copy_", "_foreach_add_", "_foreach_norm"):
            monkeypatch.delattr(torch, name)
        monkeypatch.delattr(torch._utils, "_unflatten_dense_tensors")
    return str(request.param)


def test_those_with_a_public_way_are_there() -> None:
    for name in ("_foreach_copy_", "_foreach_add_", "_foreach_norm"):
        assert hasattr(torch, name)
    for name in ("_are_functorch_transforms_active", "_will_engine_execute_node"):
        assert hasattr(torch._C, name)
    assert hasattr(torch._utils, "_unflatten_dense_tensors")


@pytest.mark.usefixtures("way")
def test_copies_sums_and_norms_of_many_tensors() -> None:
    targets, sources = pieces(), pieces()
    expected = [target + 0.5 * source for target, source in zip(targets, sources, strict=True)]
    add_each(targets, sources, 0.5)
    torch.testing.assert_close(targets, expected)
    torch.testing.assert_close(
        norms_of(sources), [source.double().square().sum().sqrt() for source in sources]
    )
    copy_each(targets, sources)
    assert all(map(torch.equal, targets, sources))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("empty", [False, True])
def test_views_of_a_vector(empty: bool) -> None:
    like = [*pieces(), torch.empty(0, 3)] if empty else pieces()
    vector = torch.cat([tensor.reshape(-1) for tensor in like])
    views = views_like(vector, like)
    assert [view.shape for view in views] == [tensor.shape for tensor in like]
    assert all(map(torch.equal, views, like))
    vector.zero_()
    assert not any(view.any() for view in views)


class Names(DispatchMode):
    """Notes the operations that pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_operations_pass_by_and_ask_for_the_mode() -> None:
    x = torch.randn(2, 2)
    assert current_dispatch_mode() is None
    with Names() as outer, Names() as names:
        assert current_dispatch_mode() is names
        x @ x
    assert names.seen == outer.seen == [aten.mm.default]
    assert current_dispatch_mode() is None


def test_a_mode_does_not_load_the_compiler() -> None:
    code = (
        "import torch\n"
        "from krylov_descent.runtime.private import DispatchMode, compiler_is_loaded\n"
        "class Mode(DispatchMode):\n"
        "    def __torch_dispatch__(self, func, types, args=(), kwargs=None):\n"
        "        return func(*args, **(kwargs or {}))\n"
        "with Mode():\n"
        "    torch.ones(2) * 2\n"
        "assert not compiler_is_loaded()\n"
        "torch.compiler.reset()\n"
        "assert compiler_is_loaded()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_schema_tells_what_is_written() -> None:
    schema = schema_of(aten.add_.Tensor)
    assert schema.is_mutable
    assert [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write] == ["self"]
    assert not schema_of(aten.add.Tensor).is_mutable


def test_transforms_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def square(x: Tensor) -> Tensor:
        seen.append(transforms_are_active())
        return x * x

    square(torch.ones(2))
    torch.vmap(square)(torch.ones(2))
    torch.func.grad(square)(torch.ones(()))
    assert seen == [False, True, True]
    monkeypatch.delattr(torch._C, "_are_functorch_transforms_active")
    assert transforms_are_active()  # on the safe side


class Asking(torch.autograd.Function):
    """A product of two that notes in its backward pass which derivatives are wanted."""

    wanted: tuple[bool, ...] = ()

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        Asking.wanted = tuple(will_be_computed(node) for node, _ in ctx.next_functions)
        a, b = ctx.saved_tensors
        return g * b, g * a


def test_what_a_backward_pass_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    product: Tensor = Asking.apply(2 * a, 3 * b)  # type: ignore[no-untyped-call]
    for chosen, expected in (([a], (True, False)), ([b], (False, True)), ([a, b], (True, True))):
        torch.autograd.grad(product.sum(), chosen, retain_graph=True)
        assert Asking.wanted == expected
    monkeypatch.delattr(torch._C, "_will_engine_execute_node")
    torch.autograd.grad(product.sum(), [a])
    assert Asking.wanted == (True, True)


def test_nodes_of_the_graph() -> None:
    weight = torch.ones(4, 2, requires_grad=True)
    product: Any = Asking.apply(weight, torch.ones(4, 2))  # type: ignore[no-untyped-call]
    (leaf, _), *_ = product.grad_fn.next_functions
    assert function_of(product.grad_fn) is Asking
    assert leaf_of(product.grad_fn) is None
    assert leaf_of(leaf) is weight
    assert function_of(leaf) is None
    for scaled in (True, False):
        found = nn.functional.embedding(torch.tensor([1]), weight, scale_grad_by_freq=scaled)
        assert scales_by_frequency(found.grad_fn) is scaled


def test_writes_and_views() -> None:
    tensor = torch.zeros(4)
    before = writes_of(tensor)
    tensor[1:].add_(1)  # by a view
    assert writes_of(tensor) == before + 1
    assert base_of(tensor[1:][:2]) is tensor
    assert base_of(tensor) is tensor
    with torch.inference_mode():
        assert writes_of(torch.ones(2).add_(1)) == 0


def test_storages_have_numbers_and_can_be_found_again() -> None:
    tensor, other = torch.arange(4.0), torch.arange(4.0)
    assert storage_number(tensor) == storage_number(tensor[2:])
    assert storage_number(tensor) != storage_number(other)
    reference = StorageWeakRef(tensor.untyped_storage())
    found = torch.empty(0).set_(storage_at(reference))
    assert torch.equal(found, tensor)
    assert found.data_ptr() == tensor.data_ptr()
    assert not reference.expired()
    del tensor, found
    gc.collect()
    assert reference.expired()


HOOKS: dict[str, Any] = {
    "forward": lambda module: module.register_forward_hook(lambda *_: None),
    "before forward": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "backward": lambda module: module.register_full_backward_hook(lambda *_: None),
    "before backward": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    "of all modules": lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_seen(kind: str) -> None:
    module = nn.Linear(2, 2)
    assert is_called_directly(module)
    handle = HOOKS[kind](module)
    assert not is_called_directly(module)
    handle.remove()
    assert is_called_directly(module)


def test_the_hooks_of_a_forward_pass_are_where_torch_looks_for_them() -> None:
    module, called = nn.Identity(), list[str]()
    for name, hooks in forward_hooks(module).items():
        hooks[0] = lambda *_, name=name: called.append(name)
    module(torch.ones(1))
    assert called == list(forward_hooks(module))


@pytest.mark.filterwarnings("default")  # of the compiler, in whatever version
def test_compiled_modules_are_seen() -> None:
    module = nn.Linear(2, 2)
    assert compiled_from(torch.compile(module, backend="eager")) is module
    assert compiled_from(module) is None
    module.compile(backend="eager")
    assert not is_called_directly(module)
    assert compiler_is_loaded()


def test_attributes_of_an_optimiser_that_hold_hooks() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    registered = [
        optimizer.register_step_pre_hook(lambda *_: None),
        optimizer.register_step_post_hook(lambda *_: None),
        optimizer.register_state_dict_pre_hook(lambda *_: None),
        optimizer.register_state_dict_post_hook(lambda *_: None),
        optimizer.register_load_state_dict_pre_hook(lambda *_: None),
        optimizer.register_load_state_dict_post_hook(lambda *_: None),
    ]
    attributes = vars(optimizer)
    holding = {name for name in attributes if holds_hooks(name)}
    numbers = {handle.id for handle in registered}
    assert {number for name in holding for number in attributes[name]} == numbers
    assert not any(holds_hooks(name) for name in ("state", "param_groups", "defaults"))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A process group of this process alone."""
    store = vars(dist)["FileStore"](str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


def test_there_is_no_store_without_a_process_group() -> None:
    assert default_store() is None


def test_the_store_of_a_process_group(group: Any) -> None:
    default_store().set("key", "value")
    assert default_store().get("key") == b"value"


@pytest.mark.usefixtures("group")
def test_hooks_of_replicate_are_known() -> None:
    module: nn.Module = replicate(nn.Linear(2, 2))
    module.register_forward_hook(lambda *_: None)
    hooks = [hook for held in forward_hooks(module).values() for hook in held.values()]
    found = [is_hook_of_replicate(hook) for hook in hooks]
    assert sorted(found) == [False, True, True]


def test_without_cuda_there_is_no_allocation_to_end() -> None:
    end_allocation(0, (0, 0))


@pytest.mark.gpu
def test_memory_is_allocated_elsewhere_again() -> None:
    device, pool = torch.cuda.current_device(), torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    torch.zeros(1, device="cuda")
    end_allocation(device, pool)
    with pytest.raises(RuntimeError):  # it was ended, and torch knows
        torch._C._cuda_endAllocateToPool(device, pool)


def test_arguments_of_a_kernel_as_triton_describes_them() -> None:
    flags = ((False, False), (False, True), (True, False), (False, False))
    params = [SimpleNamespace(is_constexpr=c, do_not_specialize_on_alignment=d) for c, d in flags]
    assert list(specialised_places(SimpleNamespace(params=params))) == [0, 3]


@pytest.mark.gpu
def test_arguments_of_a_kernel_of_triton() -> None:
    triton = pytest.importorskip("triton")

    def kernel(x: Any, y: Any, size: triton.language.constexpr) -> None:  # type: ignore[name-defined]
        pass

    compiled = triton.JITFunction(kernel, do_not_specialize_on_alignment=["y"])
    assert list(specialised_places(compiled)) == [0]


@pytest.mark.gpu
def test_a_note_in_the_cache_of_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert not has_note("ab")
    leave_note("ab")
    assert has_note("ab")
    assert not has_note("cd")


@pytest.mark.gpu
def test_a_kernel_has_the_same_cache_key_in_every_order() -> None:
    pytest.importorskip("triton")
    from krylov_descent.cuda.triton import kernels

    names = [name for name, value in vars(kernels).items() if hasattr(value, "cache_key")]
    script = (
        "import sys\n"
        "from krylov_descent.cuda.triton import kernels\n"
        "keys = {name: getattr(kernels, name).cache_key for name in sys.argv[1:]}\n"
        "print(sorted(keys.items()))"
    )
    found = [
        subprocess.run([sys.executable, "-c", script, *order], capture_output=True, check=True)
        for order in (names, names[::-1])
    ]
    assert found[0].stdout == found[1].stdout
    fix_cache_keys([object()])  # what Triton's interpreter makes of a function has no key


# Where the source has private names.

SOURCE = Path(krylov_descent.__file__).parent
PRIVATE = re.compile(r"_[A-Za-z]\w*")
# Of Python's own classes: namedtuple.
OF_PYTHON = {"_replace", "_fields", "_asdict"}
# Torch's names that classes of the library have, too, for something else.
EXAMPLES: tuple[Any, ...] = (nn.Linear(1, 1), torch.empty(0), torch, torch.autograd.graph.Node)


def names_defined(trees: list[ast.Module]) -> set[str]:
    """What the library itself calls by a name: functions, classes, variables, attributes."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def private_names(tree: ast.AST, own: set[str]) -> list[str]:
    """Private names of others that are used in a file, as attributes, in imports and in texts."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            of_ours = node.attr in own and isinstance(node.value, ast.Name)
            inherited = any(hasattr(example, node.attr) for example in EXAMPLES)
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in OF_PYTHON or (of_ours and (owner in ("self", "cls") or not inherited)):
                continue
            if node.attr in own and not inherited and "torch" not in ast.unparse(node.value):
                continue
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            foreign = [name for name in names if not name.startswith("krylov_descent.")]
            found += [name for name in foreign if re.search(r"\._[a-zA-Z]", name)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            named = PRIVATE.fullmatch(text) and text not in own | OF_PYTHON
            if named or re.fullmatch(r"torch(\.\w+)*\._[a-zA-Z][\w.]*", text):
                found.append(text)
    return found


def test_no_other_file_has_private_names() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    own = names_defined(list(trees.values()))
    found = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path, tree in trees.items()
        for name in private_names(tree, own)
        if path != Path(private.__file__)
    }
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "torch._foreach_copy_(a, b)",
        "torch._C._cuda_releasePool(device, pool)",
        "dist.distributed_c10d._get_default_store()",
        "module._buffers",
        "module._parameters",
        "self.model._parameters",
        "tensor._version",
        "getattr(node, '_saved_self')",
        "'torch._dynamo' in sys.modules",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch._dynamo import reset",
        "import torch._dynamo",
    ],
)
def test_private_names_are_found(line: str) -> None:
    assert private_names(ast.parse(line), own={"_parameters"})


@pytest.mark.parametrize(
    "line",
    [
        "self._parameters",
        "other._known",
        "self.optimizer._known()",
        "found._replace(loss=1)",
        "torch.__version__",
        "'_known' in vars(self)",
        "from krylov_descent.cuda.kernels import _known",
    ],
)
def test_our_own_names_are_not(line: str) -> None:
    assert not private_names(ast.parse(line), own={"_parameters", "_known"})

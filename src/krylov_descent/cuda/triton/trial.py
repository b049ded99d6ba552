"""The trial of the kernels on a GPU: compiles those that training needs, and checks a product.

`python -m krylov_descent.cuda.triton.trial INDEX` tries them out on one of the GPUs.
"""

import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from krylov_descent.cuda.triton import kernels, split_fp16, vectors
from krylov_descent.cuda.triton.cross_entropy import CrossEntropy
from krylov_descent.cuda.triton.lazy_products import LazyProducts
from krylov_descent.cuda.triton.split_fp16 import BLOCK, NARROW, Function, Product, SplitMatrix
from krylov_descent.runtime.ops import Span
from krylov_descent.runtime.private import has_note, leave_note

# Relative error of a product with sums of 100 terms, in the precision of float32 and of tf32.
TOLERANCES = {True: 1e-6, False: 1e-3}
# Each shape of operands selects another tile; the first one also divides the sum into shares.
SHAPES = {True: ((64, 1024), (4096, 64)), False: ((64, 1024), (1280, 64), (4096, 64))}
# Whether the rows of a and b run along the sum, and the functions of such products: in forward
# passes and Jacobian-vector products, in backward passes, and in weight gradients (none).
FUNCTIONS = {
    (True, True): (kernels.SIGMOID, kernels.TANH, kernels.ADDED_MULTIPLE),
    (True, False): (kernels.MULTIPLE,),
    (False, False): (),
}
THREADS = 16


def was_passed(device: torch.device) -> bool:
    """Whether the kernels have passed their trial on such a GPU, and are in Triton's cache."""
    return has_note(_identity(device))


def load_one(device: torch.device) -> None:
    """Load a kernel; the first one of a process takes half a second, and others milliseconds."""
    with torch.cuda.device(device):
        vectors.sum_columns(torch.zeros(2, 2, device=device), squares=False)


def try_out(device: torch.device) -> None:
    """Compile the kernels into Triton's cache, and raise an error if they do not work.

    Threads compile in parallel, because each kernel takes a part of a second. Kernels that are
    left out here are compiled at their first use.
    """

    def on_device(job: Callable[[], object]) -> None:
        with torch.cuda.device(device):
            job()

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(on_device, job) for job in _jobs(device)]:
            done.result()
    torch.cuda.synchronize(device)
    _check(device)
    leave_note(_identity(device))


def _identity(device: torch.device) -> str:
    """A hash of everything that the compiled kernels depend on."""
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    gpu = torch.cuda.get_device_properties(device)
    versions = triton.__version__, torch.__version__, gpu.name, gpu.major, gpu.minor
    return hashlib.sha256(b"".join([*sources, repr(versions).encode()])).hexdigest()


def _jobs(device: torch.device) -> Iterator[Callable[[], object]]:
    zeros = partial(torch.zeros, dtype=torch.float32, device=device)
    bound = torch.zeros(1, dtype=torch.int32, device=device)
    room = partial(SplitMatrix.empty, zeros(1), exact=True, bound=bound)
    for exact, shapes in SHAPES.items():
        for shape, (along, kinds) in itertools.product(shapes, FUNCTIONS.items()):
            a, b = (room(*(shape if rows else shape[::-1])) for rows in along)
            product = Product(a, b, *along, exact)
            yield partial(split_fp16.product, product)
            for kind in kinds:
                yield partial(_function, product, kind, bound)
            if kinds[-1:] and kinds[-1] >= kernels.MULTIPLE:
                # With one column less, which rules out vectorised loads.
                fewer = replace(b, rows=b.rows - along[1], columns=b.columns - (not along[1]))
                yield partial(_function, replace(product, b=fewer), kinds[-1], bound)
    for columns in (4 * NARROW, 4 * NARROW - 1, NARROW):
        x = zeros(64, columns)
        piece = zeros(1 + x.numel())[1:].view_as(x)  # not aligned, like a piece of a vector
        for matrix in (x, piece):
            yield partial(_split, matrix, bound)
        for kind in range(1, kernels.RELU_BACKWARD + 1):
            yield partial(split_fp16.split, x, bound, kind, x, torch.empty_like(x))
    yield partial(split_fp16.square, room(64, 64), bound)
    for squares, samples in itertools.product((True, False), (2, 100 * BLOCK)):
        yield partial(vectors.sum_columns, zeros(samples, 2), squares=squares)
    rows = zeros(2, BLOCK)
    for x, differentiated in itertools.product((rows, zeros(2, BLOCK - 1)), (False, True)):
        yield partial(_entropy, x, differentiated)
    more, ends = zeros(3, BLOCK), torch.tensor([0, 2], device=device)
    for of, most in ((rows, 2), (more, 3)):
        for span in (None, Span(ends, most)):
            yield partial(vectors.combine, of, of[0, :most], span=span)
            yield partial(vectors.project, of, of[0], span)
    yield partial(vectors.write_row, more, ends[1:], more[0], more[0, :1])
    yield partial(vectors.gram, more, Span(ends, 3))


def _split(x: Tensor, bound: Tensor) -> SplitMatrix:
    split_fp16.find_bound(x, bound)
    return split_fp16.split(x, bound)


def _function(product: Product, kind: int, bound: Tensor) -> None:
    zeros = product.b.unscale.new_zeros(product.sizes[:2])
    if kind == kernels.ADDED_MULTIPLE:
        product = replace(product, added=zeros, bound_added=bound)
    function = Function(min(kind, kernels.MULTIPLE), zeros, bound)
    split_fp16.function_of_product(product, function, torch.empty_like(zeros))


def _entropy(x: Tensor, differentiated: bool) -> None:
    CrossEntropy(LazyProducts(x.device)).compute(x, x, 1.0, differentiated=differentiated)


def _check(device: torch.device) -> None:
    numbers = torch.linspace(-2, 3, 200 * 100, dtype=torch.float32, device=device)
    a, b = numbers.sin().view(2, 100, 100)
    bounds = torch.zeros(2, 1, dtype=torch.int32, device=device)
    exact_product = a.double() @ b.double().t()
    for exact, tolerance in TOLERANCES.items():
        split_a, split_b = _split(a, bounds[0]), _split(b, bounds[1])
        found = split_fp16.product(Product(split_a, split_b, True, True, exact))
        if not (found - exact_product).norm() <= tolerance * exact_product.norm():
            raise RuntimeError("a product is wrong")


if __name__ == "__main__":
    try_out(torch.device("cuda", int(sys.argv[1])))

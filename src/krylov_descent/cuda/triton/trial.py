"""A trial of all kernels: that they can be compiled here, and that a product is right."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from krylov_descent.cuda.triton import basis_vectors, kernels, vectors
from krylov_descent.cuda.triton import split_fp16 as halves
from krylov_descent.cuda.triton.cross_entropy import CrossEntropy
from krylov_descent.cuda.triton.lazy_products import Pending
from krylov_descent.cuda.triton.matrix_cache import Bounds, Knowledge
from krylov_descent.cuda.triton.split_fp16 import Function, Halves, Product

# Of a product of 100 numbers, with the digits of float32 and of tf32.
TOLERANCES = {True: 1e-6, False: 1e-3}
# Products with these rows, columns and terms have one kind of tile each; the first is in shares.
SHAPES = {True: ((64, 1024), (4096, 64)), False: ((64, 1024), (1280, 64), (4096, 64))}
LAYOUTS = ((True, True), (True, False), (False, False))
# What is made of products when it goes forward and along a direction, and back.
FUNCTIONS = {
    (True, True): (kernels.SIGMOID, kernels.TANH, kernels.ADDED_MULTIPLE),
    (True, False): (kernels.MULTIPLE,),
}
KINDS = range(kernels.RELU_BACKWARD + 1)
THREADS = 16


def try_out(device: torch.device) -> None:
    """Compile or load what a training will want, and raise an error where it does not work.

    Side by side, because the first time on a machine each kernel takes a part of a second; later
    they come out of Triton's cache.
    """

    def on_device(job: Callable[[], object]) -> None:
        with torch.cuda.device(device):
            job()

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(on_device, job) for job in _jobs(device)]:
            done.result()
    with suppress(RuntimeError):  # whoever needs it will be told
        torch.linalg.cholesky_ex(torch.eye(2, device=device))  # loads a library
    torch.cuda.synchronize(device)
    _check(device)


def _jobs(device: torch.device) -> Iterator[Callable[[], object]]:
    for three, shapes in SHAPES.items():
        for shape, along in itertools.product(shapes, LAYOUTS):
            a, b = (_nothing(shape if k else shape[::-1], device) for k in along)
            product = Product(a, b, *along, three)
            yield partial(halves.product, product)
            for kind in FUNCTIONS.get(along, ()):
                yield partial(_make, product, kind)
                if kind >= kernels.MULTIPLE:
                    # With a column less, where several numbers cannot be read at once.
                    yield partial(_make, replace(product, b=_less_a_column(b, along[1])), kind)
    yield partial(Bounds, device)
    bound = torch.zeros(1, dtype=torch.int32, device=device)
    for columns in (4 * halves.NARROW, 4 * halves.NARROW - 1, halves.NARROW):
        x = torch.ones(64, columns, dtype=torch.float32, device=device)
        yield partial(halves.find_bound, x, bound)
        for kind in KINDS:
            yield partial(halves.split, x, bound, kind, x, torch.empty_like(x))
        # A piece of a vector, which begins anywhere.
        piece = x.new_ones(1 + x.numel())[1:].view_as(x)
        yield partial(halves.find_bound, piece, bound)
        yield partial(halves.split, piece, bound)
    rows = torch.zeros(2, halves.BLOCK, dtype=torch.float32, device=device)
    yield from _basis(rows)
    for squares, samples in itertools.product((True, False), (2, 100 * halves.BLOCK)):
        x = rows.new_zeros(samples, 2)
        yield partial(vectors.sum_columns, x, squares=squares)
    yield partial(halves.square, _nothing((64, 64), device), bound)
    for x in (rows, rows.view(-1)[:-2].view(2, -1)):
        for differentiated in (False, True):
            yield partial(_entropies, x, differentiated)


def _basis(rows: Tensor) -> Iterator[Callable[[], object]]:
    """What is done with rows of a basis, which stay as they are."""
    few, number, vector = rows[0, : len(rows)], rows[0, 0], torch.empty_like(rows[0])
    yield partial(basis_vectors.combine, rows, few)
    yield partial(basis_vectors.subtract_rows, vector, None, rows, few, rows[0])
    yield partial(basis_vectors.project, rows, rows[0])
    yield partial(basis_vectors.project, rows.new_zeros(3, rows.shape[1]), rows[0])
    yield partial(basis_vectors.gram, rows)
    yield partial(basis_vectors.scale_of_length, number, 1.0, number, vector[:1])
    scale_of_remainder = partial(basis_vectors.scale_of_remainder, rows[0], few, few[1:], 1.0)
    yield partial(scale_of_remainder, vector[: len(few)], vector[:1])


def _entropies(x: Tensor, differentiated: bool) -> None:
    bounds, known = Bounds(x.device), Knowledge(x.device, None)
    entropies = CrossEntropy(x.device, known, bounds, Pending(x.device, known, bounds))
    entropies.compute(x, x, 1.0, differentiated=differentiated)


def _less_a_column(b: Halves, along: bool) -> Halves:
    """Of the product, that is; which is a row of b where its rows are along the sum."""
    return replace(b, rows=b.rows - 1) if along else replace(b, columns=b.columns - 1)


def _make(product: Product, kind: int) -> None:
    """A function of a product of zeros."""
    zeros = product.b.unscale.new_zeros(product.sizes[:2])
    bound = zeros.view(-1)[:1].view(torch.int32)
    if kind == kernels.ADDED_MULTIPLE:
        product = replace(product, added=zeros, bound_added=bound)
    function = Function(min(kind, kernels.MULTIPLE), zeros, bound)
    halves.function_of_product(product, function, torch.empty_like(zeros))


def _nothing(shape: tuple[int, ...], device: torch.device) -> Halves:
    zeros = torch.zeros(shape, dtype=torch.half, device=device)
    return Halves(
        shape[0], shape[1], zeros, zeros, torch.ones(1, dtype=torch.float32, device=device), None
    )


def _check(device: torch.device) -> None:
    a, b = (
        torch.linspace(-2, 3, 200 * 100, dtype=torch.float32, device=device).sin().view(2, 100, 100)
    )

    def split(x: Tensor) -> Halves:
        bound = torch.zeros(1, dtype=torch.int32, device=device)
        halves.find_bound(x, bound)
        return halves.split(x, bound)

    exact = a.double() @ b.double().t()
    for three, tolerance in TOLERANCES.items():
        found = halves.product(Product(split(a), split(b), True, True, three))
        if not (found - exact).norm() <= tolerance * exact.norm():
            raise RuntimeError("a product is wrong")

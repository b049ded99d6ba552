"""The Triton kernels of `vectors`."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["rows", "columns", "span"], do_not_specialize_on_alignment=["x", "parts"]
)
def sum_columns(
    x, parts, rows, columns, span, SQUARES: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """parts [programs, columns] = Σ_r x[r, c] over a span of rows; SQUARES appends Σ_r x[r, c]²."""
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, rows)
    r, c = tl.arange(0, R)[:, None], tl.program_id(0) * C + tl.arange(0, C)
    total, squares = tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
    for start in range(begin, end, R):
        inside = (start + r < end) & (c[None, :] < columns)
        numbers = tl.load(x + (start + r) * columns + c[None, :], inside, 0.0)
        total += numbers
        if SQUARES:
            squares += numbers * numbers
    place = tl.program_id(1) * (columns * (1 + SQUARES)) + c
    tl.store(parts + place, tl.sum(total, 0), c < columns)
    if SQUARES:
        tl.store(parts + place + columns, tl.sum(squares, 0), c < columns)


@triton.jit(
    do_not_specialize=["programs", "count", "side"],
    do_not_specialize_on_alignment=["parts", "out"],
)
def add_up_parts(parts, out, programs, count, side, P: tl.constexpr, R: tl.constexpr):
    """out [count] = Σ parts [programs, count] over programs, with programs ≤ P.

    If side is not 0, out is a symmetric matrix [side, side], and only its lower triangle has parts.
    """
    p, r = tl.arange(0, P)[:, None], tl.program_id(0) * R + tl.arange(0, R)
    place = r
    if side != 0:
        place = tl.maximum(r // side, r % side) * side + tl.minimum(r // side, r % side)
    inside = (p < programs) & (r < count)[None, :]
    numbers = tl.load(parts + p * count + place[None, :], inside, 0.0)
    tl.store(out + r, tl.sum(numbers, 0), r < count)


@triton.jit
def _span(rows, ends, count, stride, SPANNED: tl.constexpr):
    """The first row of a span, and how many rows it has; with SPANNED they are read from ends."""
    if SPANNED:
        first = tl.maximum(tl.load(ends), 0)
        count = tl.minimum(tl.load(ends + 1) - first, count).to(tl.int32)
        rows += first * stride
    return rows, count


@triton.jit(
    do_not_specialize=["size", "count", "stride", "sign"],
    do_not_specialize_on_alignment=["rows", "coefficients", "start", "out", "ends"],
)
def combine(
    rows,
    coefficients,
    start,
    out,
    ends,
    size,
    count,
    stride,
    sign,
    SPANNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [size] = start + sign · Σ_k coefficients[k] rows[k, :]; the sum alone if sign is 0."""
    rows, count = _span(rows, ends, count, stride, SPANNED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    # From the last row to the first: the rows `project` read last may still be in the L2 cache.
    row = rows + (count - 1).to(tl.int64) * stride + at
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(count):
        total += tl.load(coefficients + (count - 1 - k)) * tl.load(row, inside, 0.0)
        row -= stride
    if sign != 0:
        total = tl.load(start + at, inside, 0.0) + sign * total
    tl.store(out + at, total, inside)


@triton.jit(
    do_not_specialize=["size", "count", "stride", "span"],
    do_not_specialize_on_alignment=["rows", "vector", "parts", "ends"],
)
def project(
    rows,
    vector,
    parts,
    ends,
    size,
    count,
    stride,
    span,
    SPANNED: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """parts [programs, count] = Σ_c rows[:, c] vector[c], each program over a span of columns."""
    rows, there_are = _span(rows, ends, count, stride, SPANNED)
    begin = tl.program_id(0) * span
    end = tl.minimum(begin + span, size)
    r, c = tl.arange(0, R), tl.arange(0, C)
    for first in range(0, count, R):
        row = rows + (first + r).to(tl.int64)[:, None] * stride
        total = tl.zeros((R, C), tl.float32)
        if first < there_are:
            for start in range(begin, end, C):
                at, inside = start + c, start + c < end
                there = (first + r < there_are)[:, None] & inside[None, :]
                numbers = tl.load(row + at[None, :], there, 0.0)
                total += numbers * tl.load(vector + at, inside, 0.0)[None, :]
        place = tl.program_id(0) * count + first + r
        tl.store(parts + place, tl.sum(total, 1), first + r < count)


@triton.jit(
    do_not_specialize=["size", "stride"],
    do_not_specialize_on_alignment=["rows", "vector", "scale", "place"],
)
def write_row(rows, vector, scale, place, size, stride, BLOCK: tl.constexpr):
    """rows[place, :] = vector [size] times a scale."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(vector + at, at < size, 0.0) * tl.load(scale)
    tl.store(rows + tl.load(place) * stride + at, numbers, at < size)


@triton.jit
def _products(a, b):
    # From two [P, R, C] to [R, R, P, C]: with warps along P, no data moves between threads.
    return tl.permute(a, (1, 0, 2))[:, None, :, :] * tl.permute(b, (1, 0, 2))[None, :, :, :]


@triton.jit(
    do_not_specialize=["size", "count", "stride", "span"],
    do_not_specialize_on_alignment=["rows", "parts", "ends"],
)
def gram(
    rows,
    parts,
    ends,
    size,
    count,
    stride,
    span,
    SPANNED: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    TIMES: tl.constexpr,
):
    """parts [programs, count, count] = Σ_c rows[:, c] rows[:, c]ᵀ, each over a span of columns.

    Only the lower triangle is computed, by pairs of blocks of R rows. A program has P pairs, one
    per warp, and reads shared blocks from memory once. Tensor cores would lose precision.
    """
    rows, there_are = _span(rows, ends, count, stride, SPANNED)
    begin = tl.program_id(0) * span
    end = tl.minimum(begin + span, size)
    # Pairs (high, low) of the lower triangle, row by row: (0, 0), (1, 0), (1, 1), (2, 0), …
    pair = tl.program_id(1) * P + tl.arange(0, P)
    high = tl.zeros_like(pair)
    for block in range(1, tl.cdiv(count, R)):
        high += (pair >= block * (block + 1) // 2).to(tl.int32)
    low = pair - high * (high + 1) // 2
    # A program whose rows are all zero has nothing to add up.
    end = tl.where(tl.min(high) * R < there_are, end, begin)
    whole = begin + (end - begin) // (TIMES * C) * (TIMES * C)
    r, c = tl.arange(0, R)[None, :], tl.arange(0, C)[None, None, :]
    i, j = high[:, None] * R + r, low[:, None] * R + r
    # Rows beyond count are clamped for loading; the final mask drops their products.
    left = tl.minimum(i, count - 1)[:, :, None] * stride + c
    right = tl.minimum(j, count - 1)[:, :, None] * stride + c
    total = tl.zeros((R, R, P, C), tl.float32)
    for start in range(begin, whole, TIMES * C):
        for further in tl.static_range(0, TIMES * C, C):
            at = rows + start + further
            total += _products(tl.load(at + left), tl.load(at + right))
    for start in range(whole, end, C):
        at, inside = rows + start, start + c < end
        a, b = tl.load(at + left, inside, 0.0), tl.load(at + right, inside, 0.0)
        total += _products(a, b)
    i, j = tl.trans(i)[:, None, :], tl.trans(j)[None, :, :]
    place = tl.program_id(0) * count * count + i * count + j
    tl.store(parts + place, tl.sum(total, 3), (i < count) & (j <= i))

"""The kernels of `vectors`, in Triton's language."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["rows", "columns", "span"], do_not_specialize_on_alignment=["x", "parts"]
)
def sum_columns(
    x, parts, rows, columns, span, SQUARES: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """parts [programs, columns] = Σ x[r, c] over a span of rows each; and behind it Σ x[r, c]²."""
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
    """out [count] = Σ parts [programs, count], of which there are P at most.

    If there is a side, a matrix [side, side] is symmetric, and has no parts above its diagonal.
    """
    p, r = tl.arange(0, P)[:, None], tl.program_id(0) * R + tl.arange(0, R)
    place = r
    if side != 0:
        place = tl.maximum(r // side, r % side) * side + tl.minimum(r // side, r % side)
    inside = (p < programs) & (r < count)[None, :]
    numbers = tl.load(parts + p * count + place[None, :], inside, 0.0)
    tl.store(out + r, tl.sum(numbers, 0), r < count)

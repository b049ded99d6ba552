"""The kernels of `foresight`, in Triton's language."""

import triton
import triton.language as tl

EPSILON = tl.constexpr(2.0**-52)


SCALARS = tl.constexpr(4)


@triton.jit(do_not_specialize=["count", "size"])
def fetch(sent, coefficients, state, count, size, BLOCK: tl.constexpr):
    """coefficients [count] and state [size - count], out of the host's memory."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(sent + at, at < size, 0.0)
    tl.store(coefficients + at, numbers.to(tl.float32), at < count)
    tl.store(state + at - count, numbers, (at >= count) & (at < size))


@triton.jit(do_not_specialize=["count", "lines"])
def look_ahead(value, projected, state, coefficients, results, count, lines, R: tl.constexpr):
    """The point of the next trial, if that of the last one is accepted; all of it for the host.

    Args:
        value: of the function at the last trial, float64.
        projected: Vᵀ∇f there [count], float32.
        state: of BFGS at that trial, as `foresight` sends it, float64; then that of the next one.
        coefficients: of the next point [count], float32.
        results: in the host's memory, float64: lines of the value, Vᵀ∇f and the next point's
            coefficients [lines, 1 + 2 · count].
        count: how many rows there are, at most R.
        lines: written in turn.
        R: a power of two.
    """
    i = tl.arange(0, R)
    j = tl.arange(0, R)
    row, column = i < count, j < count
    square = i[:, None] * count + j[None, :]
    inside = row[:, None] & column[None, :]
    step, slope = tl.load(state), tl.load(state + 1)
    fresh, turn = tl.load(state + 2), tl.load(state + 3)
    point_at = state + SCALARS
    direction_at, gradient_at = point_at + count, point_at + 2 * count
    inverse_at, map_at = point_at + 3 * count, point_at + 3 * count + count * count
    to_coordinates = tl.load(map_at + square, inside, 0.0)
    along_rows = tl.load(projected + j, column, 0.0).to(tl.float64)
    gradient = tl.sum(to_coordinates * along_rows[None, :], 1)

    # Learn of the trial, as `bfgs._InverseHessian.update` does.
    direction = tl.load(direction_at + i, row, 0.0)
    moved = step * direction
    change = gradient - tl.load(gradient_at + i, row, 0.0)
    curvature = tl.sum(moved * change, 0)
    squared = tl.sum(change * change, 0)
    learns = curvature > EPSILON * tl.sqrt(tl.sum(moved * moved, 0)) * tl.sqrt(squared)
    curvature = tl.where(learns, curvature, 1.0)
    first = learns & (fresh != 0)
    inverse = tl.load(inverse_at + square, inside, 0.0)
    inverse *= tl.where(first, tl.maximum(1.0, curvature / tl.where(first, squared, 1.0)), 1.0)
    image = tl.sum(inverse * change[None, :], 1)
    weight = (1 + tl.sum(change * image, 0) / curvature) / curvature
    half = 0.5 * weight * moved - image / curvature
    update = moved[:, None] * half[None, :] + half[:, None] * moved[None, :]
    inverse = tl.where(learns, inverse + update, inverse)

    # Where BFGS goes from there.
    point = tl.load(point_at + i, row, 0.0) + moved
    last_decrease = -step * (slope + tl.sum(gradient * direction, 0)) / 2
    direction = -tl.sum(inverse * gradient[None, :], 1)
    slope = tl.sum(gradient * direction, 0)
    step = tl.minimum(1.0, 1.01 * last_decrease / (-slope / 2))
    step = tl.where(step == 0, 1.0, step)
    ahead = point + step * direction
    found = tl.sum(to_coordinates * ahead[:, None], 0)
    line = results + (turn.to(tl.int32) % lines) * (1 + 2 * count)
    tl.debug_barrier()  # all of it was read
    tl.store(line, tl.load(value))
    tl.store(line + 1 + j, along_rows, column)
    tl.store(line + 1 + count + j, found, column)
    tl.store(coefficients + j, found.to(tl.float32), column)
    tl.store(state, step)
    tl.store(state + 1, slope)
    tl.store(state + 2, tl.where(learns, 0.0, fresh))
    tl.store(state + 3, turn + 1)
    tl.store(point_at + i, point, row)
    tl.store(direction_at + i, direction, row)
    tl.store(gradient_at + i, gradient, row)
    tl.store(inverse_at + square, inverse, inside)

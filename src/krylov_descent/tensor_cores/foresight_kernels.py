"""The kernels of `foresight`, in Triton's language."""

import triton
import triton.language as tl

from krylov_descent import line_search

EPSILON = tl.constexpr(2.0**-52)
INFINITY = tl.constexpr(float("inf"))

# Those of the line search.
SUFFICIENT_DECREASE = tl.constexpr(line_search.SUFFICIENT_DECREASE)
CURVATURE = tl.constexpr(line_search.CURVATURE)
NOISE_ALLOWANCE = tl.constexpr(line_search.NOISE_ALLOWANCE)
WILD = tl.constexpr(line_search.WILD)
SMALLEST_GROWTH = tl.constexpr(line_search.SMALLEST_GROWTH)
LARGEST_GROWTH = tl.constexpr(line_search.LARGEST_GROWTH)
NEAREST = tl.constexpr(line_search.NEAREST)
FARTHEST = tl.constexpr(line_search.FARTHEST)
ENOUGH_SHRINKAGE = tl.constexpr(line_search.ENOUGH_SHRINKAGE)

# Where a state has its scalars, and how many there are. A point is a step, and value and slope
# there; one that is not there has an infinite step.
TURN, FRESH, NOISE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
STEP, VALUE, SLOPE = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
SHORTER, LOW, HIGH = tl.constexpr(6), tl.constexpr(9), tl.constexpr(12)
SCALARS = tl.constexpr(15)


@triton.jit(do_not_specialize=["count", "size"])
def fetch(sent, coefficients, state, count, size, BLOCK: tl.constexpr):
    """coefficients [count] and state [size - count], out of the host's memory."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(sent + at, at < size, 0.0)
    tl.store(coefficients + at, numbers.to(tl.float32), at < count)
    tl.store(state + at - count, numbers, (at >= count) & (at < size))


@triton.jit(do_not_specialize=["count", "lines"])
def look_ahead(value, projected, state, coefficients, results, count, lines, R: tl.constexpr):
    """The point of the next trial, as `minimize_bfgs` finds it; all of it for the host.

    Any point where a line search ends without a step, after which most searches end.

    There are no branches: what threads sum up may differ in the last bit from one to the other, and
    so may their decisions.

    Args:
        value: of the function at the last trial, float64.
        projected: Vᵀ∇f there [count], float32.
        state: of the search at that trial, as `foresight` sends it, float64; then that of the next
            one.
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
    turn, fresh, noise = _load_three(state + TURN)
    step, start_value, start_slope = _load_three(state + STEP)
    shorter, low = _load_three(state + SHORTER), _load_three(state + LOW)
    high = _load_three(state + HIGH)
    point_at = state + SCALARS
    direction_at, gradient_at = point_at + count, point_at + 2 * count
    inverse_at, map_at = point_at + 3 * count, point_at + 3 * count + count * count
    to_basis = tl.load(map_at + square, inside, 0.0)
    along_rows = tl.load(projected + i, row, 0.0).to(tl.float64)
    gradient = tl.sum(to_basis * along_rows[:, None], 0)
    direction = tl.load(direction_at + j, column, 0.0)
    trial = (step, tl.load(value), tl.sum(gradient * direction, 0))

    # What the line search makes of the trial.
    allowance = NOISE_ALLOWANCE * tl.maximum(noise, EPSILON * tl.abs(start_value))
    sound, too_far, too_short = _judge(trial, start_value, start_slope, allowance)
    accepted = ~(too_far | too_short)
    last_width = high[0] - low[0]
    shorter = _choose(too_short, low, shorter)
    low = _choose(too_short, trial, low)
    usable = (
        step,
        tl.where(sound, trial[1], float("nan")),
        tl.where(sound, trial[2], float("nan")),
    )
    high = _choose(too_far, usable, high)
    step = _step_along(shorter, low, high, last_width, allowance)

    # If it is accepted, BFGS learns of it, as `bfgs._InverseHessian.update` does.
    moved = trial[0] * direction
    start_gradient = tl.load(gradient_at + j, column, 0.0)
    change = gradient - start_gradient
    curvature = tl.sum(moved * change, 0)
    squared = tl.sum(change * change, 0)
    learns = curvature > EPSILON * tl.sqrt(tl.sum(moved * moved, 0)) * tl.sqrt(squared)
    learns = learns & accepted
    curvature = tl.where(learns, curvature, 1.0)
    first = learns & (fresh != 0)
    inverse = tl.load(inverse_at + square, inside, 0.0)
    inverse *= tl.where(first, tl.maximum(1.0, curvature / tl.where(first, squared, 1.0)), 1.0)
    image = tl.sum(inverse * change[:, None], 0)
    reciprocal = 1 / curvature
    weight = (1 + tl.sum(change * image, 0) * reciprocal) * reciprocal
    half = tl.where(learns, 0.5 * weight * moved - image * reciprocal, 0.0)

    # And goes on from there, along another line.
    point = tl.load(point_at + j, column, 0.0)
    point = tl.where(accepted, point + moved, point)
    inverse += moved[:, None] * half[None, :] + half[:, None] * moved[None, :]
    downhill = tl.sum(inverse * gradient[:, None], 0)
    direction = tl.where(accepted, -downhill, direction)
    next_slope = tl.sum(gradient * direction, 0)
    last_decrease = -trial[0] * (start_slope + trial[2]) / 2
    step = tl.where(accepted, _first_step(last_decrease, -next_slope / 2), step)
    start = (0.0, trial[1], next_slope)
    low, shorter = _choose(accepted, start, low), _choose(accepted, start, shorter)
    high = _choose(accepted, (INFINITY, float("nan"), float("nan")), high)

    ahead = point + step * direction
    found = tl.sum(to_basis * ahead[None, :], 1)
    found = tl.where(tl.abs(found) < INFINITY, found, 0.0)  # there may be no such point
    line = results + (turn.to(tl.int32) % lines) * (1 + 2 * count)
    tl.debug_barrier()  # all of it was read
    tl.store(line, trial[1])
    tl.store(line + 1 + i, along_rows, row)
    tl.store(line + 1 + count + i, found, row)
    tl.store(coefficients + i, found.to(tl.float32), row)
    tl.store(state + TURN, turn + 1)
    tl.store(state + FRESH, tl.where(learns, 0.0, fresh))
    tl.store(state + STEP, step)
    tl.store(state + VALUE, tl.where(accepted, trial[1], start_value))
    tl.store(state + SLOPE, tl.where(accepted, next_slope, start_slope))
    _store_three(state + SHORTER, shorter)
    _store_three(state + LOW, low)
    _store_three(state + HIGH, high)
    tl.store(point_at + j, point, column)
    tl.store(direction_at + j, direction, column)
    tl.store(gradient_at + j, tl.where(accepted, gradient, start_gradient), column)
    tl.store(inverse_at + square, inverse, inside)


@triton.jit
def _judge(trial, start_value, start_slope, allowance):
    """Whether a trial is sound, too far and too short, as `wolfe_search` has it."""
    step, value, slope = trial
    change = value - start_value
    tame = WILD * tl.maximum(-start_slope, (tl.abs(change) + allowance) / step)
    sound = (tl.abs(value) < INFINITY) & (tl.abs(slope) < INFINITY) & (tl.abs(slope) <= tame)
    values_tell = tl.abs(change) >= allowance
    no_decrease = values_tell & (change > SUFFICIENT_DECREASE * step * start_slope)
    too_far = ~sound | no_decrease | (slope > -CURVATURE * start_slope)
    too_short = ~too_far & (slope < CURVATURE * start_slope)
    return sound, too_far, too_short


@triton.jit
def _step_along(shorter, low, high, last_width, allowance):
    """The next step along a line, as `wolfe_search` finds it after a trial that was rejected."""
    bracketed = high[0] < INFINITY
    width = high[0] - low[0]
    left, right = _choose(bracketed, low, shorter), _choose(bracketed, high, low)
    minimum = _minimum(left, right, allowance)
    middle = tl.where(low[0] > 0, tl.sqrt(low[0]) * tl.sqrt(high[0]), high[0] / 10)
    longest = LARGEST_GROWTH * low[0]
    least = tl.where(bracketed, low[0] + NEAREST * width, SMALLEST_GROWTH * low[0])
    most = tl.where(bracketed, low[0] + FARTHEST * width, longest)
    shrinks = ~bracketed | (width <= ENOUGH_SHRINKAGE * last_width)
    interpolated = tl.minimum(tl.maximum(minimum, least), most)
    otherwise = tl.where(bracketed, middle, longest)
    return tl.where(shrinks & (minimum >= 0), interpolated, otherwise)  # which NaN is not


@triton.jit
def _minimum(left, right, allowance):
    """`line_search._minimum`; NaN where there is none."""
    width = right[0] - left[0]
    secant = (right[1] - left[1]) / width
    noisy = allowance > 0.1 * width * tl.maximum(-left[2], tl.abs(right[2]))
    parabola = right[1] > left[1]
    linear = tl.where(parabola, secant - left[2], 3 * secant - 2 * left[2] - right[2])
    linear = tl.where(noisy, 0.5 * (right[2] - left[2]), linear)
    square = tl.where(noisy | parabola, 0.0, 3 * (left[2] + right[2] - 2 * secant))

    # As `line_search._zero_of_derivative`.
    scale = tl.maximum(-left[2], tl.maximum(tl.abs(linear), tl.abs(square)))
    slope, linear, square = left[2] / scale, linear / scale, square / scale
    discriminant = linear * linear - slope * square
    divisor = linear + tl.sqrt(discriminant)  # NaN where there is no root, or nothing to go by
    return tl.where(divisor > 0, left[0] - width * slope / divisor, float("nan"))


@triton.jit
def _first_step(last_decrease, predicted_decrease):
    """`bfgs._first_step`."""
    step = 1.01 * last_decrease / predicted_decrease
    return tl.where((step < 1) & (step != 0), step, 1.0)


@triton.jit
def _choose(first, one, other):
    """One of two points."""
    return (
        tl.where(first, one[0], other[0]),
        tl.where(first, one[1], other[1]),
        tl.where(first, one[2], other[2]),
    )


@triton.jit
def _load_three(at):
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _store_three(at, numbers):
    tl.store(at, numbers[0])
    tl.store(at + 1, numbers[1])
    tl.store(at + 2, numbers[2])

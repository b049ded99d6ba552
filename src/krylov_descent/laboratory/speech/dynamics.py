"""What is made of coefficients over time: differences, normalisation, context.

All functions take the frames of many utterances, one after another, and `offsets` [U + 1] that say
where each begins; beyond its ends an utterance goes on with its first or last frame.
"""

import numpy as np

from krylov_descent.laboratory.speech.framing import Array, Places

DELTA_REACH = 2
CONTEXT = 9
SMALLEST_DEVIATION = 1e-4


def neighbours(offsets: Places, shift: int) -> Places:
    """[N] the frame `shift` later in the same utterance, or its last (earlier: its first)."""
    lengths = np.diff(offsets)
    first, last = np.repeat(offsets[:-1], lengths), np.repeat(offsets[1:] - 1, lengths)
    shifted: Places = np.clip(np.arange(offsets[-1]) + shift, first, last)
    return shifted


def deltas(frames: Array, offsets: Places) -> Array:
    """Slopes of the least-squares lines through five frames [N, d] each."""
    total = np.zeros_like(frames)
    for k in range(1, DELTA_REACH + 1):
        total += k * (frames[neighbours(offsets, k)] - frames[neighbours(offsets, -k)])
    return total / np.float32(2 * sum(k * k for k in range(1, DELTA_REACH + 1)))


def normalized(frames: Array, offsets: Places) -> Array:
    """Frames [N, d] with mean 0 and variance 1 in each utterance; constants become 0."""
    lengths = np.diff(offsets)

    def means(values: Array) -> Array:
        sums = np.add.reduceat(values, offsets[:-1], axis=0, dtype=np.float64)
        return np.repeat((sums / lengths[:, None]).astype(np.float32), lengths, axis=0)

    centred: Array = frames - means(frames)
    deviations: Array = np.sqrt(means(np.square(centred)))
    normal: Array = centred / deviations.clip(SMALLEST_DEVIATION)
    return normal


def with_dynamics(static: Array, offsets: Places) -> Array:
    """Coefficients, their Δ and their ΔΔ, normalised per utterance: [N, d] to [N, 3d]."""
    first = deltas(static, offsets)
    return normalized(np.hstack([static, first, deltas(first, offsets)]), offsets)


def with_context(frames: Array, offsets: Places) -> Array:
    """Each frame [N, d] between the four before and the four after it: [N, 9d]."""
    reach = CONTEXT // 2
    return np.hstack([frames[neighbours(offsets, k)] for k in range(-reach, reach + 1)])

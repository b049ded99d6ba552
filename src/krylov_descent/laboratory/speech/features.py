"""From signals to what the network and the Gaussian mixtures see."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from krylov_descent.laboratory.speech.dynamics import (
    CONTEXT,
    normalized,
    with_context,
    with_dynamics,
)
from krylov_descent.laboratory.speech.framing import (
    Array,
    Places,
    frame_offsets,
    frames_of,
    log_energies,
    power_spectra,
)
from krylov_descent.laboratory.speech.mfcc import mfcc
from krylov_descent.laboratory.speech.plp import plp

COEFFICIENTS = 39
# The paper's 352: nine frames of 39 and the log energy of the middle one.
INPUTS = CONTEXT * COEFFICIENTS + 1
# The columns of the inputs that hold the middle frame.
MIDDLE = slice(CONTEXT // 2 * COEFFICIENTS, (CONTEXT // 2 + 1) * COEFFICIENTS)


@dataclass(frozen=True, eq=False)
class Features:
    """Of N frames of U utterances, float32, mean 0 and variance 1 in each utterance.

    Attributes:
        offsets: [U + 1] where the frames of each utterance begin.
        plp: [N, 39], 13 cepstra with Δ and ΔΔ.
        mfcc: [N, 39], likewise.
        log_energy: [N, 1].
    """

    offsets: Places
    plp: Array
    mfcc: Array
    log_energy: Array

    def inputs(self) -> Array:
        """[N, 352]: the PLP of nine frames, and the log energy."""
        return np.hstack([with_context(self.plp, self.offsets), self.log_energy])


def extract(signals: Sequence[Array]) -> Features:
    """Features of signals at 8 kHz; about 3 KB of memory a frame while it works."""
    bounds = np.cumsum([0, *(len(signal) for signal in signals)])
    offsets = frame_offsets(bounds)
    frames = frames_of(np.concatenate(signals), bounds)
    power = power_spectra(frames)
    return Features(
        offsets=offsets,
        plp=with_dynamics(plp(power), offsets),
        mfcc=with_dynamics(mfcc(power), offsets),
        log_energy=normalized(log_energies(frames), offsets),
    )

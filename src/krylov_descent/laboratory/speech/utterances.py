"""Utterances as slices of one array of frames: what the signal half hands to the HMM half."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

__all__ = ["CLEAN", "Utterances"]

# The noise of an utterance that has none; its SNR is infinite.
CLEAN = "clean"


@dataclass(frozen=True, eq=False)
class Utterances:
    """U spoken digits of N frames of d coefficients, one after another.

    Attributes:
        frames: [N, d] float32.
        offsets: [U + 1] int64; utterance u is `frames[offsets[u]:offsets[u + 1]]`.
        digit: [U] int64, 0 to 9.
        speaker: [U] int64, 1 to 60.
        snr: [U] float64, signal-to-noise ratio in decibels; inf for clean speech.
        noise: [U] str, the class of noise, "babble", or "clean".
    """

    frames: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.int64]
    digit: npt.NDArray[np.int64]
    speaker: npt.NDArray[np.int64]
    snr: npt.NDArray[np.float64]
    noise: npt.NDArray[np.str_]

    def __post_init__(self) -> None:
        count = len(self.digit)
        if self.frames.ndim != 2:
            raise ValueError(f"`frames` must be [frames, coefficients], found {self.frames.shape}")
        for name in ("speaker", "snr", "noise"):
            if getattr(self, name).shape != (count,):
                raise ValueError(
                    f"`{name}` must have one entry for each of the {count} digits, found shape "
                    f"{getattr(self, name).shape}"
                )
        lengths = np.diff(self.offsets)
        if (
            self.offsets.shape != (count + 1,)
            or self.offsets[0] != 0
            or self.offsets[-1] != len(self.frames)
            or (lengths < 1).any()
        ):
            raise ValueError(
                f"`offsets` must rise from 0 to the {len(self.frames)} frames in {count} steps of "
                "at least one frame"
            )

    def __len__(self) -> int:
        return len(self.digit)

    def __getitem__(self, index: int) -> npt.NDArray[np.float32]:
        """The frames [n, d] of one utterance, without a copy."""
        return self.frames[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[npt.NDArray[np.float32]]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[U] the frames of each utterance."""
        return np.diff(self.offsets)

    def frame_rows(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """[N] whether a frame belongs to an utterance that is chosen [U]."""
        return np.repeat(chosen, self.lengths)

    def select(self, chosen: npt.NDArray[np.bool_]) -> "Utterances":
        """The utterances where `chosen` [U] is true, in order; copies their frames."""
        lengths = self.lengths[chosen]
        return Utterances(
            frames=self.frames[self.frame_rows(chosen)],
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            digit=self.digit[chosen],
            speaker=self.speaker[chosen],
            snr=self.snr[chosen],
            noise=self.noise[chosen],
        )

    def with_frames(self, frames: npt.NDArray[np.float32]) -> "Utterances":
        """The same utterances described by other coefficients [N, d']."""
        return replace(self, frames=frames)

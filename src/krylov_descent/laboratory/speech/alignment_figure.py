"""An alignment as a picture: the phones of a few utterances over their spectrograms."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from krylov_descent.laboratory.speech.archives import SAMPLE_RATE, SpokenDigits
from krylov_descent.laboratory.speech.corpus import CorpusPart
from krylov_descent.laboratory.speech.framing import STEP, frames_of, power_spectra
from krylov_descent.laboratory.speech.lexicon import DIGITS, PHONE_OF_STATE, PHONES

COLUMNS = 2
FRAME_SECONDS = STEP / SAMPLE_RATE
HIGHEST_KHZ = SAMPLE_RATE / 2_000
# Decibels below the loudest that are still told apart.
RANGE = 60.0


@dataclass(frozen=True, eq=False)
class AlignedExample:
    """One utterance to draw.

    Attributes:
        title: above it.
        power: [T, bins], its power spectrum.
        labels: [T], the state of each frame.
    """

    title: str
    power: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


def clean_examples(part: CorpusPart, digits: SpokenDigits) -> list[AlignedExample]:
    """One clean utterance of each digit, by as many speakers as there are.

    Args:
        part: whose labels are shown.
        digits: the recordings that it was made from, for the spectrograms.
    """
    about = part.plp
    speakers = np.unique(about.speaker)
    found = []
    for digit in range(DIGITS):
        speaker = speakers[digit % len(speakers)]
        utterance = np.flatnonzero(
            np.isinf(about.snr) & (about.digit == digit) & (about.speaker == speaker)
        )[0]
        # A part takes a speaker's repetitions from the first on.
        recording = np.flatnonzero((digits.digit == digit) & (digits.speaker == speaker))[0]
        signal = digits.signal(int(recording))
        found.append(
            AlignedExample(
                title=f"{digit}, speaker {speaker}",
                power=power_spectra(frames_of(signal, np.array([0, len(signal)]))),
                labels=part.states[about.offsets[utterance] : about.offsets[utterance + 1]],
            )
        )
    return found


def draw_alignments(examples: Sequence[AlignedExample], path: Path) -> None:
    """Borders of phones as strong lines, of states as faint ones, over the spectrograms.

    Args:
        examples: at least one.
        path: of the PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(examples) // COLUMNS)
    figure = Figure(figsize=(5.5 * COLUMNS, 2.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axes in grid[len(examples) :]:
        axes.set_axis_off()
    for axes, example in zip(grid, examples, strict=False):
        decibels = 10 * np.log10(np.maximum(example.power, np.finfo(np.float32).tiny))
        seconds = len(example.labels) * FRAME_SECONDS
        axes.imshow(
            decibels.T,
            origin="lower",
            aspect="auto",
            cmap="gray_r",
            vmin=decibels.max() - RANGE,
            extent=(0, seconds, 0, HIGHEST_KHZ),
        )
        for start in _changes(example.labels)[1:]:
            axes.axvline(start * FRAME_SECONDS, color="tab:blue", linewidth=0.5, alpha=0.6)
        phones = PHONE_OF_STATE[example.labels]
        borders = [*_changes(phones), len(phones)]
        for start, end in pairwise(borders):
            if start:
                axes.axvline(start * FRAME_SECONDS, color="tab:red", linewidth=1.5)
            axes.text(
                (start + end) / 2 * FRAME_SECONDS,
                1.02,
                PHONES[phones[start]],
                transform=axes.get_xaxis_transform(),
                horizontalalignment="center",
                fontsize=8,
            )
        axes.set_title(example.title, pad=16, fontsize=9)
        axes.set(xlabel="seconds", ylabel="kHz")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _changes(labels: npt.NDArray[np.int64]) -> list[int]:
    """The frames where a new label begins, the first one among them."""
    return [0, *(1 + np.flatnonzero(np.diff(labels))).tolist()]

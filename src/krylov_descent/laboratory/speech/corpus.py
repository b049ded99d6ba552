"""The noisy spoken digits as training, validation and test frames, kept on disk.

They are computed once, about 3.5 GB, and from then on memory-mapped: what is not looked at takes no
memory, and the system may drop what was. Every recording is there clean and at all five ratios.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from krylov_descent.laboratory.sources import DataError, data_folder, derived_folder
from krylov_descent.laboratory.speech.archives import read_arrays, read_digits, read_noise
from krylov_descent.laboratory.speech.corpus_building import RECIPE, Form, build
from krylov_descent.laboratory.speech.features import MIDDLE
from krylov_descent.laboratory.speech.lexicon import PHONE_OF_STATE
from krylov_descent.laboratory.speech.splits import PARTS
from krylov_descent.laboratory.speech.utterances import Utterances


@dataclass(frozen=True, eq=False)
class CorpusPart:
    """N frames with what they are.

    Attributes:
        inputs: [N, 352] float32, memory-mapped: nine frames of 39 PLP, and the log energy.
        states: [N] int64, HMM states by forced alignment of the clean recording.
        plp: the same frames as utterances of 39 PLP, a view of the inputs.
        mfcc: the same utterances as 39 MFCC, memory-mapped.
    """

    inputs: npt.NDArray[np.float32]
    states: npt.NDArray[np.int64]
    plp: Utterances
    mfcc: Utterances

    @property
    def phones(self) -> npt.NDArray[np.int64]:
        """[N] the phone of each frame, a place in `lexicon.PHONES`: what the network learns."""
        return PHONE_OF_STATE[self.states]

    def of_speakers(self, count: int) -> "CorpusPart":
        """The first so many speakers; views, no copies."""
        kept = np.isin(self.plp.speaker, np.unique(self.plp.speaker)[:count])
        utterances = int(kept.sum())
        frames = int(self.plp.offsets[utterances])
        return CorpusPart(
            inputs=self.inputs[:frames],
            states=self.states[:frames],
            plp=_first(self.plp, utterances),
            mfcc=_first(self.mfcc, utterances),
        )


@dataclass(frozen=True, eq=False)
class Corpus:
    """Three parts that share no speaker and no clip of noise; see `splits`."""

    train: CorpusPart
    validation: CorpusPart
    test: CorpusPart


def load_corpus(
    folder: str | Path | None = None, *, seed: int = 0, small: bool = False, progress: bool = True
) -> Corpus:
    """The corpus from disk, computed first where it is not there yet.

    Args:
        folder: see `sources.data_folder`. A corpus that lies there, in `speech`, is taken. One
            that is computed is kept in the user's cache.
        seed: of the noise.
        small: ten speakers and two repetitions.
        progress: show how far the computation is.

    Raises:
        DataError: recordings or noise cannot be had, or there is no room for the corpus.
    """
    name = f"{'small' if small else 'full'}-seed-{seed}-recipe-{RECIPE}"
    there = data_folder(folder) / "speech" / name
    target = there if there.is_dir() else derived_folder() / "speech" / name
    if not target.is_dir():
        form = Form(seed=seed, small=small)
        build(target, read_digits(folder), read_noise(folder), form, progress=progress)
    return Corpus(*(_open(target / part) for part in PARTS))


def _open(folder: Path) -> CorpusPart:
    try:
        # Mode "c": writable for those who insist, as torch does, but changes never reach the disk.
        inputs = np.load(folder / "inputs.npy", mmap_mode="c")
        mfcc = np.load(folder / "mfcc.npy", mmap_mode="c")
        states = np.load(folder / "states.npy")
    except (OSError, ValueError) as error:
        raise DataError(
            f"The corpus in {folder.parent} is damaged ({error}): delete that folder, and it is "
            "computed anew."
        ) from error
    about = read_arrays(folder / "utterances.npz", "offsets", "digit", "speaker", "snr", "noise")
    return CorpusPart(
        inputs=inputs,
        states=states,
        plp=Utterances(frames=inputs[:, MIDDLE], **about),
        mfcc=Utterances(frames=mfcc, **about),
    )


def _first(utterances: Utterances, count: int) -> Utterances:
    return Utterances(
        frames=utterances.frames[: utterances.offsets[count]],
        offsets=utterances.offsets[: count + 1],
        digit=utterances.digit[:count],
        speaker=utterances.speaker[:count],
        snr=utterances.snr[:count],
        noise=utterances.noise[:count],
    )

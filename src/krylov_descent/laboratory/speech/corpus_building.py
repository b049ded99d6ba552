"""Computes the corpus: align the clean recordings, then write features of all conditions.

Noise does not move a phone, so all conditions of a recording have the labels of the clean one. The
aligner is trained on the training speakers alone and labels the others as well.

Everything is written into a folder of another name, which takes its own when it is complete: an
interrupted computation leaves nothing that could be taken for a corpus.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from krylov_descent.laboratory.download import explained_writing
from krylov_descent.laboratory.speech.alignment import CLEAN_COMPONENTS, align_clean
from krylov_descent.laboratory.speech.archives import NoiseClips, SpokenDigits
from krylov_descent.laboratory.speech.features import COEFFICIENTS, INPUTS, extract
from krylov_descent.laboratory.speech.framing import frame_offsets
from krylov_descent.laboratory.speech.mixing import LEVELS, Mixer
from krylov_descent.laboratory.speech.splits import PARTS, material
from krylov_descent.laboratory.speech.utterances import CLEAN, Utterances
from krylov_descent.laboratory.waiting import make_room

# Part of the corpus's name on disk: raise it with every change, here or in what is used here, that
# changes the numbers.
RECIPE = 2
# The small form has too few frames for more Gaussians.
SMALL_COMPONENTS = 2
# Recordings whose features are held at once: some 100 MB.
AT_ONCE = 100

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Form:
    """What a corpus is made like: the seed of the noise, and whether it is the small form."""

    seed: int
    small: bool


def build(
    target: Path, digits: SpokenDigits, noise: NoiseClips, form: Form, *, progress: bool = True
) -> None:
    """Compute a corpus into the folder `target`; half a gigabyte of memory, 3.5 GB of disk.

    Args:
        target: appears when the corpus is complete.
        digits: all recordings.
        noise: all clips.
        form: seed and size.
        progress: show a progress bar on the standard error stream.

    Raises:
        DataError: it cannot be written.
    """
    materials = {part: material(part, digits, noise, small=form.small) for part in PARTS}
    with _hidden_beside(target) as hidden, _bar(progress) as bar:
        task = bar.add_task("Aligning the clean recordings", total=None)
        clean = {part: clean_utterances(digits, m.recordings) for part, m in materials.items()}
        components = SMALL_COMPONENTS if form.small else CLEAN_COMPONENTS
        aligner = align_clean(clean["train"], components=components)
        states = {part: aligner.align(clean[part]).labels for part in PARTS}
        everything = sum(len(m.recordings) for m in materials.values())
        bar.update(task, description="Features of all conditions", total=everything)
        for part in PARTS:
            recordings = materials[part].recordings
            mixer = Mixer(digits, materials[part], form.seed)
            with explained_writing(target):
                (hidden / part).mkdir()
                for done in _write_part(
                    hidden / part, digits, recordings, mixer, states[part], clean[part].offsets
                ):
                    bar.advance(task, done)


def clean_utterances(digits: SpokenDigits, recordings: Integers) -> Utterances:
    """The PLP features of recordings without noise."""
    parts = [
        extract([digits.signal(recording) for recording in block]).plp
        for block in _blocks(recordings)
    ]
    count = len(recordings)
    return Utterances(
        frames=np.concatenate(parts),
        offsets=_frame_offsets(digits, recordings),
        digit=digits.digit[recordings],
        speaker=digits.speaker[recordings],
        snr=np.full(count, np.inf),
        noise=np.full(count, CLEAN),
    )


def _write_part(
    folder: Path,
    digits: SpokenDigits,
    recordings: Integers,
    mixer: Mixer,
    states: Integers,
    clean_offsets: Integers,
) -> Iterator[int]:
    """Write one part: recording by recording, the conditions of one after another.

    Yields the number of recordings that have been added.
    """
    repeated = np.repeat(recordings, len(LEVELS))
    offsets = _frame_offsets(digits, repeated)
    kinds: list[str] = []
    with (
        _rows(folder / "inputs.npy", (int(offsets[-1]), INPUTS)) as inputs,
        _rows(folder / "mfcc.npy", (int(offsets[-1]), COEFFICIENTS)) as mfcc,
    ):
        for block in _blocks(recordings):
            rendered = [mixer.render(int(r), snr) for r in block for snr in LEVELS]
            features = extract([signal for signal, _ in rendered])
            kinds += [kind for _, kind in rendered]
            inputs.write(features.inputs().data)
            mfcc.write(features.mfcc.data)
            yield len(block)
    labels = np.split(states, clean_offsets[1:-1])
    np.save(folder / "states.npy", np.concatenate([np.tile(s, len(LEVELS)) for s in labels]))
    np.savez(
        folder / "utterances.npz",
        offsets=offsets,
        digit=digits.digit[repeated],
        speaker=digits.speaker[repeated],
        snr=np.tile(LEVELS, len(recordings)),
        noise=np.array(kinds),
    )


@contextlib.contextmanager
def _rows(path: Path, shape: tuple[int, int]) -> Iterator[BinaryIO]:
    """A .npy file of float32 of a known shape, to be written row by row."""
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        yield file


@contextlib.contextmanager
def _hidden_beside(target: Path) -> Iterator[Path]:
    """A new folder that becomes `target` if all goes well, and is gone otherwise."""
    with explained_writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        hidden = Path(
            tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        )
    try:
        yield hidden
        hidden.chmod(0o755)  # temporary folders are private; data may be shared
        with explained_writing(target):
            # Where another process was faster, its corpus is as good.
            if not target.is_dir():
                hidden.rename(target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _frame_offsets(digits: SpokenDigits, recordings: Integers) -> Integers:
    lengths = np.diff(digits.offsets)[recordings]
    return frame_offsets(np.concatenate([[0], np.cumsum(lengths)]))


def _blocks(recordings: Integers) -> Iterator[Integers]:
    return (recordings[i : i + AT_ONCE] for i in range(0, len(recordings), AT_ONCE))


def _bar(enabled: bool) -> Progress:
    make_room()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not enabled,
    )

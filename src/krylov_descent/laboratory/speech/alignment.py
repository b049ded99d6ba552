"""Which state each frame belongs to: forced alignment, and the training that makes it possible.

The transcription of an utterance is known, so its chain of states is, and Viterbi's algorithm finds
the borders between them. Training alternates the two: align, then estimate mixtures and transitions
from the alignment. It starts flat, each utterance cut into equal parts. At first the three states
of a phone share one Gaussian: with one each, the last state of a consonant easily settles in the
vowel that follows. Then each state has its own, which grows into a mixture by splitting.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from krylov_descent.laboratory.speech.digit_hmm import DigitHmm, batches
from krylov_descent.laboratory.speech.hmm import count_transitions, viterbi
from krylov_descent.laboratory.speech.lexicon import (
    DIGITS,
    PARTS,
    PHONE_OF_STATE,
    PHONES,
    STATES,
    chain,
)
from krylov_descent.laboratory.speech.mixtures import (
    EM_ITERATIONS,
    doublings,
    single_gaussians,
)
from krylov_descent.laboratory.speech.utterances import Utterances

CLEAN_COMPONENTS = 8
# Alignments with a Gaussian a phone, with a Gaussian a state, and after each doubling. A flat start
# is far from where it ends; a grown mixture is near.
PHONE_ROUNDS, STATE_ROUNDS, GROWN_ROUNDS = 8, 6, 2

# Called after each alignment with the number of components and the log-likelihood per frame.
OnRound = Callable[[int, float], None]


@dataclass(frozen=True, eq=False)
class Alignment:
    """Where the states are.

    Attributes:
        labels: [N] int64, the state of each frame.
        log_likelihood: of the best paths, per frame.
    """

    labels: npt.NDArray[np.int64]
    log_likelihood: float

    @property
    def phones(self) -> npt.NDArray[np.int64]:
        """[N] the phone of each frame, a place in `PHONES`."""
        return PHONE_OF_STATE[self.labels]


@dataclass(frozen=True, eq=False)
class Aligner:
    """HMMs that label utterances whose digit is known."""

    model: DigitHmm

    def align(self, utterances: Utterances) -> Alignment:
        """The best path of each utterance through the chain of its digit.

        Raises:
            ValueError: an utterance is too short for its chain.
        """
        labels = np.empty(len(utterances.frames), np.int64)
        total = 0.0
        for digit in np.unique(utterances.digit):
            word = chain(int(digit))
            states, places = np.unique(word, return_inverse=True)
            spoken = utterances.digit == digit
            _check_lengths(utterances, spoken, len(word))
            for batch in batches(utterances, spoken):
                frames = utterances.frames[batch.rows]
                scores = self.model.acoustics.log_likelihoods(frames, states.tolist())
                log_probability, path = viterbi(
                    batch.pad(scores)[:, :, places],
                    torch.from_numpy(batch.lengths).to(scores.device),
                    word,
                    self.model.transitions.to(scores.device),
                )
                labels[batch.rows] = word[path.cpu().numpy()[batch.inside]]
                total += log_probability.double().sum().item()
        return Alignment(labels, total / max(1, len(labels)))


def align_clean(
    clean: Utterances,
    *,
    components: int = CLEAN_COMPONENTS,
    device: torch.device | str = "cpu",
    on_round: OnRound | None = None,
) -> Aligner:
    """An aligner trained on clean speech from a flat start; the same every time.

    Args:
        clean: the training speakers' utterances without noise.
        components: Gaussians a state in the end, a power of two.
        device: where densities and paths are computed.
        on_round: told how it goes.
    """
    labels = flat_labels(clean)
    for _ in range(PHONE_ROUNDS):
        phones = single_gaussians(clean.frames, PHONE_OF_STATE[labels], len(PHONES), device)
        transitions = count_transitions(labels, clean.offsets, STATES)
        model = DigitHmm(phones.shared(PHONE_OF_STATE), transitions)
        alignment = Aligner(model).align(clean)
        labels = _in_equal_parts(alignment.phones, clean.offsets)
        if on_round is not None:
            on_round(1, alignment.log_likelihood)
    return Aligner(train(clean, labels, components=components, device=device, on_round=on_round))


def train(
    utterances: Utterances,
    labels: npt.NDArray[np.int64],
    *,
    components: int,
    rounds: int = STATE_ROUNDS,
    device: torch.device | str = "cpu",
    on_round: OnRound | None = None,
) -> DigitHmm:
    """Viterbi training: align and estimate in turn, splitting the mixtures on the way.

    Args:
        utterances: what to train on, with their digits.
        labels: [N] the states to start from.
        components: Gaussians a state in the end, a power of two.
        rounds: alignments with a single Gaussian a state.
        device: where densities and paths are computed.
        on_round: told how it goes.
    """
    splits = doublings(components)
    if labels.shape != (len(utterances.frames),):
        raise ValueError(
            f"`labels` must have one state for each of the {len(utterances.frames)} frames, found "
            f"shape {labels.shape}"
        )
    mixtures = single_gaussians(utterances.frames, labels, STATES, device)
    transitions = count_transitions(labels, utterances.offsets, STATES)
    for split in range(splits + 1):
        if split:
            mixtures = mixtures.split().fit(utterances.frames, labels, EM_ITERATIONS)
        for _ in range(GROWN_ROUNDS if split else rounds):
            alignment = Aligner(DigitHmm(mixtures, transitions)).align(utterances)
            labels = alignment.labels
            mixtures = mixtures.fit(utterances.frames, labels, EM_ITERATIONS if split else 1)
            transitions = count_transitions(labels, utterances.offsets, STATES)
            if on_round is not None:
                on_round(mixtures.components, alignment.log_likelihood)
    return DigitHmm(mixtures, transitions)


def flat_labels(utterances: Utterances) -> npt.NDArray[np.int64]:
    """Each utterance cut evenly into the states of its chain, both silences included: [N]."""
    chains = [chain(digit) for digit in range(DIGITS)]
    parts = []
    for digit, length in zip(utterances.digit, utterances.lengths, strict=True):
        states = chains[digit]
        parts.append(states[np.arange(length) * len(states) // length])
    return np.concatenate(parts)


def _in_equal_parts(
    phones: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Each stretch of one phone [N] cut evenly into its three states: [N]."""
    begins = np.append([True], np.diff(phones) != 0)
    begins[offsets[:-1]] = True
    starts = np.flatnonzero(begins)
    lengths = np.diff(np.append(starts, len(phones)))
    place = np.arange(len(phones)) - np.repeat(starts, lengths)
    parts = PARTS * place // np.repeat(lengths, lengths)
    return np.asarray(PARTS * phones + parts, np.int64)


def _check_lengths(
    utterances: Utterances, spoken: npt.NDArray[np.bool_], fewest_frames: int
) -> None:
    short = np.flatnonzero(spoken & (utterances.lengths < fewest_frames))
    if len(short):
        first = short[0]
        raise ValueError(
            f"`utterances`: number {first}, a {utterances.digit[first]} by speaker "
            f"{utterances.speaker[first]}, has {utterances.lengths[first]} frames, but its states "
            f"take at least {fewest_frames}; leave it out"
        )

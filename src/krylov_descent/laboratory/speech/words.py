"""Word errors of a trained network at each noise level, beside those of the MFCC baseline.

Three recognisers hear the test set: the hybrid, which takes the network's posteriors over its
priors; Gaussian mixtures of MFCCs; and the paper's Tandem system, which has mixtures of the
posteriors beside those. All take the same alignment and search the same word network.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from krylov_descent.laboratory.speech.corpus import Corpus, CorpusPart
from krylov_descent.laboratory.speech.decoding import (
    Posteriors,
    errors_by_snr,
    log_priors,
    recognize,
)
from krylov_descent.laboratory.speech.digit_hmm import DigitHmm
from krylov_descent.laboratory.speech.hmm import count_transitions
from krylov_descent.laboratory.speech.lexicon import STATES
from krylov_descent.laboratory.speech.tandem import (
    COMPONENTS,
    beside,
    principal_axes,
    train_on_all_conditions,
    train_tandem,
)

BATCH = 8_192


@dataclass(frozen=True, kw_only=True)
class ConditionErrors:
    """What is wrong at one noise level, as shares of 1.

    Attributes:
        snr: signal-to-noise ratio in decibels, inf for clean speech.
        utterances: of the test set at this level.
        frame: the network's frame error.
        hybrid: word error of posteriors over priors.
        tandem: word error of the Tandem system.
        mfcc: word error of Gaussian mixtures on MFCCs alone.
    """

    snr: float
    utterances: int
    frame: float
    hybrid: float
    tandem: float
    mfcc: float


@torch.no_grad()
def log_posteriors(model: nn.Module, part: CorpusPart) -> npt.NDArray[np.float32]:
    """log p(phone | frame) [N, phones], by the network's outputs, in batches where it is."""
    parameter = next(model.parameters())
    found = []
    for start in range(0, len(part.inputs), BATCH):
        inputs = torch.from_numpy(np.array(part.inputs[start : start + BATCH]))
        outputs = model(inputs.to(parameter.device, parameter.dtype))
        found.append(outputs.log_softmax(1).float().cpu().numpy())
    return np.concatenate(found)


def word_errors(
    model: nn.Module,
    corpus: Corpus,
    *,
    components: int = COMPONENTS,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> list[ConditionErrors]:
    """Errors on the test set from clean speech to the loudest noise.

    Trains both mixture systems on the training set; densities are computed where the model is.

    Args:
        model: [n, 352] to scores of the phones.
        corpus: trained on, and its validation part chooses the weight of Tandem's second stream.
        components: Gaussians a state of Tandem and baseline, a power of two.
        on_stage: told what begins.
    """
    device = next(model.parameters()).device
    seen, heard = corpus.train, corpus.test
    on_stage(f"Posteriors of {len(seen.states) + len(heard.states):,} frames")
    seen_posteriors, posteriors = log_posteriors(model, seen), log_posteriors(model, heard)

    on_stage("Decoding posteriors over priors")
    transitions = count_transitions(seen.states, seen.plp.offsets, STATES)
    hybrid = DigitHmm(Posteriors(log_priors(seen.phones), device), transitions)
    by_hybrid = recognize(hybrid, heard.mfcc.with_frames(posteriors))

    on_stage("Mixtures of MFCCs")
    baseline = train_on_all_conditions(seen.mfcc, seen.states, components=components, device=device)
    by_mfcc = recognize(baseline, heard.mfcc)

    axes = principal_axes(seen_posteriors)
    on_stage(f"Tandem: mixtures of posteriors on {axes.axes.shape[1]} axes beside them")
    deciding = corpus.validation
    tandem = train_tandem(
        baseline,
        axes(seen_posteriors),
        seen.states,
        beside(deciding.mfcc, log_posteriors(model, deciding), axes),
        components=components,
    )
    by_tandem = recognize(tandem, beside(heard.mfcc, posteriors, axes))

    said = heard.mfcc
    wrong_frames = posteriors.argmax(1) != heard.phones
    frame = errors_by_snr(wrong_frames, np.repeat(said.snr, said.lengths))
    words = [
        errors_by_snr(digits != said.digit, said.snr) for digits in (by_hybrid, by_tandem, by_mfcc)
    ]
    return [
        ConditionErrors(
            snr=snr,
            utterances=int((said.snr == snr).sum()),
            frame=frame[snr],
            hybrid=words[0][snr],
            tandem=words[1][snr],
            mfcc=words[2][snr],
        )
        for snr in frame
    ]

"""The frame error of a trained network at each noise level."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from krylov_descent.laboratory.speech.corpus import CorpusPart

BATCH = 5_000


@dataclass(frozen=True, kw_only=True)
class FrameError:
    """The share of frames whose phone was not recognised, among `frames` frames at one ratio.

    `snr` is in decibels, inf for clean speech.
    """

    snr: float
    frames: int
    error: float


@torch.no_grad()
def frame_errors(model: nn.Module, part: CorpusPart) -> list[FrameError]:
    """Errors from clean speech down to the loudest noise.

    One pass over the frames, in batches, where the model is.

    Args:
        model: [n, 352] to scores of the phones [n, 20].
        part: normally the test set.
    """
    parameter = next(model.parameters())
    targets = part.phones
    wrong = np.empty(len(targets), np.bool_)
    for start in range(0, len(targets), BATCH):
        rows = slice(start, start + BATCH)
        inputs = torch.from_numpy(np.array(part.inputs[rows]))
        scores = model(inputs.to(parameter.device, parameter.dtype))
        wrong[rows] = scores.argmax(1).cpu().numpy() != targets[rows]
    snr_of_frame = np.repeat(part.plp.snr, part.plp.lengths)
    found = []
    for snr in sorted(set(part.plp.snr.tolist()), reverse=True):
        there = snr_of_frame == snr
        found.append(FrameError(snr=snr, frames=int(there.sum()), error=float(wrong[there].mean())))
    return found

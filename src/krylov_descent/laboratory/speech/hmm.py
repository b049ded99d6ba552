"""Left-to-right hidden Markov models: Viterbi's algorithm for many utterances at once.

At each frame a path stays in its state or goes on to the next one. All utterances that go through
the same chain of states are searched together, [U, L] numbers at a time: the loop is over frames,
of which an utterance has about a hundred. Everything is in the log domain.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Added to the counts of staying and leaving, so that neither becomes impossible.
PSEUDOCOUNT = 1.0


@dataclass(frozen=True, eq=False)
class Transitions:
    """log_stay and log_leave [S]: of remaining in a state for another frame, and of going on."""

    log_stay: Tensor
    log_leave: Tensor

    def to(self, device: torch.device | str) -> "Transitions":
        """The same on a device."""
        return Transitions(self.log_stay.to(device), self.log_leave.to(device))


def count_transitions(
    labels: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], states: int
) -> Transitions:
    """Maximum likelihood from aligned utterances, up to a pseudocount; the last frame leaves.

    Args:
        labels: [N] the state of each frame.
        offsets: [U + 1] where utterances begin.
        states: how many there are.
    """
    # No state of a chain is followed by itself, so equal neighbours have stayed.
    stays = np.append(labels[1:] == labels[:-1], [False])
    stays[offsets[1:] - 1] = False
    stayed = np.bincount(labels[stays], minlength=states) + PSEUDOCOUNT
    left = np.bincount(labels[~stays], minlength=states) + PSEUDOCOUNT
    total = stayed + left
    return Transitions(
        torch.from_numpy(np.log(stayed / total)).float(),
        torch.from_numpy(np.log(left / total)).float(),
    )


def viterbi(
    scores: Tensor, lengths: Tensor, chain: npt.NDArray[np.int64], transitions: Transitions
) -> tuple[Tensor, Tensor]:
    """The best path of each utterance through a chain, from its first to its last place.

    T·U·L additions and comparisons, T·U·L bytes of memory.

    Args:
        scores: [U, T, L] log-likelihood of each frame at each place of the chain; what lies past
            the end of an utterance is not looked at.
        lengths: [U] frames of each utterance, 1 to T.
        chain: [L] the state at each place.
        transitions: of all states, on the device of `scores`.

    Returns:
        log probability [U] of the paths (−inf where the utterance is shorter than the chain) and
        the place in the chain at each frame [U, T] (past the end: the last place).
    """
    utterances, frames, places = scores.shape
    states = torch.from_numpy(chain).to(scores.device)
    log_stay, log_leave = transitions.log_stay[states], transitions.log_leave[states]
    best = torch.full_like(scores[:, 0], -torch.inf)
    best[:, 0] = scores[:, 0, 0]
    never = torch.full_like(best[:, :1], -torch.inf)
    came = torch.zeros(frames, utterances, places, dtype=torch.bool, device=scores.device)
    for t in range(1, frames):
        stayed = best + log_stay
        arrived = torch.cat([never, best[:, :-1] + log_leave[:-1]], 1)
        going_on = (t < lengths)[:, None]  # an utterance that has ended keeps its numbers
        came[t] = (arrived > stayed) & going_on
        best = torch.where(going_on, torch.maximum(stayed, arrived) + scores[:, t], best)
    place = torch.full((utterances,), places - 1, device=scores.device)
    path = torch.empty(utterances, frames, dtype=torch.int64, device=scores.device)
    for t in range(frames - 1, -1, -1):
        path[:, t] = place
        place = place - came[t].gather(1, place[:, None])[:, 0].long()
    return best[:, -1], path

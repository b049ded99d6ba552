import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from krylov_descent.laboratory.speech.hmm import (
    PSEUDOCOUNT,
    Transitions,
    count_transitions,
    viterbi,
)

CHAIN = np.array([2, 0, 1, 2])  # state 2 stands at both ends, as silence does
STATES = 3


def transitions(seed: int = 0) -> Transitions:
    stay = torch.rand(STATES, generator=torch.Generator().manual_seed(seed)).clamp(0.1, 0.9)
    return Transitions(stay.log(), (1 - stay).log())


def enumerated(
    scores: npt.NDArray[np.float32], model: Transitions
) -> tuple[float, npt.NDArray[np.int64]]:
    """The best of all paths through the chain, each written out: [T, L] scores of one utterance."""
    frames, places = scores.shape
    best, found = -np.inf, np.zeros(frames, np.int64)
    for moves in itertools.product((0, 1), repeat=frames - 1):
        path = np.concatenate([[0], np.cumsum(moves)]).astype(np.int64)
        if path[-1] != places - 1:
            continue
        states = CHAIN[path]
        steps = [
            (model.log_leave if moved else model.log_stay)[state].item()
            for moved, state in zip(moves, states, strict=False)
        ]
        total = scores[np.arange(frames), path].sum() + sum(steps)
        if total > best:
            best, found = float(total), path
    return best, found


def dense(scores: npt.NDArray[np.float32], model: Transitions) -> float:
    """Viterbi as max-plus products with the full transition matrix in float64."""
    places = len(CHAIN)
    matrix = np.full((places, places), -np.inf)
    for place, state in enumerate(CHAIN):
        matrix[place, place] = model.log_stay[state]
        if place + 1 < places:
            matrix[place, place + 1] = model.log_leave[state]
    best = np.full(places, -np.inf)
    best[0] = scores[0, 0]
    for row in scores[1:].astype(np.float64):
        best = (best[:, None] + matrix).max(0) + row
    return float(best[-1])


def drawn(utterances: int, frames: int) -> Tensor:
    return torch.randn(utterances, frames, len(CHAIN), generator=torch.Generator().manual_seed(1))


def test_the_best_path_is_the_best_of_all_paths() -> None:
    lengths = torch.tensor([4, 5, 7, 9, 9])
    scores, model = 2 * drawn(5, 9), transitions()
    log_probability, path = viterbi(scores, lengths, CHAIN, model)
    for u, length in enumerate(lengths.tolist()):
        expected, places = enumerated(scores[u, :length].numpy(), model)
        assert log_probability[u].item() == pytest.approx(expected, abs=1e-5)
        np.testing.assert_array_equal(path[u, :length], places)


def test_long_utterances_agree_with_the_dense_reference() -> None:
    lengths = torch.tensor([60, 100, 31])
    scores, model = drawn(3, 100), transitions(1)
    log_probability, path = viterbi(scores, lengths, CHAIN, model)
    for u, length in enumerate(lengths.tolist()):
        expected = dense(scores[u, :length].numpy(), model)
        assert log_probability[u].item() == pytest.approx(expected, rel=1e-5)
        steps = path[u, :length].diff()
        assert set(steps.tolist()) <= {0, 1}
        assert (path[u, 0].item(), path[u, length - 1].item()) == (0, len(CHAIN) - 1)


def test_what_lies_past_the_end_does_not_matter() -> None:
    lengths = torch.tensor([6, 9])
    scores, model = drawn(2, 9), transitions()
    first = viterbi(scores, lengths, CHAIN, model)
    scores[0, 6:] = torch.nan
    second = viterbi(scores, lengths, CHAIN, model)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_an_utterance_shorter_than_the_chain_is_impossible() -> None:
    log_probability, _ = viterbi(drawn(2, 4), torch.tensor([3, 4]), CHAIN, transitions())
    assert log_probability[0] == -torch.inf
    assert log_probability[1].isfinite()


def test_transitions_are_counted_within_utterances_only() -> None:
    labels = np.array([0, 0, 0, 1, 1, 1, 1, 2])
    found = count_transitions(labels, np.array([0, 5, 8]), states=4)
    # The second utterance begins in the state that the first ends in: that is no stay.
    stays, leaves = np.array([2, 2, 0, 0]), np.array([1, 2, 1, 0])
    total = stays + leaves + 2 * PSEUDOCOUNT
    np.testing.assert_allclose(found.log_stay.exp(), (stays + PSEUDOCOUNT) / total, rtol=1e-6)
    np.testing.assert_allclose(found.log_leave.exp(), (leaves + PSEUDOCOUNT) / total, rtol=1e-6)

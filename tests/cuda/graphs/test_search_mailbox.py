"""Numbers of an evaluation between host and GPU."""

import numpy as np
import pytest
import torch

from krylov_descent.cuda.graphs.search_mailbox import SearchMailbox


def test_coefficients_that_are_not_given_are_zero() -> None:
    mailbox = SearchMailbox(4, torch.zeros(()))
    mailbox.send(np.array([1.0, 2.0, 3.0, 4.0]))
    mailbox.send(np.array([5.0, 6.0]))
    assert mailbox.coefficients().tolist() == [5, 6, 0, 0]


@pytest.mark.gpu
def test_numbers_come_from_the_host_and_go_there_with_each_replay() -> None:
    mailbox = SearchMailbox(5, torch.zeros((), device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = mailbox.coefficients()
        mailbox.bring(c.sum().double(), 2 * c)
    for number in (1.0, 3.0):
        mailbox.send(np.full(5, number))
        graph.replay()
        torch.cuda.synchronize()
        assert mailbox.numbers.tolist() == [5 * number, *5 * [2 * number]]

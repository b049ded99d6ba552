"""A function as one CUDA graph: what other methods are given so that they run at their fastest."""

from collections.abc import Callable

import torch

WARM_UPS = 3


def captured(function: Callable[[], object]) -> Callable[[], None]:
    """Record a function and return what replays it.

    The function reads and writes tensors that stay where they are. It runs a few times first, so
    that libraries set themselves up; whoever minds what it writes puts that back afterwards.
    """
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            function()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=side):
            function()
    finally:
        # torch leaves the recording's stream in place when the recording fails.
        torch.cuda.set_stream(current)
    return graph.replay

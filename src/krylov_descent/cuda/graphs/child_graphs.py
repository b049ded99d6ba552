"""Recordings inside of a recording: what is in it many times is recorded once (child graphs).

To record is to launch every kernel from Python, and a basis is K times the same product. So the
product is recorded by itself, and so is D⁻¹ where that is many kernels; the whole then has them
inserted, each time by one call.
"""

import functools
import importlib
import importlib.metadata
from typing import Any

import torch

OLDEST = 13  # of the versions of the bindings whose calls are made as here


def can_insert() -> bool:
    """Whether there is a way: CUDA's own interface, which torch wants from CUDA 13 on."""
    return _runtime() is not None


def insert(graph: torch.cuda.CUDAGraph) -> None:
    """Make a graph part of what this stream records, or replay it where nothing is recorded.

    Args:
        graph: made with `keep_graph`. What it reads and writes must outlive the recording.
    """
    if not torch.cuda.is_current_stream_capturing():
        graph.replay()
        return
    runtime = _runtime()
    stream = runtime.cudaStream_t(torch.cuda.current_stream().cuda_stream)
    _, _, whole, before, _, count = _checked(runtime.cudaStreamGetCaptureInfo(stream))
    child = runtime.cudaGraph_t(graph.raw_cuda_graph())
    (node,) = _checked(runtime.cudaGraphAddChildGraphNode(whole, before, count, child))
    only_after_it = (
        runtime.cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
    )
    _checked(runtime.cudaStreamUpdateCaptureDependencies(stream, [node], None, 1, only_after_it))


def _checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *found = answer
    if error.value:
        raise RuntimeError(f"CUDA refused to put one graph into another: {error.name}")
    return tuple(found)


@functools.cache
def _runtime() -> Any:
    try:
        version = importlib.metadata.version("cuda-bindings")
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:  # which a package that is not there is, too
        return None
    return runtime if int(version.split(".")[0]) >= OLDEST else None

"""What goes beside a backward pass that is recorded: gradients of layers whose δ are there."""

from collections.abc import Sequence

from torch import Tensor

from krylov_descent.cuda.graphs.parallel_branches import Moments
from krylov_descent.cuda.triton.entry import under_way

# Layers of so many units, for which a GPU has more room than they take.
NARROW = 128


def moments_to_begin(deltas: Sequence[tuple[int, Tensor | None]]) -> list[Moments]:
    """For each layer the moments behind which its gradients are made, where that is recorded.

    That is when δ was there; none where that is not known. But wide layers leave nothing of a GPU
    to their gradients, so these wait for narrow ones, too, if there are any. Not for these alone:
    where a forward pass has branches, the δ of a narrow layer may be there first.

    Args:
        deltas: width and δ of each layer, from the last one on.
    """
    products = under_way()
    if products is None:
        return [()] * len(deltas)
    made = [None if delta is None else products.when_made(delta) for _, delta in deltas]
    moments: list[Moments] = [() if event is None else (event,) for event in made]
    first = 0
    for i, (width, _) in enumerate(deltas):
        if width <= NARROW:
            for j in range(first, i):
                moments[j] = moments[j] + moments[i] if moments[j] and moments[i] else ()
            first = i + 1
    return moments

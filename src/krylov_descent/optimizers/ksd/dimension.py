"""How many directions a step has: as many as are worth their products.

After a step the quadratic model tells for each k how far the first k directions would have gone.
The model is right only near the parameters. So what it promises is bent: small promises are kept,
and large ones approach a limit, which is such that all directions bring what the search found.
The best k has the largest decrease for the work of the whole step. The next step has that many
directions, or somewhat more if the best are all of them.

Where the model nearly keeps its promise, this looks too short a way ahead: on a quadratic function
one basis of 2k directions goes further than two of k. There the number grows as well, and fast
where the model is exact.

Where the step kept hardly anything of the promise, the promise says nothing about the first k
directions either. If B is A, the number then grows to the usual one. If B is a part of A, the
promise was of the samples in B, and more directions would fit these alone. Promises of the Fisher
matrix are not in units of the loss, and those of an indefinite Hessian have no bound, so only that
of the Gauss-Newton matrix is compared.

Before Kronecker factors replace the diagonal, the number stays moderate unless the model is right:
after a given number of steps the factors do better with few directions than many without them.

The current number is an entry of a parameter group, so that a resumed run continues identically.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from krylov_descent.algorithms.model_decrease import model_decreases
from krylov_descent.algorithms.subspace import Subspace

Dimension = int | Literal["auto"]

# The first number of directions, the least, and the largest factor from step to step. To begin
# with few costs little where more are worth it (`first` in results/trials/spending.json).
FIRST, LEAST, GROWTH = 8, 5, 1.3
# For the sizes of B and C; and the memory for activations does not limit the number below this.
USUAL = 20
# Memory is provided for so many directions at first.
PROVIDED = 64
# Of the directions: if the best number is larger, more might be better.
NEARLY_ALL = 0.9
# Of the decrease that the model promised, and how fast the number grows where it is exact.
# Other functions than quadratic ones may seem exact by chance, on a plateau for example.
KEPT, EXACT, EXACT_GROWTH = (0.85, 1.05), (0.9999, 1.0001), 4.0
# Of the decrease that the model promised: below it the model tells nothing about the number
# (`results/trials/far_off.json`).
FAR_OFF = 0.1
DIRECTIONS = "directions"  # of the next step
ENTRIES = (DIRECTIONS,)


def usual(dimension: Dimension) -> int:
    """The number of directions that the sizes of B and C follow from."""
    return USUAL if dimension == "auto" else dimension


def provided_for(dimension: int) -> int:
    """For how many directions to provide memory, so that K may grow for a while."""
    found = PROVIDED
    while found < dimension:
        found += found // 2
    return found


def begin(group: dict[str, Any], dimension: Dimension) -> None:
    """Create the entry of a parameter group, if it is missing or was asked for as a number."""
    if dimension != "auto" or DIRECTIONS not in group:
        group[DIRECTIONS] = FIRST if dimension == "auto" else dimension


def learn(
    group: dict[str, Any],
    subspace: Subspace,
    decrease: float,
    work: Sequence[float],
    *,
    comparable: bool,
    most: int,
    enough: float = math.inf,
) -> str:
    """Choose the number of directions of the next step, and return why in a sentence.

    If all directions of the Krylov space vanished, the number stays, and the sentence is empty.

    Args:
        group: with the entry, which is updated.
        subspace: of a step that was taken, with as many directions as the entry says.
        decrease: by the step.
        work: of a step with 1, 2, ... directions, as many as the subspace has or more.
        comparable: whether the decrease should be near the promise: B is A, by the Gauss-Newton
            matrix.
        most: the largest number of directions, unless it is less than `USUAL`.
        enough: beyond it the number does not grow merely because its directions were worth it.
    """
    now = group[DIRECTIONS]
    made = sum(row < now for row in subspace.kept)  # the others are previous steps
    if not made:
        return ""
    promised = model_decreases(subspace.curvature[:made, :made], subspace.squared_gradient)
    best = best_number(promised, decrease, np.array(work[:made]))
    if EXACT[0] * promised[-1] < decrease < EXACT[1] * promised[-1]:
        wanted, why = EXACT_GROWTH * now, "the quadratic model was exact"
    elif KEPT[0] * promised[-1] < decrease < KEPT[1] * promised[-1]:
        wanted, why = GROWTH * now, "the quadratic model nearly kept its promise"
    elif comparable and now < USUAL and decrease < FAR_OFF * promised[-1]:
        wanted, why = min(GROWTH * now, USUAL), "the quadratic model was far off"
    elif best > NEARLY_ALL * made:
        wanted = min(GROWTH * now, max(now, enough))
        why = "the last directions were worth their products"
    else:
        wanted, why = max(best, now / GROWTH), f"{best} of {made} directions would have been best"
    if made < now:  # the Krylov space is exhausted
        wanted = min(wanted, now)
    following = group[DIRECTIONS] = min(max(round(wanted), LEAST), max(most, USUAL))
    return f"{why}; the next step has {following}"


def best_number(promised: NDArray[np.float64], decrease: float, work: NDArray[np.float64]) -> int:
    """The number of directions with the largest decrease for the work of a step.

    Args:
        promised: the decrease of the model in the first k directions, for each k.
        decrease: what all directions brought.
        work: of a step with k directions, for each k.
    """
    excess = promised[-1] - decrease
    if excess > 0:
        limit = promised[-1] * decrease / excess
        promised = promised * limit / (promised + limit)
    return int(np.argmax(promised / work)) + 1

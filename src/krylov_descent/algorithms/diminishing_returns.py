"""When a search has done enough: its last evaluations brought less than the step did on average.

A step spends work before the search (the gradient, the basis) and in it. The decrease per work of
the whole step is largest if the search ends when the next evaluations would bring less than the
average. Values fall by leaps, so the average is compared with several iterations, and the search
ends below half of it (`results/trials/spending.json`). A search without any decrease ends when it
has cost as much as the rest of the step.
"""

# The last iterations that are compared: at least so many, and at least this part of all.
FEWEST, PART = 3, 0.25
# The part of the step's average decrease per evaluation that they must bring.
WORTH = 0.5
# Without a decrease a search may have at least so many evaluations, to get past a kink.
FEWEST_IN_VAIN = 100


class DiminishingReturns:
    """Watches the values of a search.

    Args:
        value: where the search begins.
        spent: work of the step before the search, in evaluations.
    """

    def __init__(self, value: float, spent: float) -> None:
        self._start, self._spent = value, spent
        self._seen = [(0, value)]

    def have_come(self, evaluations: int, value: float) -> bool:
        """Whether the search should end.

        Args:
            evaluations: of the search, after another iteration.
            value: the lowest so far.
        """
        self._seen.append((evaluations, value))
        if value >= self._start:
            return evaluations > max(FEWEST_IN_VAIN, self._spent)
        iterations = len(self._seen) - 1
        last = max(FEWEST, int(PART * iterations))
        if iterations < last:
            return False
        evaluations_before, value_before = self._seen[-1 - last]
        recent = (value_before - value) / (evaluations - evaluations_before)
        return recent < WORTH * (self._start - value) / (self._spent + evaluations)

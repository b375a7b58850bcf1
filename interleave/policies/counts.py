"""The best count of subgroups that a policy treats in its own way."""

from __future__ import annotations

from collections.abc import Callable

Cost = tuple[bool, bool, float]
# Into so many steps the counts are divided at first.
_FIRST_COUNTS = 8


def best_count(most: int, cost: Callable[[int], Cost]) -> int:
    """Return the best count from 0 to a number: of some evenly spread ones, and then near the best.

    Args:
        most: The largest count.
        cost: Returns the cost of a count (see `Steps.cost`). It is called once for each count.
    """
    costs: dict[int, Cost] = {}

    def cost_of(count: int) -> Cost:
        if count not in costs:
            costs[count] = cost(count)
        return costs[count]

    step = max(1, most // _FIRST_COUNTS)
    best = min(range(0, most + 1, step), key=cost_of)
    while step:
        best = min((best, max(0, best - step), min(most, best + step)), key=cost_of)
        step //= 2
    return best

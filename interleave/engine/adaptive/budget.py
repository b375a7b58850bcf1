"""The budget of device memory for optimizer state: one limit, or a limit for each phase."""

from __future__ import annotations

from collections.abc import Mapping

from ebbtide.interleave.model.workload import FreeMemorySteps, Workload
from ebbtide.phases import BACKWARD, FORWARD, UPDATE

# Bytes of device memory for state: at any time, or by phase.
Budget = float | Mapping[str, float]


def min_budget(budget: Budget | None) -> float | None:
    """Return what state may use at every moment, in bytes; None for no limit."""
    return min(map(float, budget.values())) if isinstance(budget, Mapping) else budget


def max_budget(budget: Budget | None) -> float | None:
    """Return what state may use at some moment, in bytes; None for no limit."""
    return max(map(float, budget.values())) if isinstance(budget, Mapping) else budget


def budgets_differ(budget: Budget | None, other: Budget | None, tolerance: float) -> bool:
    """Return whether two budgets differ: by more than a share of the larger one; at all, if one is by phase or None."""
    if isinstance(budget, Mapping) or isinstance(other, Mapping) or budget is None or other is None:
        return budget != other
    return abs(budget - other) > tolerance * max(budget, other)


def free_memory(budget: Budget | None, workload: Workload) -> FreeMemorySteps:
    """Return a budget as the free memory over an iteration of a workload."""
    if budget is None:
        # More than all state and gradients need.
        budget = 2 * (workload.state_bytes + workload.grad_bytes) * workload.params
    if not isinstance(budget, Mapping):
        return ((0.0, float(budget)),)
    free_from: dict[float, float] = {}
    begin_s = 0.0
    for phase, length_s in ((FORWARD, workload.forward_s), (BACKWARD, workload.backward_s), (UPDATE, 0.0)):
        # Phases without a length begin at the same time: the smallest budget of them counts.
        free_from[begin_s] = min(budget[phase], free_from.get(begin_s, budget[phase]))
        begin_s += length_s
    return tuple(sorted(free_from.items()))

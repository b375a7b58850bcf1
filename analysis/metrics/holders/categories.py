"""The category of each recorded allocation: parameter, gradient, optimizer state, activation or temporary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.holders.stacks import (
    BACKWARD,
    FORWARD,
    LIBRARY,
    MODEL,
    STEP,
    in_module_call,
    part_of_step,
)
from ebbtide.analysis.timeseries.step_functions import Ints
from ebbtide.profiler.trace import Trace

# In the order in which they are stacked, from what is held longest.
CATEGORIES = ("parameter", "buffer", "optimizer_state", "gradient", "activation", "temporary")
_OPTIMIZER_STEP = "Optimizer.step"
Labels = npt.NDArray[np.object_]
_NEVER = np.iinfo(np.int64).max


@once_per_trace
def categorized_allocations(trace: Trace, rank: int, device: str) -> pd.DataFrame:
    """Return the allocations of a device, each with its category where it is recorded or can be inferred.

    Recorded categories are kept. The others are inferred from where the block was allocated (its call stack, else the
    phase or the optimizer step at that time) and from how long it was held:

        optimizer step: `optimizer_state` if it is held when the step ends, else `temporary`
        backward: `gradient` if it is held when the next optimizer step begins, else `temporary`
        forward: `activation` if it is held when the next backward begins, else `temporary`
        construction of the model: `parameter` if it is held to the end
        workspace of a library: `temporary`

    Without a later step or backward, the end of the recording counts. Blocks that were allocated before the recording,
    without a stack, have no category, nor have those outside of modules where no backward was recorded.

    Returns:
        The table `allocations` with `end_ns` as int64 (held to the end: the largest int64), and a column `part`.
    """
    rows = trace.allocations(rank)
    rows = rows[rows["device"] == device].reset_index(drop=True)
    starts = rows["start_ns"].to_numpy(np.int64)
    ends = rows["end_ns"].fillna(_NEVER).to_numpy(np.int64)
    part = _parts(trace, rank, rows)
    step_starts, step_ends = _optimizer_steps(trace, rank, part, starts)
    backward_starts = _backward_starts(trace, rank, part, starts)
    # What a block is that is held past the time in which a temporary one would be.
    by_part = {
        STEP: ("optimizer_state", ends > _next(step_ends, starts)),
        BACKWARD: ("gradient", ends > _next(step_starts, starts)),
        FORWARD: ("activation", ends > _next(backward_starts, starts)),
        MODEL: ("parameter", ends == _NEVER),
        LIBRARY: ("temporary", ends == _NEVER),
    }
    category = np.full(len(rows), None, dtype=object)
    for place, (name, is_long_lived) in by_part.items():
        category[part == place] = np.where(is_long_lived[part == place], name, "temporary")
    recorded = rows["category"].astype(object)
    category = np.where(recorded.notna(), recorded, category)
    return rows.assign(end_ns=ends, part=part, category=pd.Series(category, dtype=object))


def _parts(trace: Trace, rank: int, rows: pd.DataFrame) -> Labels:
    """Return the part of the step in which each block was allocated; None where that is not known."""
    stacks = rows["stack"].cat
    of_stack = np.array([*(part_of_step(stack) for stack in stacks.categories), None], dtype=object)
    part: Labels = of_stack[stacks.codes.to_numpy()]
    starts = rows["start_ns"].to_numpy(np.int64)
    bare = stacks.codes.to_numpy() < 0
    if not bare.all() and len(starts):
        # Python stacks were recorded, and threads of the autograd engine have none.
        part[bare & (starts > starts.min())] = BACKWARD
    phases = trace.phases(rank)
    own = part == LIBRARY
    for phase, place in (("forward", FORWARD), ("backward", BACKWARD), ("update", STEP)):
        times = phases[phases["phase"] == phase]
        part[_inside(starts, times["start_ns"].to_numpy(np.int64), times["end_ns"].to_numpy(np.int64)) & ~own] = place
    if not (part == BACKWARD).any():
        # Nothing says that this is training: what is outside of modules may be anything.
        in_module = np.array([*map(in_module_call, stacks.categories), False], dtype=bool)[stacks.codes.to_numpy()]
        part[(part == FORWARD) & ~in_module & phases.empty] = None
    return part


def _optimizer_steps(trace: Trace, rank: int, part: Labels, starts: Ints) -> tuple[Ints, Ints]:
    """Return starts and ends of optimizer steps: from phases, else from annotations, else from the stacks."""
    phases = trace.phases(rank)
    updates = phases[phases["phase"] == "update"]
    if updates.empty:
        notes = trace.annotations(rank)
        updates = notes[notes["name"].astype(str).str.startswith(_OPTIMIZER_STEP)]
    if len(updates):
        return updates["start_ns"].to_numpy(np.int64), np.sort(updates["end_ns"].to_numpy(np.int64))
    # A run of allocations in steps is one step, if nothing was allocated elsewhere in between.
    in_step = np.concatenate([[False], part == STEP, [False]])
    changes = np.flatnonzero(in_step[1:] != in_step[:-1])
    first, after = changes[::2], changes[1::2]
    return starts[first], np.append(starts, _NEVER - 1)[after]


def _backward_starts(trace: Trace, rank: int, part: Labels, starts: Ints) -> Ints:
    phases = trace.phases(rank)
    backwards: Ints = phases.loc[phases["phase"] == "backward", "start_ns"].to_numpy(np.int64)
    return backwards if len(backwards) else starts[part == BACKWARD]


def _next(times: Ints, moments: Ints) -> Ints:
    """Return the first of `times` after each moment; just before the end of time where there is none."""
    following: Ints = np.append(times, _NEVER - 1)[np.searchsorted(times, moments, side="right")]
    return following


def _inside(moments: Ints, starts: Ints, ends: Ints) -> npt.NDArray[np.bool_]:
    """Return which moments are inside of disjoint intervals in order."""
    number = np.searchsorted(starts, moments, side="right") - 1
    return (number >= 0) & (moments < np.append(ends, 0)[number])

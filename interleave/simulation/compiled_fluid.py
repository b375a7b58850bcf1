"""The event loop of the simulator, compiled by numba. This module is imported when it
is worth the time."""

from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable

from ebbtide.interleave.simulation import fluid

for function in (
    fluid.prepare,
    fluid.push,
    fluid.pop,
    fluid.start_tasks,
    fluid.apply_modes,
    fluid.add_needs,
    fluid.share,
    fluid.next_end,
):
    register_jitable(function)
# The results equal Python's results to the bit: without `fastmath` nothing is reordered
# or fused.
_run = njit(cache=True, error_model="numpy")(fluid.run)


def run(
    tasks: fluid.Tasks, bandwidth: fluid.Bandwidth, limit_s: float
) -> tuple[list[float], list[float], int]:
    """Return start and end of each task, and how many ended, see `fluid.run`."""
    state = fluid.new_state(tasks, bandwidth, np.zeros, _integers)
    done = _run(tasks, bandwidth, state, limit_s)
    return state.starts.tolist(), state.ends.tolist(), done


def _integers(count: int) -> Any:
    return np.zeros(count, np.int64)

"""The event loop of the simulator, compiled by numba. This module is imported when it is worth the time."""

from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable

from ebbtide.interleave.simulation import fluid

for function in (fluid.push, fluid.pop, fluid.share, fluid.start_tasks, fluid.next_end):
    register_jitable(function)
# The results are those of Python to the bit: without `fastmath` nothing is reordered or fused.
_loop = njit(cache=True, error_model="numpy")(fluid.run)


def run(tasks: fluid.Tasks, bandwidth: fluid.Bandwidth, limit_s: float) -> Any:
    """Return start and end of each task, and how many ended, see `fluid.run`."""
    total = len(tasks.lane)
    state = fluid.LaneState(*map(np.array, fluid.new_state(len(bandwidth.pool), total, len(bandwidth.limit))))
    times = np.zeros(total), np.zeros(total), tasks.waits.copy()
    done = _loop(tasks, bandwidth, state, times, limit_s)
    return times[0].tolist(), times[1].tolist(), done

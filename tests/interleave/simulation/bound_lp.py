"""An independent linear program of the bound, for workloads that clip.

Kept gradients are a stock on the device, interval by interval. Parameters are in 1e9,
bytes in 1e9, times in seconds.
"""

from __future__ import annotations

import itertools

import numpy as np
from scipy.optimize import linprog

from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine
from tests.interleave.simulation.fluid import norm_s
from tests.interleave.strategies import cpu_rate

# Variables of each interval: flows in it, and state and kept gradients on the device at
# its end.
NAMES = (
    "fetched",
    "flushed",
    "cpu updates",
    "gpu updates",
    "gradients down",
    "gradients up",
    "gradients kept",
    "uploaded",
    "state",
    "gradients",
)
G = 1e9


def update_s(workload: Workload, machine: Machine, windows: bool) -> float:
    """Return the shortest update, s. windows: state may move in any phase, not only in
    the update."""
    overhead_s = (machine.step_overhead_s or 0.0) + norm_s(workload, machine)
    intervals = cut(workload, overhead_s)
    n = workload.params / G
    width = len(NAMES)
    # The last two variables: the update's length, and the state on the device when an
    # iteration begins.
    length, first = width * len(intervals), width * len(intervals) + 1
    equal: list[tuple[dict[int, float], float]] = []
    at_most: list[tuple[dict[int, float], float]] = []
    bounds: list[tuple[float, float | None]] = [(0.0, None)] * (first + 1)
    state, grad, param = workload.state_bytes, workload.grad_bytes, workload.param_bytes
    rates = {
        direction: (getattr(machine, f"{direction}_bytes_per_s") or 0.0)
        / G
        * (1 - getattr(workload, f"{direction}_busy_share"))
        for direction in ("h2d", "d2h")
    }

    def variable(name: str, interval: int) -> int:
        return width * interval + NAMES.index(name)

    for i, (phase, seconds, free, ready) in enumerate(intervals):
        flow = {name: variable(name, i) for name in NAMES}
        up = {
            flow["fetched"]: state,
            flow["gradients up"]: grad,
            flow["uploaded"]: param,
        }
        down = {flow["flushed"]: state, flow["gradients down"]: grad}
        host = {
            **up,
            **down,
            flow["cpu updates"]: grad
            + 2 * state
            + param * (1 + (workload.master != "fp32")),
        }
        collectives = {name: sizes for name, *sizes in workload.collective_bytes}.get(
            phase, (0.0, 0.0)
        )
        length_s = {
            "other": workload.other_s,
            "forward": workload.forward_s,
            "backward": workload.backward_s,
        }.get(phase)
        left = {
            direction: max(0.05, 1 - nbytes / G / (rates[direction] * length_s))
            if length_s
            else 1.0
            for direction, nbytes in zip(("h2d", "d2h"), collectives, strict=True)
        }
        limits = [
            (up, rates["h2d"] * left["h2d"]),
            (down, rates["d2h"] * left["d2h"]),
            (host, (machine.host_memory_bytes_per_s or 0.0) / G),
        ]
        limits.append(({flow["cpu updates"]: 1.0}, cpu_rate(workload, machine) / G))
        limits.append(
            ({flow["gpu updates"]: 1.0}, (machine.gpu_update_params_per_s or 0.0) / G)
        )
        if machine.duplex_bytes_per_s is not None:
            limits.append(({**up, **down}, machine.duplex_bytes_per_s / G))
        for terms, rate in limits:
            at_most.append(
                ({**terms, length: -rate}, 0.0)
                if phase == "update"
                else (terms, rate * seconds)
            )
        before, kept_before = (
            (variable("state", i - 1), {variable("gradients", i - 1): -1.0})
            if i
            else (first, {})
        )
        equal.append(
            (
                {
                    flow["state"]: 1.0,
                    before: -1.0,
                    flow["fetched"]: -1.0,
                    flow["flushed"]: 1.0,
                },
                0.0,
            )
        )
        at_most.append(
            ({flow["gpu updates"]: 1.0, before: -1.0, flow["fetched"]: -1.0}, 0.0)
        )
        # Kept gradients are freed when the update ends, at the latest.
        freed = (
            [variable("gradients kept", j) for j in range(i + 1)]
            if phase == "update"
            else []
        )
        equal.append(
            ({flow["gradients"]: 1.0, **kept_before, flow["gradients kept"]: -1.0}, 0.0)
            if not freed
            else ({flow["gradients"]: 1.0}, 0.0)
        )
        # State and gradients at the start and at the end of an interval fit into its
        # free memory.
        grad_bytes = 0.0 if workload.gradients_held_until_step else grad
        at_most.append(({flow["state"]: state, flow["gradients"]: grad_bytes}, free))
        at_most.append(
            ({before: state, **dict.fromkeys(kept_before, grad_bytes)}, free)
        )
        at_most.append(({flow["gradients kept"]: 1.0}, n * ready))
        if phase != "update":
            for name in ("cpu updates", "gpu updates", "gradients up", "uploaded"):
                bounds[flow[name]] = (0.0, 0.0)
        if not free:
            bounds[flow["fetched"]] = bounds[flow["gpu updates"]] = (0.0, 0.0)
        if phase != "update":
            if phase in ("other", "forward") or (
                phase == "backward" and workload.gradients_held_until_step
            ):
                bounds[flow["gradients down"]] = (0.0, 0.0)
            if not windows and phase != "overhead":
                bounds[flow["fetched"]] = bounds[flow["flushed"]] = (0.0, 0.0)
        # No more gradients are copied down than are ready and not kept.
        until_now = [*range(i + 1)]
        at_most.append(
            (
                {variable("gradients down", j): 1.0 for j in until_now}
                | {variable("gradients kept", j): 1.0 for j in until_now},
                n * sum(interval[3] for interval in intervals[: i + 1]),
            )
        )
    every = range(len(intervals))
    total = {name: {variable(name, i): 1.0 for i in every} for name in NAMES}
    minus = {name: {variable(name, i): -1.0 for i in every} for name in NAMES}
    equal.append(({**total["cpu updates"], **total["gpu updates"]}, n))
    equal.append(({**total["uploaded"], **minus["cpu updates"]}, 0.0))
    equal.append(({**total["gradients down"], **total["gradients kept"]}, n))
    equal.append(
        (
            {
                **total["gradients up"],
                **total["gradients kept"],
                **minus["gpu updates"],
            },
            0.0,
        )
    )
    equal.append(({variable("state", len(intervals) - 1): 1.0, first: -1.0}, 0.0))
    cost = np.zeros(first + 1)
    cost[length] = 1.0
    solution = linprog(
        cost,
        A_ub=dense(at_most, first + 1),
        b_ub=[limit for _, limit in at_most],
        A_eq=dense(equal, first + 1),
        b_eq=[value for _, value in equal],
        bounds=bounds,
    )
    assert solution.success, solution.message
    return float(solution.fun) + overhead_s


def cut(workload: Workload, overhead: float) -> list[tuple[str, float, float, float]]:
    """Return (phase, seconds, GB free, share of the gradients computed in it) of each
    interval; 0 s for the update."""
    steps = workload.gpu_free or ((0.0, 0.0),)
    intervals = []
    begin = 0.0
    for phase, seconds in (
        ("other", workload.other_s),
        ("forward", workload.forward_s),
        ("backward", workload.backward_s),
    ):
        edges = [
            begin,
            *(time for time, _ in steps if begin < time < begin + seconds),
            begin + seconds,
        ]
        for start, end in itertools.pairwise(edges):
            if end > start:
                free = [size for time, size in steps if time <= start][-1] / G
                intervals.append(
                    (
                        phase,
                        end - start,
                        free,
                        (end - start) / seconds if phase == "backward" else 0.0,
                    )
                )
        begin += seconds
    at_end = [size for time, size in steps if time <= begin][-1:]
    last = max(at_end + [size for time, size in steps if time > begin]) / G
    # Without a backward all gradients are ready when the update begins.
    ready = 0.0 if workload.backward_s else 1.0
    return [*intervals, ("overhead", overhead, last, ready), ("update", 0.0, last, 0.0)]


def dense(rows: list[tuple[dict[int, float], float]], width: int) -> np.ndarray:
    matrix = np.zeros((len(rows), width))
    for row, (terms, _) in enumerate(rows):
        for column, factor in terms.items():
            matrix[row, column] += factor
    return matrix

"""The bound's linear program of the model, written down once more: gradients as a stock on the device, piece by piece,
for jobs that clip. Parameters in 1e9, bytes in 1e9, seconds."""

from __future__ import annotations

import itertools

import numpy as np
from scipy.optimize import linprog

from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine

# Of each piece: fetched, evicted, updated on the CPU and on the GPU, gradients down, back up, and kept from this piece
# on, updated parameters up; state and kept gradients on the device at its end.
NAMES = ("h", "e", "c", "u", "a", "b", "k", "y", "s", "g")
G = 1e9


def update_s(workload: Workload, machine: Machine, windows: bool) -> float:
    """The least update, s. windows: state may move in any phase, not within the update alone."""
    pieces = cut(workload, machine.step_overhead_s or 0.0)
    n = workload.params / G
    width = len(NAMES)
    # Last the update's length, and the state that is there when an iteration begins.
    length, first = width * len(pieces), width * len(pieces) + 1
    equal: list[tuple[dict[int, float], float]] = []
    most: list[tuple[dict[int, float], float]] = []
    bounds: list[tuple[float, float | None]] = [(0.0, None)] * (first + 1)
    state, grad, param = workload.state_bytes, workload.grad_bytes, workload.param_bytes
    rates = {
        way: (getattr(machine, f"{way}_bytes_per_s") or 0.0) / G * (1 - getattr(workload, f"{way}_busy_share"))
        for way in ("h2d", "d2h")
    }

    def at(name: str, piece: int) -> int:
        return width * piece + NAMES.index(name)

    for i, (phase, seconds, free, made) in enumerate(pieces):
        v = {name: at(name, i) for name in NAMES}
        up = {v["h"]: state, v["b"]: grad, v["y"]: param}
        down = {v["e"]: state, v["a"]: grad}
        host = {**up, **down, v["c"]: grad + 2 * state + param}
        limits = [(up, rates["h2d"]), (down, rates["d2h"]), (host, (machine.host_memory_bytes_per_s or 0.0) / G)]
        limits.append(({v["c"]: 1.0}, (machine.cpu_update_params_per_s or 0.0) / G))
        limits.append(({v["u"]: 1.0}, (machine.gpu_update_params_per_s or 0.0) / G))
        if machine.duplex_bytes_per_s is not None:
            limits.append(({**up, **down}, machine.duplex_bytes_per_s / G))
        for terms, rate in limits:
            most.append(({**terms, length: -rate}, 0.0) if phase == "update" else (terms, rate * seconds))
        before, held = (at("s", i - 1), {at("g", i - 1): -1.0}) if i else (first, {})
        equal.append(({v["s"]: 1.0, before: -1.0, v["h"]: -1.0, v["e"]: 1.0}, 0.0))
        most.append(({v["u"]: 1.0, before: -1.0, v["h"]: -1.0}, 0.0))
        # Kept gradients go when the update ends, at the latest.
        going = [at("k", j) for j in range(i + 1)] if phase == "update" else []
        equal.append(({v["g"]: 1.0, **held, v["k"]: -1.0}, 0.0) if not going else ({v["g"]: 1.0}, 0.0))
        # What is there at a piece's start and at its end fits into what is free in it.
        beside = 0.0 if workload.gradients_stay else grad
        most.append(({v["s"]: state, v["g"]: beside}, free))
        most.append(({before: state, **dict.fromkeys(held, beside)}, free))
        most.append(({v["k"]: 1.0}, n * made))
        if phase != "update":
            for name in ("c", "u", "b", "y"):
                bounds[v[name]] = (0.0, 0.0)
        if not free:
            bounds[v["h"]] = bounds[v["u"]] = (0.0, 0.0)
        if phase != "update":
            if phase in ("other", "forward") or (phase == "backward" and workload.gradients_stay):
                bounds[v["a"]] = (0.0, 0.0)
            if not windows and phase != "overhead":
                bounds[v["h"]] = bounds[v["e"]] = (0.0, 0.0)
        # No more is down than was made, less what was kept of it.
        sofar = [*range(i + 1)]
        most.append(
            (
                {at("a", j): 1.0 for j in sofar} | {at("k", j): 1.0 for j in sofar},
                n * sum(p[3] for p in pieces[: i + 1]),
            )
        )
    every = range(len(pieces))
    total = {name: {at(name, i): 1.0 for i in every} for name in NAMES}
    minus = {name: {at(name, i): -1.0 for i in every} for name in NAMES}
    equal.append(({**total["c"], **total["u"]}, n))
    equal.append(({**total["y"], **minus["c"]}, 0.0))
    equal.append(({**total["a"], **total["k"]}, n))
    equal.append(({**total["b"], **total["k"], **minus["u"]}, 0.0))
    equal.append(({at("s", len(pieces) - 1): 1.0, first: -1.0}, 0.0))
    cost = np.zeros(first + 1)
    cost[length] = 1.0
    found = linprog(
        cost,
        A_ub=dense(most, first + 1),
        b_ub=[limit for _, limit in most],
        A_eq=dense(equal, first + 1),
        b_eq=[value for _, value in equal],
        bounds=bounds,
    )
    assert found.success, found.message
    return float(found.fun) + (machine.step_overhead_s or 0.0)


def cut(workload: Workload, overhead: float) -> list[tuple[str, float, float, float]]:
    """(phase, seconds, GB free, share of the gradients made in it) of each piece; 0 s for the update."""
    line = workload.gpu_free or ((0.0, 0.0),)
    found = []
    begin = 0.0
    for phase, seconds in (
        ("other", workload.other_s),
        ("forward", workload.forward_s),
        ("backward", workload.backward_s),
    ):
        inside = [begin, *(at for at, _ in line if begin < at < begin + seconds), begin + seconds]
        for start, end in itertools.pairwise(inside):
            if end > start:
                free = [size for at, size in line if at <= start][-1] / G
                found.append((phase, end - start, free, (end - start) / seconds if phase == "backward" else 0.0))
        begin += seconds
    last = max([size for at, size in line if at <= begin][-1:] + [size for at, size in line if at > begin]) / G
    # Where there is no backward, all gradients are there when the update begins.
    rest = 0.0 if workload.backward_s else 1.0
    return [*found, ("overhead", overhead, last, rest), ("update", 0.0, last, 0.0)]


def dense(rows: list[tuple[dict[int, float], float]], width: int) -> np.ndarray:
    matrix = np.zeros((len(rows), width))
    for row, (terms, _) in enumerate(rows):
        for column, factor in terms.items():
            matrix[row, column] += factor
    return matrix

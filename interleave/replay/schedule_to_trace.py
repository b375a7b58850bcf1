"""Converts a schedule to a trace.

The trace can be plotted, reported and exported like a recorded one.
"""

from itertools import accumulate, cycle, islice

import numpy as np

from ebbtide.interleave.model.schedule import Schedule
from ebbtide.machines.machine import Machine
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

_DEVICE = "cuda:0"


def trace_of(schedule: Schedule, machine: Machine, iterations: int = 3) -> TraceBuilder:
    """Build a trace that repeats the schedule of an iteration, cut out of a training.
    Late operations of the iteration before run under the first forward, with null as
    their iteration. The pool is `device`, or `planned` where the memory of the job is
    not known."""
    workload = schedule.workload
    builder = TraceBuilder(
        "simulated", clock={"name": "simulated", "host": None, "wall_offset_ns": 0}
    )
    builder.meta["warmup_iterations"] = 0
    builder.meta["policy"] = schedule.plan.policy
    builder.meta["machine"] = machine.as_json()
    for note in (schedule.plan.remark, schedule.note, *workload.notes):
        if note:
            builder.note(note)
    peak = max(machine.h2d_bytes_per_s or 0.0, machine.d2h_bytes_per_s or 0.0) or None
    device = {
        "device": _DEVICE,
        "kind": "cuda",
        "name": machine.name,
        "capacity_bytes": round(machine.gpu_memory_bytes)
        if machine.gpu_memory_bytes
        else None,
        "link": {"peak_bytes_per_s": peak},
    }
    rank = builder.rank(
        0, devices=[device], transfers_recorded=True, model={"params": workload.params}
    )
    rank.meta["first_iteration_start_ns"] = 0
    in_turn = list(islice(cycle(schedule.iterations), iterations))
    begins = list(accumulate((_ns(one.iteration_s) for one in in_turn), initial=0))
    pool = (
        "device"
        if workload.gpu_free is not None and machine.gpu_memory_bytes
        else "planned"
    )
    if schedule.plan.has_late_operations:
        before = schedule.iterations[-1]
        _add_operations(rank, before, -1, -_ns(before.iteration_s), begins[-1])
    for iteration, one in enumerate(in_turn):
        base = begins[iteration]
        edges = np.cumsum([one.other_s, one.forward_s, one.backward_s, one.update_s])
        for phase, start, end in zip(PHASES, edges, edges[1:], strict=False):
            rank.phase(
                phase,
                base + _ns(start),
                min(base + _ns(end), begins[iteration + 1]),
                iteration,
            )
        times, used = device_memory(one, machine)
        sizes = np.rint(used).astype(np.int64)
        rank.extend(
            "memory",
            t_ns=base + np.rint(times * 1e9).astype(np.int64),
            device=_DEVICE,
            pool=pool,
            bytes=sizes,
        )
        _add_operations(rank, one, iteration, base, begins[-1])
    return builder


def _add_operations(
    rank: RankBuilder, schedule: Schedule, iteration: int, base: int, trace_end_ns: int
) -> None:
    """Add the operations of an iteration that begins at `base` ns, as far as they run
    between the start and the end of the trace."""
    for op, start, end in schedule.items():
        full_begin, full_stop = base + _ns(start), base + _ns(end)
        begin, stop = max(full_begin, 0), min(full_stop, trace_end_ns)
        if stop < begin or (stop == begin and full_stop > full_begin):
            continue
        nbytes = (
            op.nbytes
            if stop == begin
            else op.nbytes * (stop - begin) / (full_stop - full_begin)
        )
        name = op.kind if op.kind == "clip" else f"{op.kind} {op.subgroup}"
        row = {"start_ns": begin, "end_ns": stop, "resource": op.resource, "name": name}
        rank.add(
            "ops",
            **row,
            iteration=iteration if iteration >= 0 else None,
            subgroup=op.subgroup if op.subgroup >= 0 else None,
            bytes=round(nbytes) or None,
        )
        if op.resource in ("h2d", "d2h"):
            host_memory = "pageable" if op.pageable else "pinned"
            rank.transfer(
                op.resource,
                begin,
                stop,
                round(nbytes),
                _DEVICE,
                host_memory=host_memory,
                name=name,
            )


def file_name(policy: str) -> str:
    """Return a policy's string as the name of a file."""
    return "".join(
        letter if letter.isalnum() or letter in "-._@" else "_" for letter in policy
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def device_memory(
    schedule: Schedule, machine: Machine
) -> tuple[np.ndarray, np.ndarray]:
    """Return (times s, bytes) of the memory of the job, if that is known, and the plan
    on the device over an iteration."""
    times, used = schedule.device_memory_line()
    free_line = schedule.free_memory_line()
    if free_line is None or not machine.gpu_memory_bytes:
        return times, used
    free_times, free = free_line
    all_times = np.union1d(times, free_times[free_times < schedule.iteration_s])
    of_plan = used[np.searchsorted(times, all_times, side="right") - 1]
    free_then = free[
        np.maximum(np.searchsorted(free_times, all_times, side="right") - 1, 0)
    ]
    return all_times, np.maximum(machine.gpu_memory_bytes - free_then, 0.0) + of_plan

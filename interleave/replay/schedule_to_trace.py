"""A schedule as a trace, to be plotted, reported and exported like a recorded one."""

from __future__ import annotations

import numpy as np

from ebbtide.interleave.model.schedule import Schedule
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import TraceBuilder

_DEVICE = "cuda:0"


def trace_of(schedule: Schedule, machine: Machine, iterations: int = 3) -> TraceBuilder:
    """The schedule over some iterations, which are all alike. Where it is known what is free and how much memory the
    device has, `device` is the job's memory and the plan's; else `planned` is the plan's alone."""
    job = schedule.workload
    builder = TraceBuilder("simulated", clock={"name": "simulated", "host": None, "wall_offset_ns": 0})
    builder.meta["warmup_iterations"] = 0
    builder.meta["policy"] = schedule.plan.policy
    builder.meta["machine"] = machine.as_json()
    for note in (schedule.plan.remark, *job.notes):
        if note:
            builder.note(note)
    peak = max(machine.h2d_bytes_per_s or 0.0, machine.d2h_bytes_per_s or 0.0) or None
    device = {
        "device": _DEVICE,
        "kind": "cuda",
        "name": machine.name,
        "capacity_bytes": round(machine.gpu_memory_bytes) if machine.gpu_memory_bytes else None,
        "link": {"peak_bytes_per_s": peak},
    }
    rank = builder.rank(0, devices=[device], transfers_recorded=True, model={"params": job.params})
    rank.meta["first_iteration_start_ns"] = 0
    length = _ns(schedule.iteration_s)
    edges = np.cumsum([schedule.other_s, schedule.forward_s, schedule.backward_s, schedule.update_s])
    times, used = _device(schedule, machine)
    pool = "device" if job.gpu_free is not None and machine.gpu_memory_bytes else "planned"
    for iteration in range(iterations):
        base = iteration * length
        for phase, start, end in zip(("forward", "backward", "update"), edges, edges[1:], strict=False):
            rank.phase(phase, base + _ns(start), base + min(_ns(end), length), iteration)
        rank.extend("memory", t_ns=base + np.rint(times * 1e9).astype(np.int64), device=_DEVICE, pool=pool, bytes=used)
        for op, start, end in schedule.items():
            begin, stop = base + _ns(start), base + _ns(end)
            name = op.kind if op.kind in ("clip",) else f"{op.kind} {op.subgroup}"
            row = {"start_ns": begin, "end_ns": stop, "resource": op.resource, "name": name, "iteration": iteration}
            rank.add("ops", **row, subgroup=op.subgroup if op.subgroup >= 0 else None, bytes=round(op.nbytes) or None)
            if op.resource in ("h2d", "d2h"):
                host = "pageable" if op.pageable else "pinned"
                rank.transfer(op.resource, begin, stop, round(op.nbytes), _DEVICE, host_memory=host, name=name)
    return builder


def file_name(policy: str) -> str:
    """A policy's string as the name of a file."""
    return "".join(letter if letter.isalnum() or letter in "-._@" else "_" for letter in policy)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _device(schedule: Schedule, machine: Machine) -> tuple[np.ndarray, np.ndarray]:
    """(times s, bytes) of the device's memory over one iteration."""
    times, used = schedule.device_line()
    free = schedule.free_line()
    if free is None or not machine.gpu_memory_bytes:
        return times, np.rint(used).astype(np.int64)
    both = np.union1d(times, free[0][free[0] < schedule.iteration_s])
    plan = used[np.searchsorted(times, both, side="right") - 1]
    job = machine.gpu_memory_bytes - free[1][np.maximum(np.searchsorted(free[0], both, side="right") - 1, 0)]
    return both, np.rint(np.maximum(job, 0.0) + plan).astype(np.int64)

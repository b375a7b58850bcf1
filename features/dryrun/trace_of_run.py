"""Converts what a dry run has counted to a trace."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.features.dryrun.record import RunRecord
from ebbtide.features.dryrun.session import DryRun
from ebbtide.features.dryrun.time.clock import (
    DEVICE_STREAMS,
    LaunchedCopy,
    LaunchedKernel,
)
from ebbtide.features.dryrun.time.phase_tracker import FakePhase
from ebbtide.machines.kernels.time_priors import CASES, TYPICAL
from ebbtide.phases import ITERATION_PARTS, OTHER
from ebbtide.profiler.agent.without_gradients import NAME
from ebbtide.profiler.trace import TraceBuilder
from ebbtide.profiler.trace.iterations import micro_steps

_POOLS = ("requested", "allocated", "reserved")
_HOST_POOLS = ("heap", "pinned")
ITERATION = "iteration"


def trace_of_run(run: DryRun | RunRecord, command: Sequence[str] = ()) -> TraceBuilder:
    """Build the trace of a finished dry run, whose context was left, or of its record;
    the builder's `write(path)` writes it."""
    record = run.record() if isinstance(run, DryRun) else run
    records = [record, *record.peers]
    builder = TraceBuilder(
        "predicted", clock={"name": "simulated", "host": None, "wall_offset_ns": 0}
    )
    # The first iteration makes the optimizer state; alone it is better than no figures.
    builder.meta.update(
        command=list(command), warmup_iterations=1 if record.iterations > 1 else 0
    )
    machine = record.machine
    if machine is not None:
        builder.meta["machine"] = machine.as_json()
    builder.meta["prediction"] = {
        "machine": machine.name if machine is not None else None,
        "assumptions": record.assumptions,
        "times": [
            row for each in records for row in predicted_times(each.phases, each.rank)
        ],
        **record.prediction,
        "reserved_bytes": _widest(each.prediction for each in records),
    }
    if record.deepspeed is not None:
        builder.meta["deepspeed"] = record.deepspeed
    for each in records:
        _add_rank(builder, each, command)
    for note in record.notes:
        builder.note(note)
    return builder


def _widest(predictions: Iterable[dict[str, Any]]) -> list[int]:
    """Return the largest ends of the ranges of reserved memory."""
    ranges = [prediction["reserved_bytes"] for prediction in predictions]
    return [max(ends) for ends in zip(*ranges, strict=True)]


def _add_rank(builder: TraceBuilder, record: RunRecord, command: Sequence[str]) -> None:
    devices = [
        {
            "device": _name(number),
            "kind": "cuda",
            "name": record.device_name,
            "capacity_bytes": record.capacity_bytes,
        }
        for number in record.memory
    ]
    rank = builder.rank(
        record.rank,
        world_size=record.ranks,
        devices=devices,
        transfers_recorded=True,
        first_iteration_start_ns=0,
        started_ns=0,
        stopped="iterations" if record.finished else "closed",
        argv=list(command),
        **record.versions,
    )
    rank.meta.update(record.description)
    _add_phases(record.phases, rank)
    _add_forwards_without_gradients(record, rank)
    _add_marks(record, rank)
    _add_memory(record, rank)
    _add_copies(record.copies, rank)
    _add_kernels(record.kernels, rank)


def _name(device: int) -> str:
    return f"cuda:{device}"


def _devices(rows: Sequence[Any]) -> list[str]:
    """Return the names of the devices of rows."""
    return [_name(row.device) for row in rows]


def _streams(rows: Sequence[Any]) -> list[int]:
    """Return the numbers of streams of rows on their devices."""
    return [row.stream % DEVICE_STREAMS for row in rows]


def write_trace(
    record: RunRecord, command: list[str], status: int, output: Path, force: bool
) -> None:
    """Write the trace of a job that has ended with an exit status."""
    builder = trace_of_run(record, command)
    builder.meta["exit"] = {"code": status}
    builder.write(output, force)


def _add_phases(rows: Sequence[FakePhase], rank: Any) -> None:
    phases = pd.DataFrame(_columns(rows, "iteration", "phase", "start_ns", "end_ns"))
    if len(phases):
        phases["gpu_start_ns"] = [phase.gpu_start[TYPICAL] for phase in rows]
        phases["gpu_end_ns"] = [phase.gpu_end[TYPICAL] for phase in rows]
        phases["iteration"] = phases["iteration"].astype("Int64")
        phases["micro_step"] = micro_steps(phases)
        rank.extend("phases", **{column: phases[column] for column in phases})


def _add_forwards_without_gradients(record: RunRecord, rank: Any) -> None:
    for forward in record.without_gradients:
        following = record.phases[forward.phases_before : forward.phases_before + 1]
        iteration = following[0].iteration if following else None
        times = {"start_ns": forward.start_ns, "end_ns": forward.end_ns}
        rank.add("ops", **times, resource="gpu", name=NAME, iteration=iteration)


def _add_marks(record: RunRecord, rank: Any) -> None:
    times = ("start_ns", "end_ns", "gpu_start_ns", "gpu_end_ns")
    for mark in sorted(record.marks, key=lambda mark: mark.start_ns):
        columns = {column: getattr(mark, column) for column in times}
        rank.add("marks", name=mark.name, **columns)


def _add_copies(copies: Sequence[LaunchedCopy], rank: Any) -> None:
    if not copies:
        return
    columns = _columns(
        copies,
        "direction",
        "host_memory",
        "launch_ns",
        "start_ns",
        "end_ns",
    )
    sizes = [copy.size for copy in copies]
    rank.extend(
        "transfers",
        device=_devices(copies),
        stream=_streams(copies),
        bytes=sizes,
        name=columns["direction"],
        **columns,
    )


def _add_kernels(kernels: Sequence[LaunchedKernel], rank: Any) -> None:
    if not kernels:
        return
    work = _columns(
        [kernel.work for kernel in kernels], "kind", "name", "group", "flops", "bytes"
    )
    # A kernel has the name of its operation, except for collectives and kernels of
    # Triton.
    work["operator"] = [name if "::" in name else None for name in work["name"]]
    launched = _columns(kernels, "start_ns", "end_ns", "launch_ns")
    places = {"device": _devices(kernels), "stream": _streams(kernels)}
    rank.extend("kernels", **places, **launched, **work)


def _columns(rows: Sequence[Any], *names: str) -> dict[str, list[Any]]:
    """Return attributes of objects as columns."""
    return {name: [getattr(row, name) for row in rows] for name in names}


def _add_memory(record: RunRecord, rank: Any) -> None:
    pools_of_devices = [
        (_name(number), _POOLS, rows) for number, rows in record.memory.items()
    ]
    for device, pools, rows in (
        *pools_of_devices,
        ("cpu", _HOST_POOLS, record.host_memory),
    ):
        timeline = np.array(rows, dtype=np.int64).reshape(-1, 1 + len(pools))
        for column, pool in enumerate(pools, 1):
            sizes = timeline[:, column]
            changed = np.append(True, sizes[1:] != sizes[:-1])[: len(sizes)]
            rank.extend(
                "memory",
                t_ns=timeline[changed, 0],
                device=device,
                pool=pool,
                bytes=sizes[changed],
            )
    blocks = record.blocks
    if not blocks:
        return
    rank.extend(
        "allocations",
        end_ns=pd.array([block.end_ns for block in blocks], dtype="Int64"),
        device=_devices(blocks),
        bytes=[block.size for block in blocks],
        stack=pd.Categorical.from_codes(
            [block.stack for block in blocks], record.stacks
        ),
        **_columns(blocks, "start_ns", "category", "module"),
    )


def case_times_ns(phases: list[FakePhase], case: int) -> dict[int, dict[str, int]]:
    """Return ns per iteration and part (`iteration`, phases, `other`) in a case, by the
    device's times. An iteration begins where the one before ended, the first one at 0,
    and ends with its last phase."""
    spent: dict[int, dict[str, int]] = defaultdict(
        lambda: dict.fromkeys((ITERATION, *ITERATION_PARTS), 0)
    )
    ends: dict[int, int] = {}
    for phase in phases:
        if phase.iteration is not None:
            start, end = phase.gpu_start[case], phase.gpu_end[case]
            spent[phase.iteration][phase.phase] += end - start
            ends[phase.iteration] = max(ends.get(phase.iteration, 0), end)
    previous = 0
    for iteration in sorted(spent):
        parts = spent[iteration]
        parts[ITERATION] = ends[iteration] - previous
        parts[OTHER] = max(
            0,
            parts[ITERATION]
            - sum(parts[part] for part in ITERATION_PARTS if part != OTHER),
        )
        previous = ends[iteration]
    return dict(spent)


def predicted_times(phases: list[FakePhase], rank: int) -> list[dict[str, Any]]:
    """Return the least and the largest time of each part of each iteration over the
    cases, as meta.json has them."""
    cases = [case_times_ns(phases, case) for case in range(len(CASES))]
    rows = []
    for iteration, parts in cases[0].items():
        for part in parts:
            times = [case[iteration][part] / 1e6 for case in cases]
            rows.append(
                {
                    "rank": rank,
                    "iteration": iteration,
                    "phase": part,
                    "low_ms": min(times),
                    "high_ms": max(times),
                }
            )
    return rows

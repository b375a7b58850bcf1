"""Converts what a dry run has counted to a trace."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.profiler.dryrun.session import DryRun
from ebbtide.profiler.trace import TraceBuilder
from ebbtide.profiler.trace.micro_steps import micro_steps

_DEVICE = "cuda:0"
_POOLS = ("requested", "allocated", "reserved")


def trace_of_run(run: DryRun, command: list[str], torch_version: str) -> TraceBuilder:
    """Build the trace of a finished dry run.

    Args:
        run: The dry run.
        command: The job's command.
        torch_version: The version of torch.
    """
    builder = TraceBuilder("predicted", clock={"name": "simulated", "host": None, "wall_offset_ns": 0})
    # The first iteration makes the optimizer state; alone it is better than no figures.
    builder.meta.update(command=command, warmup_iterations=1 if run.tracker.rule.index > 0 else 0)
    if run.options.machine is not None:
        builder.meta["machine"] = run.options.machine.as_json()
    device = {
        "device": _DEVICE,
        "kind": "cuda",
        "name": run.options.device_name,
        "capacity_bytes": run.options.capacity_bytes,
    }
    rank = builder.rank(
        0,
        world_size=1,
        devices=[device],
        transfers_recorded=True,
        first_iteration_start_ns=0,
        started_ns=0,
        stopped="iterations" if run.finished else "closed",
        argv=command,
        python=sys.version.split()[0],
        torch=torch_version,
    )
    if run.model:
        rank.meta.update(model=run.model, optimizers=run.optimizers)
    _add_phases(run, rank)
    _add_memory(run, rank)
    for copy in run.transfers.rows:
        times = copy.start_ns, copy.end_ns
        rank.transfer(copy.direction, *times, copy.size, _DEVICE, host_memory=copy.host_memory)
    for note in run.notes():
        builder.note(note)
    return builder


def _add_phases(run: DryRun, rank: Any) -> None:
    phases = pd.DataFrame(
        [(phase.iteration, phase.phase, phase.start_ns, phase.end_ns) for phase in run.tracker.phases],
        columns=["iteration", "phase", "start_ns", "end_ns"],
    )
    if len(phases):
        phases["iteration"] = phases["iteration"].astype("Int64")
        phases["micro_step"] = micro_steps(phases)
        rank.extend("phases", **{column: phases[column] for column in phases})


def _add_memory(run: DryRun, rank: Any) -> None:
    timeline = np.array(run.memory.timeline, dtype=np.int64).reshape(-1, 1 + len(_POOLS))
    for column, pool in enumerate(_POOLS, 1):
        sizes = timeline[:, column]
        changed = np.append(True, sizes[1:] != sizes[:-1])[: len(sizes)]
        rank.extend("memory", t_ns=timeline[changed, 0], device=_DEVICE, pool=pool, bytes=sizes[changed])
    blocks = run.memory.blocks
    if not blocks:
        return
    texts = run.stacks.texts
    rank.extend(
        "allocations",
        start_ns=[block.start_ns for block in blocks],
        end_ns=pd.array([block.end_ns for block in blocks], dtype="Int64"),
        device=_DEVICE,
        bytes=[block.size for block in blocks],
        category=[block.category for block in blocks],
        module=[block.module for block in blocks],
        stack=[texts[block.stack] for block in blocks],
    )

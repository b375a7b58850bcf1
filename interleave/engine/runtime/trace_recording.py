"""Records the measured operations of a step in the trace, where `ebbtide profile` records this process."""

from __future__ import annotations

from ebbtide.interleave.engine.runtime.plan_run import PlanRun
from ebbtide.profiler.agent import start


def record_operations(run: PlanRun) -> None:
    """Add a row to the table `ops` of the trace for each operation, and for each speculative update that was not used.

    It does nothing where no recorder is running.
    """
    recorder = start.current_recorder()
    if recorder is None:
        return
    times = [*zip(range(len(run.plan.ops)), run.starts, run.ends, strict=True), *run.discarded]
    for index, start_s, end_s in times:
        op = run.plan.ops[index]
        # time.perf_counter is the recorder's clock, CLOCK_MONOTONIC.
        times_ns = (round((run.begin_s + time_s) * 1e9) for time_s in (start_s, end_s))
        subgroup = op.subgroup if op.subgroup >= 0 else None
        recorder.record_op(op.kind, op.resource, *times_ns, subgroup=subgroup, nbytes=round(op.nbytes) or None)

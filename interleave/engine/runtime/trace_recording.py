"""Records the measured operations of a step in the trace, where `ebbtide profile` records this process."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.interleave.engine.runtime.plan_run import PlanRun
from ebbtide.interleave.model.operations import STORAGE_RESOURCES
from ebbtide.interleave.model.plan import Plan
from ebbtide.profiler.agent import start
from ebbtide.profiler.agent.spool import HOST


def reserve_rows(plan: Plan) -> list[int]:
    """Return numbers for the rows of a step, so that they belong to this iteration even if they are added later.

    They are for all operations, and as many executions that were repeated. There are none where nothing is recorded.
    """
    recorder = start.current_recorder()
    if recorder is None or not recorder.recording:
        return []
    return [recorder.next_sequence() for _ in range(2 * len(plan.ops))]


def record_operations(run: PlanRun, numbers: Sequence[int]) -> None:
    """Add a row to the table `ops` of the trace for each operation, and for each speculative update that was not used.

    Args:
        run: The run of the plan.
        numbers: What `reserve_rows` has returned before the step did; without numbers nothing is added.
    """
    recorder = start.current_recorder()
    if recorder is None:
        return
    times = [*zip(range(len(run.plan.ops)), run.starts, run.ends, strict=True), *run.discarded]
    for number, (index, start_s, end_s) in zip(numbers, times, strict=False):
        op = run.plan.ops[index]
        # time.perf_counter is the recorder's clock, CLOCK_MONOTONIC.
        times_ns = (round((run.begin_s + time_s) * 1e9) for time_s in (start_s, end_s))
        subgroup = op.subgroup if op.subgroup >= 0 else None
        nbytes, device = round(op.nbytes) or None, op.path if op.resource in STORAGE_RESOURCES else HOST
        recorder.put_op(number, op.kind, op.resource, *times_ns, subgroup=subgroup, nbytes=nbytes, device=device)

"""What a step was measured to do, for the recorder of `ebbtide profile`, where one runs in this process."""

from __future__ import annotations

from ebbtide.interleave.engine.runtime.executor import Run
from ebbtide.profiler.agent import start


def tell(run: Run) -> None:
    """A row of the trace's `ops` for each operation."""
    recorder = start.running()
    if recorder is None:
        return
    for op, begin, end in zip(run.plan.ops, run.starts, run.ends, strict=True):
        # time.perf_counter is the recorder's clock, CLOCK_MONOTONIC.
        times = (round((run.begin_s + at) * 1e9) for at in (begin, end))
        subgroup = op.subgroup if op.subgroup >= 0 else None
        recorder.op(op.kind, op.resource, *times, subgroup=subgroup, nbytes=round(op.nbytes) or None)

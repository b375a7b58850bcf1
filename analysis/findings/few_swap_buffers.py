"""Finds ZeRO-Infinity jobs whose buffers are too few to read ahead and write behind an update."""

from __future__ import annotations

from ebbtide.analysis.findings.common import MIN_SHARE
from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.metrics.deepspeed import DEFAULT_SWAP_BUFFERS
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.phases import UPDATE
from ebbtide.units import bytes_text, ms_text

# Adam's parameter, gradient and two moments, of the subgroup that is updated, the next and the previous one.
_BUFFERS_PER_SUBGROUP = 4
_NEEDED = 3 * _BUFFERS_PER_SUBGROUP
_FP32_BYTES = 4


def check(metrics: TraceMetrics) -> Finding | None:
    """Compare `buffer_count` with what both pipelines need, where the job waits for storage."""
    job, iteration, update = metrics.deepspeed, metrics.iteration_ms, metrics.phase_ms(UPDATE)
    if job is None or not iteration or not update or job.offload_config.get("device") != "nvme":
        return None
    count = job.offload_config.get("buffer_count", DEFAULT_SWAP_BUFFERS)
    by_rank: dict[int, float] = {}
    for use in metrics.storage:
        by_rank[use.rank] = by_rank.get(use.rank, 0.0) + (use.wait_ms or 0.0)
    waits_ms = max(by_rank.values(), default=0.0)
    if count >= _NEEDED or waits_ms < MIN_SHARE * iteration:
        return None
    on = [name for name in ("pipeline_read", "pipeline_write") if job.offload_config.get(name) is True]
    missing_bytes = (_NEEDED - count) * _FP32_BYTES * max(job.subgroups, default=0)
    evidence = (
        f"buffer_count is {count}: enough for {max(1, count // _BUFFERS_PER_SUBGROUP)} subgroup(s) at a time, "
        f"with {' and '.join(on) or 'neither pipeline_read nor pipeline_write'} on",
        f"the job waits {ms_text(waits_ms)} per iteration for storage; its update takes {ms_text(update)}",
    )
    return Finding(
        "few-swap-buffers",
        "Buffers are too few to overlap storage with the update",
        clamp_gain(waits_ms, update - waits_ms),
        evidence,
        f"set offload_optimizer.buffer_count: {_NEEDED}, pipeline_read: true and pipeline_write: true (up to "
        f"{bytes_text(missing_bytes)} more host memory), or use a smaller sub_group_size",
    )

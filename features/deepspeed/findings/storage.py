"""Rules on optimizer state on storage."""

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.findings.needs import ITERATIONS, MIN_SHARE
from ebbtide.analysis.findings.rule import rule
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.features.deepspeed.findings.needs import STORAGE_WAITS, SWAPPED, setup_of
from ebbtide.features.deepspeed.setup import DEFAULT_SWAP_BUFFERS, DeepSpeedSetup
from ebbtide.phases import UPDATE
from ebbtide.units import bytes_text, ms_text, rate_text

_MIN_WAIT_SHARE = 0.1


@rule("storage-waits", ITERATIONS, STORAGE_WAITS)
def storage_waits(metrics: JobMetrics) -> Finding | None:
    """Compare the time in which the job waits for reads with the iteration."""
    uses = [
        use
        for use in metrics.storage
        if use.direction == "read" and use.wait_ms is not None
    ]
    use, iteration = (
        max(uses, key=lambda use: use.wait_ms or 0.0, default=None),
        metrics.iteration_ms,
    )
    if (
        use is None
        or use.wait_ms is None
        or not iteration
        or use.wait_ms < _MIN_WAIT_SHARE * iteration
    ):
        return None
    evidence = (
        f"rank {use.rank} waits {ms_text(use.wait_ms)} per iteration for reads, "
        f"{100 * use.wait_ms / iteration:.0f} % "
        f"of its time",
        f"it reads {bytes_text(use.bytes)} per iteration; while reads are in flight, "
        f"{rate_text(use.bytes / use.in_flight_ms * 1e3)}",
    )
    setup = setup_of(metrics)
    advice = (
        "move fewer bytes: smaller subgroups, gradients in host memory, as much of the "
        "state in host memory as fits "
        '(offload_optimizer.device "cpu" if all of it does), or more drives'
    )
    if setup is not None and setup.offload_config.get("pipeline_read") is not True:
        advice = (
            "set offload_optimizer.pipeline_read: true, with enough buffers "
            "(buffer_count); then " + advice
        )
    return storage_waits.finding(
        "The update waits for reads from storage",
        clamp_gain(use.wait_ms),
        evidence,
        advice,
    )


_FP32_BYTES = 4
# DeepSpeed swaps tensors of at least aio.block_size, or of this if that is more
# (swap_tensor/utils.py, aio defaults).
_DEFAULT_BLOCK_BYTES = 2**20


@rule("gradients-on-storage", ITERATIONS, SWAPPED, STORAGE_WAITS)
def gradients_on_storage(metrics: JobMetrics) -> Finding | None:
    """Sum the bytes of gradients that are written and read, and find the block size
    that avoids them."""
    job, iteration = setup_of(metrics), metrics.iteration_ms
    moved = sum(use.gradient_bytes for use in metrics.storage)
    if job is None or not moved or not iteration:
        return None
    total, waits_ms = (
        sum(use.bytes for use in metrics.storage),
        sum(use.wait_ms or 0.0 for use in metrics.storage),
    )
    gain_ms = clamp_gain(waits_ms * moved / total / len(metrics.trace.ranks))
    gain = gain_ms if gain_ms >= MIN_SHARE * iteration else None
    block = (job.info.config.get("aio") or {}).get("block_size", _DEFAULT_BLOCK_BYTES)
    evidence = [
        f"{bytes_text(moved)} of the {bytes_text(total)} that are read and written "
        "per iteration are fp32 gradients",
        f"aio.block_size is {bytes_text(block)}; DeepSpeed writes pieces of gradients "
        "of this size or more to storage",
    ]
    return gradients_on_storage.finding(
        "Gradients go to storage and back", gain, evidence, _advice(job, evidence)
    )


def _advice(job: DeepSpeedSetup, evidence: list[str]) -> str:
    pieces, subgroups = job.info.largest_stored_gradient_bytes, job.subgroups
    if pieces is None or not subgroups:
        return (
            "raise aio.block_size above the largest piece of a gradient, up to the "
            "smallest subgroup's fp32 bytes"
        )
    smallest = _FP32_BYTES * min(subgroups)
    if smallest <= pieces:
        return (
            "raise sub_group_size, so that subgroups have more than one parameter "
            "each, then set aio.block_size above "
            f"{pieces:,}"
        )
    return (
        f"set aio.block_size to {smallest:,}, the smallest subgroup in fp32 (the "
        "largest piece of a gradient has "
        f"{pieces:,}): gradients then stay in host memory, which takes {_FP32_BYTES} B "
        "per parameter there"
    )


# Adam's parameter, gradient and two moments, of the subgroup that is updated, the next
# and the previous one.
_BUFFERS_PER_SUBGROUP = 4
_NEEDED = 3 * _BUFFERS_PER_SUBGROUP


@rule("few-swap-buffers", ITERATIONS, SWAPPED, STORAGE_WAITS)
def few_swap_buffers(metrics: JobMetrics) -> Finding | None:
    """Compare `buffer_count` with what both pipelines need, where the job waits for
    storage."""
    job, iteration, update = (
        setup_of(metrics),
        metrics.iteration_ms,
        metrics.phase_ms(UPDATE),
    )
    if job is None or not iteration or not update:
        return None
    count = job.offload_config.get("buffer_count", DEFAULT_SWAP_BUFFERS)
    by_rank: dict[int, float] = {}
    for use in metrics.storage:
        by_rank[use.rank] = by_rank.get(use.rank, 0.0) + (use.wait_ms or 0.0)
    waits_ms = max(by_rank.values(), default=0.0)
    if count >= _NEEDED or waits_ms < MIN_SHARE * iteration:
        return None
    on = [
        name
        for name in ("pipeline_read", "pipeline_write")
        if job.offload_config.get(name) is True
    ]
    missing_bytes = (_NEEDED - count) * _FP32_BYTES * max(job.subgroups, default=0)
    evidence = (
        f"buffer_count is {count}: enough for {max(1, count // _BUFFERS_PER_SUBGROUP)} "
        "subgroup(s) at a time, "
        f"with {' and '.join(on) or 'neither pipeline_read nor pipeline_write'} on",
        f"the job waits {ms_text(waits_ms)} per iteration for storage; its update "
        f"takes {ms_text(update)}",
    )
    return few_swap_buffers.finding(
        "Buffers are too few to overlap storage with the update",
        clamp_gain(waits_ms, update - waits_ms),
        evidence,
        f"set offload_optimizer.buffer_count: {_NEEDED}, pipeline_read: true and "
        "pipeline_write: true (up to "
        f"{bytes_text(missing_bytes)} more host memory), or use a smaller "
        "sub_group_size",
    )

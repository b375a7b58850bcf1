"""The end of a dry run as text.

Does the job fit, what holds the memory, and how long does an iteration take?
"""

from collections.abc import Iterator

from ebbtide.analysis.metrics.devices import memory_timeline, pool_peaks
from ebbtide.analysis.metrics.iteration_mean import mean_text
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.prediction import prediction_line
from ebbtide.analysis.tables.table import Misfit, View
from ebbtide.machines.machine import SHARED_MEMORY
from ebbtide.profiler.trace import Trace
from ebbtide.units import NOT_KNOWN, bytes_text, bytes_unit, ms_text

_MAX_CATEGORIES = 4
_MAX_BOUNDS = 3
FITS, BARELY, MISFIT = "fits", "fits barely", "does not fit"
# Above this share of the capacity little is missing: libraries and other processes take
# some memory, too.
_BARELY_SHARE = 0.95


def prediction_view(trace: Trace) -> View:
    """Return the peak of memory, its largest holders, and the time of an iteration.

    The capacity is beside the peak.
    """
    metrics = JobMetrics(trace)
    yield f"{trace.path}: {prediction_line(trace)}"
    memory = _memory_line(metrics)
    yield Misfit(memory) if BARELY in memory or MISFIT in memory else memory
    if shared := (trace.meta.machine or {}).get("shared_memory"):
        yield f"        GPU and CPU {SHARED_MEMORY}: {shared}"
    yield from _device_lines(metrics)
    if (range_line := _reserved_range_line(metrics)) is not None:
        yield range_line
    if (bound_line := _bound_line(metrics)) is not None:
        yield bound_line
    yield from map(Misfit, _host_lines(metrics))
    if (
        holders := metrics.holders(largest_rank(metrics))
    ) is not None and holders.bytes:
        names = (
            (name or NOT_KNOWN).replace("_", " ") for name, _ in holders.by("category")
        )
        shares = (100 * size / holders.bytes for _, size in holders.by("category"))
        parts = [
            f"{name} {share:.0f} %" for name, share in zip(names, shares, strict=True)
        ][:_MAX_CATEGORIES]
        yield f"        peak of tensors {bytes_text(holders.bytes)}: {', '.join(parts)}"
    yield f"time    {_time_text(metrics)}"
    times = metrics.summary().iteration_range
    if times is not None:
        yield f"        {times.trust}"


def _device_lines(metrics: JobMetrics) -> Iterator[str]:
    """Yield the peak of each further device of a rank; the first is the fullest."""
    trace = metrics.trace
    for rank in trace.ranks:
        for device in trace.rank(rank).devices[1:]:
            _, sizes = memory_timeline(trace, rank, "reserved", device.device)
            peak = bytes_text(int(sizes.max())) if len(sizes) else NOT_KNOWN
            yield f"        {device.device} {peak} reserved at the peak"


def largest_rank(metrics: JobMetrics) -> int:
    """Return the rank whose tensors take the most memory."""
    trace = metrics.trace
    sizes = {
        rank: pool_peaks(trace, rank).get("requested") or 0 for rank in trace.ranks
    }
    return max(sizes, key=sizes.__getitem__)


def _memory_line(metrics: JobMetrics) -> str:
    """Return the peak of reserved memory, and whether it fits where the capacity is
    known."""
    reserved, capacity = metrics.pool_peak("reserved") or 0, metrics.capacity_bytes
    status = metrics.trace.meta.exit.code
    scale, unit = bytes_unit(capacity or reserved)
    amount = (
        f"{reserved / scale:,.2f} "
        f"{f'of {capacity / scale:,.2f} ' if capacity else ''}{unit} reserved"
    )
    if status:
        return (
            f"memory  incomplete, the job ended with status {status}: {amount} so far"
        )
    if not metrics.pool_peak("requested"):
        return (
            "memory  nothing to predict: the job has no tensor on the GPU; move model "
            'and batches to "cuda"'
        )
    spare = _spare_bytes(metrics)
    if spare is None:
        return f"memory  {amount} at the peak"
    margin = (
        f"{abs(spare) / scale:,.2f} "
        f"{'to spare beside the CUDA context' if spare >= 0 else 'too much'}"
    )
    return f"memory  {verdict(metrics)}: {amount} at the peak, {margin}"


def verdict(metrics: JobMetrics) -> str | None:
    """Return whether the job fits the memory of its device after torch has given back
    what it can; None: not known."""
    spare, capacity = _spare_bytes(metrics), metrics.capacity_bytes
    if spare is None or capacity is None:
        return None
    return (
        MISFIT
        if spare < 0
        else BARELY
        if spare < (1 - _BARELY_SHARE) * capacity
        else FITS
    )


def _spare_bytes(metrics: JobMetrics) -> int | None:
    """Return the capacity that the job does not reserve; None: it is not known.

    The CUDA context is subtracted, too.
    """
    if metrics.capacity_bytes is None:
        return None
    prediction = metrics.trace.meta.prediction
    context = prediction.context_bytes if prediction is not None else 0
    return int(metrics.capacity_bytes - context - (metrics.pool_peak("reserved") or 0))


def _reserved_range_line(metrics: JobMetrics) -> str | None:
    """Return the least and the largest peak that the job may have.

    Return None where they are the same.
    """
    prediction = metrics.trace.meta.prediction
    low, high = (prediction and prediction.reserved_bytes) or (0, 0)
    if low == high:
        return None
    scale, unit = bytes_unit(high)
    reason = "what cuDNN takes for convolutions"
    if prediction is not None and prediction.batches is not None:
        reason = (
            "batches of "
            f"{' to '.join(' x '.join(map(str, shape)) for shape in prediction.batches)}"
        )
    return (
        f"        {low / scale:,.2f} to {high / scale:,.2f} {unit} reserved, by "
        f"{reason}"
    )


def _bound_line(metrics: JobMetrics) -> str | None:
    """Return the operations whose results have the largest possible size.

    Return None where sizes do not depend on values.
    """
    prediction = metrics.trace.meta.prediction
    if prediction is None or not prediction.bounds:
        return None
    named = list(prediction.bounds.items())[:_MAX_BOUNDS]
    names = ", ".join(f"{name} ({count:,})" for name, count in named)
    return f"        an upper bound: results take their largest size in {names}"


def _host_lines(metrics: JobMetrics) -> Iterator[str]:
    """Yield a line for each limit of host memory that a rank passes while it loads,
    shards or trains."""
    prediction = metrics.trace.meta.prediction
    for kind, (used, limit) in (
        prediction.host_bytes.items() if prediction is not None else ()
    ):
        if limit is not None and used > limit:
            of_what = "may be pinned" if kind == "pinned" else "for this rank"
            yield (
                f"host    {MISFIT}: {bytes_text(used)} of {bytes_text(limit)} {of_what}"
            )


def _time_text(metrics: JobMetrics) -> str:
    summary = metrics.summary()
    times = summary.iteration_range
    if summary.iteration_ms is None or times is None:
        return "not known: no optimizer stepped"
    phases = ", ".join(
        f"{phase.phase} {ms_text(phase.median_ms)}" for phase in summary.phases[:3]
    )
    mean = mean_text(summary.uneven)
    return (
        f"{ms_text(summary.iteration_ms)} an iteration{mean} ({times.text}): {phases}"
    )

"""The workload of a recorded job."""

from ebbtide.analysis.metrics.gradient_wait import gradient_wait
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.prediction import prediction_line
from ebbtide.analysis.metrics.recorded_free_memory import (
    has_own_masters,
    param_bytes,
    recorded_free_memory,
    state_bytes,
)
from ebbtide.analysis.metrics.static_split import (
    job_framework,
    recorded_sizes,
    subgroup_params,
)
from ebbtide.errors import WorkloadError
from ebbtide.interleave.model.workload import Workload
from ebbtide.phases import BACKWARD, FORWARD, OTHER, UPDATE
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text

NO_FREE_MEMORY = "the free memory of the device is not known"
_MAX_BUSY_SHARE = 0.9


def workload_of(trace: Trace) -> Workload:
    """Return the workload of a trace.

    Times are medians over the steady iterations, of the slowest rank; free memory is
    the least at each position. Raises WorkloadError where phases or parameters were not
    recorded.
    """
    metrics = JobMetrics(trace)
    forward, backward, update = (
        metrics.phase_ms(phase) for phase in (FORWARD, BACKWARD, UPDATE)
    )
    if forward is None or backward is None:
        raise WorkloadError(
            f"{trace.path} has no finished iteration with forward, backward and "
            "update: nothing to replay"
        )
    if not update:
        raise WorkloadError(
            f"{trace.path} has no update phase: nothing to replay (an optimizer in the "
            "backward has none)"
        )
    if not metrics.params:
        raise WorkloadError(
            f"{trace.path} has no number of parameters that a rank updates: describe "
            "the job in a --workload file "
            "(keys: docs/formats.md)"
        )
    bytes_per_param = param_bytes(metrics.entry)
    wait = gradient_wait(metrics)
    waiting_ms = min(max(wait.wait_ms, 0.0), backward) if wait is not None else 0.0
    notes = [f"times and memory are {line}"] if (line := prediction_line(trace)) else []
    if waiting_ms:
        notes.append(
            f"the recorded backward waited about {waiting_ms:.0f} ms for gradient "
            "copies (an estimate): replayed "
            "without that wait"
        )
    # Times are whole nanoseconds. A difference below that is a rounding error.
    other = round(metrics.phase_ms(OTHER) or 0.0, 6)
    phase_s = {
        OTHER: other / 1e3,
        FORWARD: forward / 1e3,
        BACKWARD: (backward - waiting_ms) / 1e3,
    }
    free = recorded_free_memory(metrics, phase_s)
    if free is None:
        notes.append(NO_FREE_MEMORY)
    else:
        notes.append(f"free device memory: capacity minus {metrics.free_pool}")
    host_bytes = metrics.setup.host_buffer_bytes if metrics.setup is not None else None
    if host_bytes is not None:
        notes.append(
            f"the state is on storage: policies may use the {bytes_text(host_bytes)} "
            "of host memory that the job used "
            "for buffers and gradients"
        )
    sizes, own_masters = recorded_sizes(metrics), has_own_masters(metrics)
    params = sum(sizes) if sizes else metrics.params
    return Workload(
        name=trace.name,
        params=params,
        subgroup_params=min(subgroup_params(metrics), params),
        sizes=sizes,
        forward_s=phase_s[FORWARD],
        backward_s=phase_s[BACKWARD],
        other_s=phase_s[OTHER],
        param_bytes=bytes_per_param,
        grad_bytes=bytes_per_param,
        state_bytes=state_bytes(metrics.entry, own_masters),
        master="parameter" if own_masters else "fp32",
        gpu_free=None
        if free is None
        else tuple((time, max(0.0, size)) for time, size in free),
        accumulates=(metrics.micro_steps or 1) > 1,
        missing_bytes=max(0.0, *(-size for _, size in free or ((0.0, 0.0),))),
        host_free_bytes=host_bytes,
        h2d_busy_share=_busy_share(metrics, "h2d"),
        d2h_busy_share=_busy_share(metrics, "d2h"),
        # DeepSpeed computes the norm of all gradients, clipping or not, and skips the
        # step if it is not finite. Loops of torch do so too. No update begins before
        # the backward is over.
        clipping=True,
        framework=job_framework(metrics),
        notes=tuple(notes),
    )


def _busy_share(metrics: JobMetrics, direction: str) -> float:
    """Return the share of the link that the job itself uses in the forward, where no
    optimizer state moves."""
    use = metrics.phase_link(FORWARD, direction)
    share = use.share_of_peak if use is not None else None
    return min(max(share or 0.0, 0.0), _MAX_BUSY_SHARE)

"""Changes to a job after which its optimizer state would fit on the device, so that nothing has to be offloaded."""

from __future__ import annotations

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.recommend.recorded_job import RecordedJob
from ebbtide.state_bytes import PARAM_BYTES, REMAINDER_STATE_BYTES

_OTHER_RESULTS = "other arithmetic, other results"
# Name, bytes per parameter, and what it does to the results.
_REMAINDER = (
    f"InterleavedAdamW(..., master='remainder') on bf16 parameters ({REMAINDER_STATE_BYTES} B a parameter)",
    float(REMAINDER_STATE_BYTES),
    "the same arithmetic; parameters differ where a master is exactly between two of them",
)
_SMALLER_STATE = (
    ("bf16 moments (8 B a parameter)", 8.0, _OTHER_RESULTS),
    ("8-bit moments (6 B a parameter)", 6.0, _OTHER_RESULTS),
)


def fits_with_accumulation(workload: Workload, job: RecordedJob) -> bool:
    """Return whether the memory for accumulated gradients suffices, if all state is on the device.

    With several micro-steps, gradients stay on the device beside the activations of the next micro-step.
    """
    free = workload.min_free_bytes
    return (job.micro_steps or 1) == 1 or (free is not None and _needed_bytes(workload) <= free)


def alternatives(workload: Workload, job: RecordedJob) -> tuple[str, ...]:
    """Return sentences on less accumulation, a smaller batch and a smaller state, as far as figures are known.

    For workloads that have to offload.
    """
    texts = (_without_accumulation(workload, job), _smaller_batch(workload, job), _smaller_state(workload))
    return tuple(text for text in texts if text is not None)


def _needed_bytes(workload: Workload, state_bytes: float | None = None) -> float:
    """Return the bytes of all state and gradients, without gradients that are in the job's own memory anyway."""
    grad_bytes = 0.0 if workload.gradients_held_until_step else workload.grad_bytes
    return ((state_bytes or workload.state_bytes) + grad_bytes) * workload.params


def _max_free(workload: Workload) -> float:
    return max(size for _, size in workload.gpu_free or ((0.0, 0.0),))


def _without_accumulation(workload: Workload, job: RecordedJob) -> str | None:
    """With one micro-step, gradients take the memory of the activations that the backward releases."""
    free = workload.min_free_bytes
    state = workload.state_bytes * workload.params
    if job.micro_steps is None or job.micro_steps == 1 or free is None or state > free:
        return None
    needed = _needed_bytes(workload)
    if needed <= free or needed > _max_free(workload):
        return None
    return (
        f"with 1 micro-step an update instead of {job.micro_steps} nothing would have to be offloaded: gradients "
        f"({(needed - state) / 1e9:.1f} GB) would not stay beside activations, and the state ({state / 1e9:.1f} GB) "
        f"fits into the {free / 1e9:.1f} GB that are always free"
    )


def _smaller_batch(workload: Workload, job: RecordedJob) -> str | None:
    """The memory that varies over an iteration is taken to be in proportion to the micro-batch."""
    free, batch = workload.min_free_bytes, job.micro_batch
    if free is None or batch is None:
        return None
    needed, most = _needed_bytes(workload), _max_free(workload)
    varying = most - free
    smaller = (size for size in range(batch - 1, 0, -1) if needed <= most - varying * size / batch)
    size = next(smaller, None)
    if size is None:
        return None
    return (
        f"with a micro-batch of {size} instead of {batch} nothing would have to be offloaded: of the "
        f"{varying / 1e9:.1f} GB that vary over an iteration {varying * size / batch / 1e9:.1f} GB would remain (an "
        f"estimate, in proportion to the batch), and state and gradients take {needed / 1e9:.1f} GB of "
        f"{most / 1e9:.1f} GB"
    )


def _smaller_state(workload: Workload) -> str | None:
    """Return the optimizer with the most bytes of state, fewer than now, that would need no offload."""
    free = workload.min_free_bytes
    if free is None:
        return None
    is_half = workload.param_bytes == PARAM_BYTES
    for name, state_bytes, results in (*((_REMAINDER,) if is_half else ()), *_SMALLER_STATE):
        if state_bytes < workload.state_bytes and _needed_bytes(workload, state_bytes) <= free:
            needed_gb = state_bytes * workload.params / 1e9
            return f"with {name}, {needed_gb:.1f} GB, nothing would have to be offloaded ({results})"
    return None

"""Changes to a job after which its optimizer state would fit on the device, so that nothing has to be offloaded."""

from __future__ import annotations

from dataclasses import replace

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.recommend.choice import without_offload
from ebbtide.interleave.replay.recommend.recorded_job import RecordedJob
from ebbtide.machines.machine import Machine
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


def alternatives(workload: Workload, machine: Machine, job: RecordedJob) -> tuple[str, ...]:
    """Return sentences on less accumulation, a smaller batch and a smaller state, as far as figures are known.

    For workloads that have to offload. A change is named if all state fits on the device with it (`without_offload`).
    """
    texts = (
        _without_accumulation(workload, machine, job),
        _smaller_batch(workload, machine, job),
        _smaller_state(workload, machine),
    )
    return tuple(text for text in texts if text is not None)


def _without_accumulation(workload: Workload, machine: Machine, job: RecordedJob) -> str | None:
    """With one micro-step, gradients take the memory of the activations that the backward releases."""
    free = workload.min_free_bytes
    changed = replace(workload, accumulates=False)
    if not workload.accumulates or free is None or without_offload(changed, machine) is None:
        return None
    state, gradients = workload.state_bytes * workload.params, workload.grad_bytes * workload.params
    return (
        f"with 1 micro-step an update instead of {job.micro_steps} nothing would have to be offloaded: gradients "
        f"({gradients / 1e9:.1f} GB) would not stay beside activations, and the state ({state / 1e9:.1f} GB) "
        f"fits into the {free / 1e9:.1f} GB that are always free"
    )


def _smaller_batch(workload: Workload, machine: Machine, job: RecordedJob) -> str | None:
    """The memory that varies over an iteration is taken to be in proportion to the micro-batch."""
    batch = job.micro_batch
    if workload.gpu_free is None or batch is None:
        return None
    most = max(size for _, size in workload.gpu_free)
    varying = most - min(size for _, size in workload.gpu_free)
    for size in range(batch - 1, 0, -1):
        free = tuple((time, most - (most - least) * size / batch) for time, least in workload.gpu_free)
        # The number of samples in an update stays.
        changed = replace(workload, gpu_free=free, accumulates=True)
        if without_offload(changed, machine) is not None:
            needed = (workload.state_bytes + workload.grad_bytes) * workload.params
            return (
                f"with a micro-batch of {size} instead of {batch} nothing would have to be offloaded: of the "
                f"{varying / 1e9:.1f} GB that vary over an iteration {varying * size / batch / 1e9:.1f} GB would "
                f"remain (an estimate, in proportion to the batch), and state and gradients take {needed / 1e9:.1f} "
                f"GB of {most / 1e9:.1f} GB"
            )
    return None


def _smaller_state(workload: Workload, machine: Machine) -> str | None:
    """Return the optimizer with the most bytes of state, fewer than now, that would need no offload."""
    is_half = workload.param_bytes == PARAM_BYTES
    for name, state_bytes, results in (*((_REMAINDER,) if is_half else ()), *_SMALLER_STATE):
        changed = replace(workload, state_bytes=state_bytes)
        if state_bytes < workload.state_bytes and without_offload(changed, machine) is not None:
            needed_gb = state_bytes * workload.params / 1e9
            return f"with {name}, {needed_gb:.1f} GB, nothing would have to be offloaded ({results})"
    return None

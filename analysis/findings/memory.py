"""Device memory that is lost, or lies idle."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, Unknown
from ebbtide.analysis.metrics.trace_metrics import STATE_BYTES, Study, at_most
from ebbtide.units import bytes_text, count_text

_GIB = 2**30
# Less than this share of a device is not worth a line.
_LEAST_SHARE = 0.05
# Free all the time, and more than this share of the device: then it is memory that was paid for and is not used.
_UNUSED_SHARE = 0.25


def free_memory(study: Study) -> Finding | Unknown | None:
    """Device memory that is free all the time while optimizer state lies in host memory."""
    if not study.has_gpu or not study.iteration_ms:
        return None
    free, capacity = study.always_free_bytes, study.capacity_bytes
    if free is None or capacity is None:
        return Unknown(
            "free-memory",
            "how much device memory is free all the time?",
            "record on a machine with NVML, or import with --capacity and a monitor file",
        )
    update, offloaded = study.ms("update"), study.offloaded_params
    if free >= _GIB and update and offloaded and study.params:
        fitting = min(free / STATE_BYTES, offloaded)
        evidence = (
            f"{bytes_text(free)} of {bytes_text(capacity)} are free at every moment of every counted iteration",
            f"the state of {count_text(fitting)} parameters would fit there for good, "
            f"{100 * fitting / offloaded:.0f} % of what this rank offloads",
        )
        return Finding(
            "free-memory",
            "Device memory is free all the time while optimizer state is offloaded",
            at_most(update * fitting / offloaded),
            evidence,
            "do not offload at all"
            if fitting >= offloaded
            else "keep that part of the optimizer's state on the device (a static split, in DeepSpeed's configuration "
            f'"offload_optimizer": {{"ratio": {(offloaded - fitting) / study.params:.2f}}})',
        )
    if free < _UNUSED_SHARE * capacity:
        return None
    return Finding(
        "free-memory",
        "Device memory is free all the time",
        None,
        (f"{bytes_text(free)} of {bytes_text(capacity)} are free at every moment of every counted iteration",),
        "a larger batch, longer sequences or less recomputation would use it",
    )


def memory_outside_torch(study: Study) -> Finding | Unknown | None:
    """Device memory that torch's allocator does not know of: CUDA context, NCCL buffers, other processes."""
    if not study.has_gpu or not study.iteration_ms:
        return None
    found, capacity = study.least_gap("outside torch"), study.capacity_bytes
    if not found or capacity is None:
        return Unknown(
            "memory-outside-torch",
            "how much device memory is used outside torch?",
            "record with `ebbtide profile` (NVML beside torch's allocator)",
        )
    least = max(found)
    if least < _GIB or least < _LEAST_SHARE * capacity:
        return None
    return Finding(
        "memory-outside-torch",
        "Device memory is in use outside torch",
        None,
        (
            f"in the median iteration never less than {bytes_text(least)} of {bytes_text(capacity)} is in use on the "
            "device beyond what torch has reserved",
        ),
        "look for other processes on the card (nvidia-smi), NCCL buffers (NCCL_BUFFSIZE) and libraries with workspaces",
    )


def fragmentation(study: Study) -> Finding | Unknown | None:
    """Memory that torch has reserved and no tensor holds at any time; for offloaded state, all through the update: the
    activations that torch keeps room for then come back in the next forward."""
    if not study.has_gpu or not study.iteration_ms:
        return None
    when = "update" if study.offloaded else None
    found, capacity = study.least_gap("fragmentation", when), study.capacity_bytes
    if not found or capacity is None:
        return Unknown(
            "fragmentation",
            "how much of what torch has reserved holds no tensor?",
            "record with `ebbtide profile`; a monitor file alone does not tell torch's counts",
        )
    least = max(found)
    if least < max(_GIB, _LEAST_SHARE * capacity):
        return None
    return Finding(
        "fragmentation",
        "Torch has reserved memory that no tensor holds",
        None,
        (
            f"in the median {when or 'iteration'} never less than {bytes_text(least)} of {bytes_text(capacity)} is "
            "reserved without holding a tensor",
        ),
        "try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        + ("; empty_cache() before the update frees it for the state" if when else ""),
    )

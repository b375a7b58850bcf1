"""The kinds of devices in Chrome traces: their events, copies and collectives by name.

Sources: ActivityType.h, cupti_strings.cpp, RocprofActivity_inl.h and, of XPU,
XpuptiActivityHandlers.cpp of pytorch/kineto (114171d); c10/core/DeviceType.h of
pytorch; trace_view.json of Ascend's profiler.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class DeviceKind:
    """A kind of devices by its events in a trace."""

    name: str  # As torch and the devices of a trace have it.
    types: tuple[int, ...] = ()  # Numbers of c10::DeviceType.
    # Categories of the calls of its runtime on the host.
    calls: tuple[str, ...] = ()
    # Categories of its own activities, beside those that all kinds share.
    activities: tuple[str, ...] = ()


DEFAULT_KIND = "cuda"
# The kind whose activities have no category, but a type of task.
TASKS_KIND = "npu"
DEVICE_KINDS = (
    # HIP devices (ROCm) are `cuda` in torch; `Runtime` is of torch 1.8.
    DeviceKind(DEFAULT_KIND, (1, 6), ("cuda_runtime", "cuda_driver", "Runtime")),
    DeviceKind("xpu", (12,), ("xpu_runtime", "xpu_driver")),
    # The profiler of MPS writes signposts of macOS, so only memory is in such traces.
    DeviceKind("mps", (13,)),
    DeviceKind("hpu", (15,), ("hpu_op",)),
    DeviceKind("mtia", (19,), ("mtia_runtime",), ("mtia_ccp_events",)),
    DeviceKind("privateuseone", (20,), ("privateuse1_runtime", "privateuse1_driver")),
    DeviceKind(TASKS_KIND),
)
KIND_OF_TYPE = {number: kind.name for kind in DEVICE_KINDS for number in kind.types}
KIND_OF_CATEGORY = {
    category: kind.name
    for kind in DEVICE_KINDS
    for category in (*kind.calls, *kind.activities)
}
CALL_CATEGORIES = frozenset(name for kind in DEVICE_KINDS for name in kind.calls)
# What calls wait for.
SYNC_CATEGORIES = frozenset({"cuda_sync", "xpu_sync"})
# Each category by its name in torch, and in torch 1.8.
COPIES = frozenset({"gpu_memcpy", "Memcpy"})
MEMSETS = frozenset({"gpu_memset", "Memset"})
ACTIVITY_CATEGORIES = frozenset(
    {"kernel", "Kernel", *COPIES, *MEMSETS}
    | {name for kind in DEVICE_KINDS for name in kind.activities}
)
# Categories without anything that is read: of the host, of flows, and of counters.
UNREAD_CATEGORIES = frozenset(
    {
        "Trace", "ac2g", "async_cpu_to_gpu", "async_gpu", "collective_comm",
        "cpu_to_cuda", "cuda_event", "cuda_profiler_range", "external_correlation",
        "forward_backward", "fwd_bwd", "fwdbwd", "glow_runtime",
        "gpu_user_annotation", "hardware_counters", "mtia_counters", "mtia_insight",
        "overhead", "xpu_scope_profiler",
    }
)  # fmt: skip

# Collectives of NCCL (also RCCL's), oneCCL, HCCL and BKCL:
# ncclDevKernel_AllReduce_Sum_f32_RING_LL(...), oneccl_allreduce_large_kernel,
# hcom_allReduce__123_0.
_COLLECTIVE = re.compile(r"(?:n|r|h|x|one)ccl|\bhcom_", re.IGNORECASE)
# "Memcpy HtoD (Pinned -> Device)", of XPU "Memcpy M2D (Memory -> Device)", of old ROCm
# "CopyHostToDevice". M is memory of the system, A an array on the device, S is shared.
_COPY = re.compile(
    r"(?:Memcpy |Copy)(?P<source>H|D|M|A|P|S|Host|Device)(?P<to>to|2|To)"
    r"(?P<target>H|D|M|A|P|S|Host|Device)(?: \((?P<from>\w+) -> (?P<into>\w+)\))?"
)
_ON_HOST = frozenset({"H", "M", "Host"})
_ON_DEVICE = frozenset({"D", "A", "Device"})
_HOST_MEMORY = {"Pinned": "pinned", "Pageable": "pageable", "Memory": "pageable"}
# Kinds of tasks of Ascend, and tasks that only wait or signal.
_COPY_TASKS = re.compile("MEMCPY|SDMA")
_COMPUTE_TASKS = re.compile("AI_|AIC|AIV|DVPP|DSA")
# Calls of CANN, whose connection_id tasks have (cann_assembler.cpp in Ascend's msprof).
TASK_CALL = re.compile("(?:Node|Runtime|AscendCL)@")


@lru_cache(maxsize=1 << 14)
def copy_name(name: str) -> tuple[str | None, str | None] | None:
    """Return the direction of a copy and its host memory; None for a name that tells
    nothing.

    The direction is None for a copy within a side or between devices, the memory where
    the name does not say.
    """
    match = _COPY.match(name)
    if match is None:
        return None
    source, target = match["source"], match["target"]
    if source in _ON_HOST and target in _ON_DEVICE:
        direction, memory = "h2d", match["from"]
    elif source in _ON_DEVICE and target in _ON_HOST:
        direction, memory = "d2h", match["into"]
    else:
        return None, None
    # Host memory of SYCL is pinned; elsewhere `Host` is any memory of the host.
    pinned = match["to"] == "2" and memory == "Host"
    return direction, "pinned" if pinned else _HOST_MEMORY.get(memory or "")


def is_collective(name: str) -> bool:
    """Return whether the name of a kernel is a collective's."""
    return _COLLECTIVE.search(name) is not None


def task_category(task: object) -> str | None:
    """Return the category of a task of Ascend by its type; None for one that only waits
    or signals."""
    text = str(task)
    if _COPY_TASKS.search(text):
        return "gpu_memcpy"
    return "kernel" if _COMPUTE_TASKS.search(text) else None

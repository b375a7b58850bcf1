"""The GPU that a trace was recorded on, or predicted for, with its peak rates."""

from __future__ import annotations

import re
from typing import NamedTuple

from ebbtide.machines.catalog import preset, presets
from ebbtide.machines.gpu_compute import GpuCompute
from ebbtide.machines.machine import machine_from
from ebbtide.profiler.trace import Trace

# GPUs whose memory differs by less than this share count as the same.
_SAME_CAPACITY = 0.08
_MAKERS = frozenset({"nvidia", "amd", "instinct", "geforce", "tesla"})


class RecordedGpu(NamedTuple):
    """A GPU: its name for people, and its rates (None: not known)."""

    name: str
    compute: GpuCompute | None


def recorded_gpu(trace: Trace) -> RecordedGpu:
    """Return the GPU of a trace: that of its machine, else of the preset with the same model and memory."""
    device = trace.rank(trace.ranks[0]).main_device
    if trace.meta.machine is not None:
        machine = machine_from(trace.meta.machine, f"the machine of {trace.path}")
        if machine.gpu is not None:
            return RecordedGpu(machine.name, machine.gpu)
    name = device.name or "an unknown GPU"
    words = _words(name)
    for machine in map(preset, presets()):
        capacity = machine.gpu_memory_bytes
        if machine.gpu is None or not capacity or not device.capacity_bytes or not machine.gpu.name:
            continue
        same_memory = abs(device.capacity_bytes / capacity - 1) <= _SAME_CAPACITY
        if same_memory and words & _words(machine.gpu.name) - _MAKERS:
            return RecordedGpu(name, machine.gpu)
    return RecordedGpu(name, None)


def _words(name: str) -> set[str]:
    """Return the words of a name that tell the model, as `h100` and `4090`."""
    return {word for word in re.findall(r"[a-z]*\d+[a-z]*", name.lower()) if not word.endswith("gb")}

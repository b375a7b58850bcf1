"""Replaces the Python interface of CUDA in torch, so that a device looks available."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ebbtide.machines.gpu_compute import GpuCompute
from ebbtide.machines.gpu_sheets import GPU_SHEETS
from ebbtide.profiler.agent.patches import Patches
from ebbtide.profiler.dryrun.clock import VirtualClock
from ebbtide.profiler.dryrun.device_memory import DeviceMemory
from ebbtide.profiler.dryrun.fake_streams import DeviceGenerator, FakeStreams, HostGenerator

# Memory of the device where no capacity is stated: as an 80 GB card.
DEFAULT_CAPACITY_BYTES = 80 * 10**9
# Where no GPU is named: that of an H100.
_DEFAULT_CAPABILITY = "9.0"
_PROCESSORS = 132


def capability_of(name: str, gpu: GpuCompute | None = None) -> tuple[int, int]:
    """Return the compute capability of a device, by which jobs and torch choose kernels.

    Args:
        name: The device's name, which may be that of a preset.
        gpu: Its rates; None: those of the preset, or of an H100 for other names.
    """
    if gpu is None and name in GPU_SHEETS:
        gpu = GPU_SHEETS[name].compute
    major, minor = ((gpu and gpu.compute_capability) or _DEFAULT_CAPABILITY).split(".")
    return int(major), int(minor)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _constant(value: Any) -> Any:
    return lambda *_args, **_kwargs: value


def patch_cuda(
    patches: Patches,
    clock: VirtualClock,
    memory: DeviceMemory,
    name: str,
    capability: tuple[int, int],
    capacity_bytes: int,
    devices: int = 1,
) -> None:
    """Replace torch's CUDA functions until `patches.undo()`.

    Args:
        patches: The replacements.
        clock: The clock of events.
        memory: The memory that torch's functions report.
        name: The name of the device.
        capability: Its compute capability.
        capacity_bytes: Its memory.
        devices: Devices of the host; the job's process uses the first one.
    """
    cuda = torch.cuda
    major, minor = capability
    properties = SimpleNamespace(
        name=name, major=major, minor=minor, total_memory=capacity_bytes, multi_processor_count=_PROCESSORS,
        is_integrated=False, is_multi_gpu_board=False, max_threads_per_multi_processor=2048, warp_size=32,
        regs_per_multiprocessor=65536, shared_memory_per_block=49152, shared_memory_per_block_optin=166912,
        shared_memory_per_multiprocessor=167936, L2_cache_size=41943040, gcnArchName="", uuid="dry-run",
    )  # fmt: skip
    allocator = memory.allocator
    functions: dict[str, Any] = {
        **FakeStreams(clock).functions(),
        "is_available": _constant(True),
        "_is_compiled": _constant(True),
        "is_initialized": _constant(True),
        "_lazy_init": _nothing,
        "init": _nothing,
        "device_count": _constant(devices),
        "current_device": _constant(0),
        "set_device": _nothing,
        "ipc_collect": _nothing,
        "_exchange_device": _constant(0),
        "_maybe_exchange_device": _constant(0),
        "get_device_name": _constant(name),
        "get_device_capability": _constant(capability),
        "get_device_properties": _constant(properties),
        "get_arch_list": _constant([f"sm_{major}{minor}"]),
        "can_device_access_peer": _constant(False),
        "is_bf16_supported": _constant(True),
        "is_tf32_supported": _constant(True),
        "utilization": _constant(0),
        "is_current_stream_capturing": _constant(False),
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
        "seed": _nothing,
        "seed_all": _nothing,
        "initial_seed": _constant(0),
        "get_rng_state": lambda *_args: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda *_args: [torch.zeros(16, dtype=torch.uint8)],
        "set_rng_state": _nothing,
        "set_rng_state_all": _nothing,
        "default_generators": tuple(DeviceGenerator() for _ in range(devices)),
    }
    statistics: dict[str, Any] = {
        "memory_allocated": lambda *_args: allocator.allocated_bytes,
        "max_memory_allocated": lambda *_args: memory.peak_allocated_bytes,
        "memory_reserved": lambda *_args: allocator.reserved_bytes,
        "max_memory_reserved": lambda *_args: memory.peak_reserved_bytes,
        "memory_stats": lambda *_args: _statistics(memory),
        "memory_stats_as_nested_dict": lambda *_args: {},
        "memory_summary": _constant("(dry run)"),
        "memory_snapshot": _constant([]),
        "mem_get_info": lambda *_args: (max(0, capacity_bytes - allocator.reserved_bytes), capacity_bytes),
        "reset_peak_memory_stats": lambda *_args: memory.reset_peaks(),
        "reset_accumulated_memory_stats": _nothing,
        "empty_cache": memory.empty_cache,
        "set_per_process_memory_fraction": _nothing,
        "_record_memory_history": _nothing,
        "_dump_snapshot": _nothing,
    }
    for key, value in functions.items():
        patches.set(cuda, key, value)
    for key, value in statistics.items():
        patches.set(cuda, key, value)
        patches.set(cuda.memory, key, value)
    for key in ("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed", "get_rng_state",
                "get_rng_state_all", "set_rng_state", "set_rng_state_all"):  # fmt: skip
        patches.set(cuda.random, key, functions[key])
    _patch_extension(patches, devices)

    def record_stream(tensor: Any, stream: Any) -> None:
        memory.record_stream(tensor.untyped_storage(), stream.stream_id)

    patches.set(torch.Tensor, "record_stream", record_stream)
    patches.set(torch, "Generator", HostGenerator)
    patches.set(cuda.nvtx, "mark", _nothing)


def _patch_extension(patches: Patches, devices: int) -> None:
    """Add functions of the extension that a CPU build lacks and that Python code of torch calls."""
    for key, value in {
        "_cuda_getDeviceCount": _constant(devices),
        "_cuda_getDevice": _constant(0),
        "_cuda_setDevice": _nothing,
        "_cuda_synchronize": _nothing,
        "_cuda_isCurrentStreamCapturing": _constant(False),
        "_cuda_getCurrentRawStream": _constant(0),
        "_cuda_isInBadFork": _constant(False),
        "_cuda_emptyCache": _nothing,
        "_cuda_clearCublasWorkspaces": _nothing,
    }.items():
        patches.set(torch._C, key, value)


def _statistics(memory: DeviceMemory) -> dict[str, int]:
    allocator = memory.allocator
    pairs = {
        "allocated_bytes": (allocator.allocated_bytes, memory.peak_allocated_bytes),
        "active_bytes": (allocator.allocated_bytes, memory.peak_allocated_bytes),
        "reserved_bytes": (allocator.reserved_bytes, memory.peak_reserved_bytes),
        "requested_bytes": (memory.requested_bytes, memory.peak_bytes),
    }
    values = {f"{key}.all.current": now for key, (now, _) in pairs.items()}
    values.update({f"{key}.all.peak": peak for key, (_, peak) in pairs.items()})
    return {**values, "num_alloc_retries": allocator.retries, "num_ooms": 0}

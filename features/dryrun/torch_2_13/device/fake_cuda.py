"""Replaces the Python interface of CUDA in torch, so that a device looks available."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.cuda._utils import _get_device_index as get_device_index

from ebbtide.features.dryrun.gpu import FakedGpu
from ebbtide.features.dryrun.memory.allocator_pools import AllocatorSettings
from ebbtide.features.dryrun.memory.device_memory import DeviceMemory, DeviceUse
from ebbtide.features.dryrun.sink import Sink
from ebbtide.features.dryrun.time.clock import VirtualClock
from ebbtide.features.dryrun.torch_2_13.device.streams import stream_functions
from ebbtide.profiler.agent.patches import Patches, wrapper

# Bytes of shared memory that a block may have, by compute capability: from the CUDA C++
# Programming Guide.
_SHARED_BYTES = {
    (7, 0): 98304, (7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 9): 101376,
    (12, 0): 101376,
}  # fmt: skip
_MOST_SHARED_BYTES = 232448
# That a block cannot have.
_RESERVED_SHARED_BYTES = 1024
_KINDS = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes",
    "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
_POOLS = ("all", "large_pool", "small_pool")
_FIGURES = ("current", "peak", "allocated", "freed")
_COUNTERS = (
    "num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc",
    "num_device_free", "max_split_size",
)  # fmt: skip
# Functions of `torch.cuda` by what they return.
_RANDOM = (
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
)
_WITHOUT_EFFECT = ("_lazy_init", "init", "ipc_collect", *_RANDOM)
_TRUE = (
    "is_available",
    "_is_compiled",
    "is_initialized",
    "is_bf16_supported",
    "is_tf32_supported",
)
_ZERO = ("utilization", "initial_seed")


class _GeneratorMeta(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)


class HostGenerator(torch._C.Generator, metaclass=_GeneratorMeta):  # type: ignore[misc]
    """A random generator, of the host whatever device is named."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")


class DeviceGenerator(HostGenerator):
    """A default generator of a device, with the state that the functions in
    `torch.cuda.random` return."""

    def get_state(self) -> Any:
        """Return a state of zeros, with the size of a CUDA generator's."""
        return torch.zeros(16, dtype=torch.uint8)

    def set_state(self, _state: Any) -> DeviceGenerator:
        """Keep no state, since random numbers of the device are not known."""
        return self


# Functions of `torch.cuda.cudart()` without an effect on what is counted.
_RUNTIME = (
    "cudaHostRegister", "cudaHostUnregister", "cudaProfilerStart", "cudaProfilerStop",
    "cudaDeviceSynchronize"
)  # fmt: skip


class CurrentDevice:
    """The device of the process that is used where none is named, of `devices`; the
    clock has its number."""

    def __init__(self, clock: VirtualClock, devices: int) -> None:
        self._clock, self._devices = clock, devices

    def set(self, device: Any) -> None:
        """Set it, by its number or its name."""
        index = get_device_index(device, optional=True)
        if 0 <= index < self._devices:
            self._clock.device = index

    def exchange(self, device: Any) -> int:
        """Set it, and return the one before."""
        before = self._clock.device
        self.set(device)
        return before

    def functions(self) -> dict[str, Any]:
        """Return the functions of `torch.cuda`.

        Each name has a function of its own, as in `constant`: methods are equal.
        """
        return {
            "current_device": lambda: self._clock.device,
            "set_device": lambda device: self.set(device),
            "_exchange_device": lambda device: self.exchange(device),
            "_maybe_exchange_device": lambda device: self.exchange(device),
        }


def constant(value: Any) -> Any:
    """Return a function of its own for each name, since dynamo has one rule for a
    function."""
    return lambda *_args, **_kwargs: value


def patch_cuda(patches: Patches, sink: Sink, gpu: FakedGpu, devices: int = 1) -> None:
    """Replace torch's CUDA functions until `patches.undo()`.

    `devices`: devices of the host, which the process may use."""
    cuda, memory = torch.cuda, sink.memory
    capacity_bytes = gpu.capacity_bytes

    def set_fraction(fraction: float, device: Any = None) -> None:
        use = memory.use(get_device_index(device, optional=True))
        use.allocator.set_limit(int(fraction * capacity_bytes))

    def set_allocator_settings(text: str) -> None:
        memory.set_settings(AllocatorSettings.parse(text))

    patches.set(torch._C, "_accelerator_setAllocatorSettings", set_allocator_settings)
    current = CurrentDevice(sink.clock, devices)
    functions = {
        **stream_functions(sink.clock),
        **_device_functions(gpu, devices),
        **current.functions(),
    }
    statistics = {
        **_memory_functions(memory, capacity_bytes),
        "set_per_process_memory_fraction": set_fraction,
    }
    for key, value in functions.items():
        patches.set(cuda, key, value)
    for key, value in statistics.items():
        patches.set(cuda, key, value)
        patches.set(cuda.memory, key, value)
    for key in (*_RANDOM, "initial_seed", "get_rng_state", "get_rng_state_all"):
        patches.set(cuda.random, key, functions[key])
    _patch_extension(patches, devices, current.functions())
    _patch_accelerator(patches, functions | statistics)
    runtime = {name: constant(0) for name in _RUNTIME}  # 0 is cudaSuccess
    runtime |= {
        "cudaError": SimpleNamespace(success=0),
        "cudaMemGetInfo": statistics["mem_get_info"],
    }
    patches.set(cuda, "_cudart", SimpleNamespace(**runtime))

    def record_stream(tensor: Any, stream: Any) -> None:
        memory.record_stream(tensor.untyped_storage()._cdata, stream.stream_id)

    patches.set(torch.Tensor, "record_stream", record_stream)
    # Memory of the device is shared as it is.
    patches.wrap(torch.Tensor, "share_memory_", _share_real)
    patches.set(torch, "Generator", HostGenerator)
    patches.set(cuda.nvtx, "mark", constant(None))


@wrapper
def _share_real(original: Any, tensor: Any) -> Any:
    return tensor if isinstance(tensor, FakeTensor) else original(tensor)


def _device_functions(gpu: FakedGpu, devices: int) -> dict[str, Any]:
    """Return the functions of `torch.cuda` that do not change what is counted."""
    major, minor = gpu.capability
    shared_bytes = _SHARED_BYTES.get(gpu.capability, _MOST_SHARED_BYTES)
    properties = SimpleNamespace(
        name=gpu.name, major=major, minor=minor, total_memory=gpu.capacity_bytes,
        multi_processor_count=gpu.multiprocessors.count,
        is_integrated=False, is_multi_gpu_board=False,
        max_threads_per_multi_processor=gpu.multiprocessors.threads, warp_size=32,
        regs_per_multiprocessor=65536, shared_memory_per_block=49152,
        shared_memory_per_block_optin=shared_bytes,
        shared_memory_per_multiprocessor=shared_bytes + _RESERVED_SHARED_BYTES,
        L2_cache_size=41943040,
        gcnArchName="", uuid="dry-run",
    )  # fmt: skip
    return {
        **{name: constant(None) for name in _WITHOUT_EFFECT},
        **{name: constant(True) for name in _TRUE},
        **{
            name: constant(False)
            for name in ("can_device_access_peer", "is_current_stream_capturing")
        },
        **{name: constant(0) for name in _ZERO},
        "device_count": constant(devices),
        "get_device_name": constant(gpu.name),
        "get_device_capability": constant(gpu.capability),
        "get_device_properties": constant(properties),
        "get_arch_list": constant([f"sm_{major}{minor}"]),
        "get_rng_state": lambda *_args, **_kwargs: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda *_args, **_kwargs: [
            torch.zeros(16, dtype=torch.uint8)
        ],
        "default_generators": tuple(DeviceGenerator() for _ in range(devices)),
    }


def _memory_functions(memory: DeviceMemory, capacity_bytes: int) -> dict[str, Any]:
    """Return the functions of `torch.cuda.memory`."""

    def use(device: Any = None) -> DeviceUse:
        return memory.use(get_device_index(device, optional=True))

    def free_and_total(device: Any = None) -> tuple[int, int]:
        reserved = use(device).allocator.reserved_bytes
        return max(0, capacity_bytes - reserved), capacity_bytes

    return {
        "memory_allocated": lambda device=None: use(device).allocator.allocated_bytes,
        "max_memory_allocated": lambda device=None: use(device).peak_allocated_bytes,
        "memory_reserved": lambda device=None: use(device).allocator.reserved_bytes,
        "max_memory_reserved": lambda device=None: use(device).peak_reserved_bytes,
        "memory_stats": lambda device=None: _statistics(use(device)),
        "memory_stats_as_nested_dict": lambda device=None: _nested(
            _statistics(use(device))
        ),
        "memory_snapshot": constant([]),
        "mem_get_info": free_and_total,
        "reset_peak_memory_stats": lambda device=None: use(device).reset_peaks(),
        "reset_accumulated_memory_stats": constant(None),
        "empty_cache": memory.empty_cache,
        "_record_memory_history": constant(None),
        "_dump_snapshot": constant(None),
    }


def _patch_extension(patches: Patches, devices: int, functions: dict[str, Any]) -> None:
    """Add functions of the extension that a CPU build lacks and that Python code of
    torch calls."""
    for key, value in {
        "_cuda_getDeviceCount": constant(devices),
        "_cuda_getDevice": functions["current_device"],
        "_cuda_setDevice": functions["set_device"],
        "_cuda_synchronize": constant(None),
        "_cuda_isCurrentStreamCapturing": constant(False),
        "_cuda_getCurrentRawStream": constant(0),
        "_cuda_isInBadFork": constant(False),
        "_cuda_emptyCache": constant(None),
        "_cuda_clearCublasWorkspaces": constant(None),
    }.items():
        patches.set(torch._C, key, value)


def _patch_accelerator(patches: Patches, functions: dict[str, Any]) -> None:
    """Let `torch.accelerator` do what `torch.cuda` does."""
    for key, name in {
        "getDeviceIndex": "current_device",
        "setDeviceIndex": "set_device",
        "exchangeDevice": "_exchange_device",
        "maybeExchangeDevice": "_maybe_exchange_device",
        "getStream": "current_stream",
        "setStream": "set_stream",
        "synchronizeDevice": "synchronize",
        "emptyCache": "empty_cache",
        "getMemoryInfo": "mem_get_info",
        "getDeviceStats": "memory_stats_as_nested_dict",
        "resetPeakStats": "reset_peak_memory_stats",
        "resetAccumulatedStats": "reset_accumulated_memory_stats",
        "isAllocatorInitialized": "is_available",
    }.items():
        patches.set(torch._C, f"_accelerator_{key}", functions[name])
    patches.set(torch._C, "_accelerator_emptyHostCache", constant(None))
    data_types = {each for each in vars(torch).values() if type(each) is torch.dtype}
    capability = {"supported_dtypes": data_types}
    patches.set(torch._C, "_accelerator_getDeviceCapability", constant(capability))
    patches.set(torch, "Stream", functions["Stream"])
    patches.set(torch, "Event", functions["Event"])


def _statistics(use: DeviceUse) -> dict[str, int]:
    allocator = use.allocator
    pairs = {
        "allocated_bytes": (allocator.allocated_bytes, use.peak_allocated_bytes),
        "active_bytes": (allocator.allocated_bytes, use.peak_allocated_bytes),
        "reserved_bytes": (allocator.reserved_bytes, use.peak_reserved_bytes),
        "requested_bytes": (use.requested_bytes, use.peak_bytes),
    }
    values = dict.fromkeys(_STATISTICS, 0)
    for key, (now, peak) in pairs.items():
        values[f"{key}.all.current"], values[f"{key}.all.peak"] = now, peak
    return values | {"num_alloc_retries": allocator.retries}


def _nested(values: dict[str, int]) -> dict[str, Any]:
    """Return values whose names have dots as dictionaries in one another."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


# Names of the statistics that torch returns.
_STATISTICS = (
    *(".".join(parts) for parts in product(_KINDS, _POOLS, _FIGURES)),
    *(".".join(parts) for parts in product(("oversize_allocations",), _FIGURES)),
    *(".".join(parts) for parts in product(("oversize_segments",), _FIGURES)),
    *_COUNTERS,
)

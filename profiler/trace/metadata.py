"""The typed metadata of a trace: the keys of its meta.json, which docs/trace-format.md specifies.

What was not recorded is None or empty. Keys that the format does not specify are not here; they stay in
`Trace.raw_meta`, from which traces are written again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
TimeNs = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e15)]
BytesPerS = Annotated[float, Meta(ge=0, le=1e18)]


class _Section(msgspec.Struct, frozen=True, omit_defaults=True):
    """A JSON object of meta.json."""


class LinkInfo(_Section, frozen=True, kw_only=True):
    """The PCIe link of a GPU: as it was when described, and at most. The peak is that of one direction."""

    generation: Count | None = None
    width: Count | None = None
    max_generation: Count | None = None
    max_width: Count | None = None
    peak_bytes_per_s: BytesPerS | None = None


class DeviceInfo(_Section, frozen=True, kw_only=True):
    """A GPU, or the CPU of a job without a GPU.

    Attributes:
        device: The rank's own name of it, `cuda:0` or `cpu`.
        kind: `cuda` or `cpu`.
        capacity_bytes: The memory of the card, or of the host where the device is the CPU.
        cores: Logical cores that the job may use; only of a host's CPU.
        index: The number that NVML gives the card; only of a host's GPUs, as `link_source`.
        link_source: The source of the samples in the table `link`.
        link_missing: The reason why there are none, of a GPU that was sampled.
        parent_uuid: Of a MIG device, the UUID of its card.
        numa_node: The NUMA node that a GPU is attached to.
    """

    device: str | None = None
    kind: str | None = None
    name: str | None = None
    capacity_bytes: Count | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    link: LinkInfo = LinkInfo()
    driver: str | None = None
    cores: Count | None = None
    index: Count | None = None
    link_source: str | None = None
    link_missing: str | None = None
    parent_uuid: str | None = None
    numa_node: Count | None = None


class NumaNodeInfo(_Section, frozen=True, kw_only=True):
    """A NUMA node of a host. cpus: its logical cores as Linux writes them (`0-15,64-79`), empty for memory alone."""

    node: Count
    cpus: str = ""
    memory_bytes: Count | None = None


class NumaPlacement(_Section, frozen=True, kw_only=True):
    """The NUMA nodes that a process uses.

    Attributes:
        cpu_nodes: The nodes of the cores that its main thread may use.
        memory_bytes: Its resident bytes by node with cores, at the reading with the most; empty where not read.
    """

    cpu_nodes: tuple[Count, ...] = ()
    memory_bytes: dict[str, Count] = {}


class MemoryLimitInfo(_Section, frozen=True, kw_only=True):
    """The limit of host memory for the job: that of the nearest control group with one."""

    control_group: str | None = None
    bytes: Count | None = None


class HostInfo(_Section, frozen=True, kw_only=True):
    """The host of the recording. nvml: why NVML could not be used, None where it could."""

    name: str | None = None
    kernel: str | None = None
    cpu: DeviceInfo = DeviceInfo()
    gpus: tuple[DeviceInfo, ...] = ()
    numa_nodes: tuple[NumaNodeInfo, ...] = ()
    memory_limit: MemoryLimitInfo = MemoryLimitInfo()
    nvml: str | None = None


class ClockInfo(_Section, frozen=True, kw_only=True):
    """The clock of the trace. wall_offset_ns: Unix time minus the time of the trace."""

    name: str | None = None
    host: str | None = None
    wall_offset_ns: TimeNs | None = None


class RecordingOptions(_Section, frozen=True, kw_only=True):
    """The options of the recorder.

    Attributes:
        iterations: The first iteration and the end, which is excluded; None: all.
        on_demand: Whether details were recorded only in slices: `RankInfo.detailed_slices`.
    """

    iterations: tuple[Count, Count | None] | None = None
    max_bytes: Count | None = None
    poll_ms: float | None = None
    allocator_iterations: Count | None = None
    transfers: bool | None = None
    memory: bool | None = None
    on_demand: bool | None = None


class ImportedFile(_Section, frozen=True, kw_only=True):
    """A file that the trace was imported from."""

    format: str | None = None
    file: str | None = None


class ExitStatus(_Section, frozen=True, kw_only=True):
    """The end of the job: its exit code, or the signal that ended it."""

    code: int | None = None
    signal: int | None = None


class ThreadInfo(_Section, frozen=True, kw_only=True):
    """Threads of a process: those of torch, and OMP_NUM_THREADS as it was set."""

    torch: Count | None = None
    omp: int | str | None = None


class ModelInfo(_Section, frozen=True, kw_only=True):
    """The model of a rank.

    Attributes:
        classes: Class names of the outermost modules.
        params: Parameters whose optimizer state this rank holds.
        total_params: Parameters of all ranks.
        trainable_params: Trainable parameters on this rank.
        bytes: Bytes of the parameters on this rank.
        dtypes: The number of parameters on this rank by dtype.
    """

    classes: tuple[str, ...] = ()
    params: Count | None = None
    total_params: Count | None = None
    trainable_params: Count | None = None
    bytes: Count | None = None
    dtypes: dict[str, Count] = {}


class OptimizerInfo(_Section, frozen=True, kw_only=True):
    """The optimizers of one class on a rank.

    Attributes:
        class_name: The class; under ZeRO that of the optimizer inside. The JSON key is `class`.
        params: Parameters that they update on this rank, padding included.
        state_bytes: Bytes of state; None where it is stored on a disk or in another process.
        state_dtypes: The number of state elements by dtype.
        state_devices: Devices that hold state: `cpu`, `cuda`, `nvme`.
    """

    class_name: str | None = msgspec.field(default=None, name="class")
    count: Count | None = None
    groups: Count | None = None
    params: Count | None = None
    param_dtypes: tuple[str, ...] = ()
    state_bytes: Count | None = None
    state_dtypes: dict[str, Count] = {}
    state_devices: tuple[str, ...] = ()


class DeepSpeedInfo(_Section, frozen=True, kw_only=True):
    """The setup of a DeepSpeed job, as its first rank or its log reported it.

    Attributes:
        config: The user's configuration.
        stage: The stage of ZeRO.
        subgroup_params: Parameters of each subgroup of the first rank, padding included.
        subgroup_devices: The device of each subgroup's fp32 master weights: `cpu`, `cuda`.
        masters_pinned: Whether master weights in host memory are pinned; None where there are none.
        gradients_pinned: The same of the gradients that belong to them.
        policy: The policy of ebbtide's engine, where it ran the job.
        moments_lost: Whether state on storage was loaded from a checkpoint without its moments; None where none was
            loaded.
        largest_stored_gradient_bytes: Bytes of the largest piece of a gradient that is swapped to storage.
    """

    version: str | None = None
    config: dict[str, Any] = {}
    stage: int | None = None
    subgroup_params: tuple[Positive, ...] = ()
    subgroup_devices: tuple[str, ...] = ()
    masters_pinned: bool | None = None
    gradients_pinned: bool | None = None
    activation_checkpointing: bool | None = None
    policy: str | None = None
    moments_lost: bool | None = None
    largest_stored_gradient_bytes: Positive | None = None


class HeldMemory(_Section, frozen=True, kw_only=True):
    """Bytes of a device that a module holds. category: `parameter`, `buffer`, `gradient` or `optimizer_state`."""

    device: str
    category: str
    module: str | None = None
    bytes: Count


class Inventory(_Section, frozen=True, kw_only=True):
    """Parameters, buffers, gradients and optimizer state at one time. reason: `update` or `out of memory`."""

    t_ns: TimeNs
    iteration: Count | None = None
    phase: str | None = None
    reason: str | None = None
    holders: tuple[HeldMemory, ...] = ()


class AllocatorState(_Section, frozen=True, kw_only=True):
    """The segments of torch's allocator on a device, at the end of a memory snapshot.

    Attributes:
        private_segments: Segments in private pools, of CUDA graphs; `private_bytes` are theirs.
        requested_bytes: What tensors requested of `allocated_bytes`, the blocks in use.
        inactive_bytes: Free blocks in segments that also have blocks in use: torch cannot return them.
        largest_free_bytes: The largest free block: the most that torch can allocate without a new segment.
    """

    device: str
    segments: Count
    private_segments: Count
    reserved_bytes: Count
    private_bytes: Count
    allocated_bytes: Count
    requested_bytes: Count
    inactive_bytes: Count
    largest_free_bytes: Count


class OutOfMemoryRecord(_Section, frozen=True, kw_only=True):
    """An out-of-memory error of the job.

    Attributes:
        device: The rank's own name of the device that had too little memory.
        iteration: The iteration, as far as optimizers had stepped.
        phase: The phase, or `other`.
        requested_bytes: Bytes that were asked for.
        free_bytes: Free bytes of the device.
        reserved_bytes: Bytes that torch had reserved.
        allocated_bytes: Bytes in use by tensors; on the CPU malloc's bytes in use.
        capacity_bytes: Bytes of the device.
        message: Text of the error.
    """

    t_ns: TimeNs
    device: str | None = None
    iteration: Count | None = None
    phase: str | None = None
    requested_bytes: Count | None = None
    free_bytes: Count | None = None
    reserved_bytes: Count | None = None
    allocated_bytes: Count | None = None
    capacity_bytes: Count | None = None
    message: str | None = None


class DetailedSlice(_Section, frozen=True, kw_only=True):
    """Iterations of a rank in which details were recorded, of a recording on demand.

    Attributes:
        iterations: The first iteration and the end, which is excluded.
        span_ns: Start and end of their recording.
        allocator_iterations: Number of iterations in which every allocation was to be recorded.
        transfers: Whether copies and kernels were to be recorded.
    """

    iterations: tuple[Count, Count]
    span_ns: tuple[TimeNs, TimeNs]
    allocator_iterations: Count = 0
    transfers: bool = False


class RankInfo(_Section, frozen=True, kw_only=True):
    """One rank: its process, devices, model and optimizers.

    Attributes:
        transfers_recorded: Whether the table `transfers` has every copy; if not, an empty table means nothing.
        transfers_spans_ns: The spans of time in which it has every copy, disjoint and ascending; empty: at all times.
        detailed_slices: Of a recording on demand, the only iterations in which the process read memory.
        inventories: What parameters, gradients and optimizer state held, by time.
        out_of_memory: The first out-of-memory errors, by time.
        stopped: The reason for the end of the recording: `closed`, `iterations`, `max-size`, `fault` or `cut off`.
    """

    rank: Count
    world_size: Count | None = None
    local_rank: Count | None = None
    host: str | None = None
    pid: Count | None = None
    devices: tuple[DeviceInfo, ...] = ()
    transfers_recorded: bool = False
    transfers_spans_ns: tuple[tuple[TimeNs, TimeNs], ...] = ()
    detailed_slices: tuple[DetailedSlice, ...] = ()
    first_iteration_start_ns: TimeNs | None = None
    started_ns: TimeNs | None = None
    stopped: str | None = None
    argv: tuple[str, ...] = ()
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    threads: ThreadInfo = ThreadInfo()
    model: ModelInfo = ModelInfo()
    optimizers: tuple[OptimizerInfo, ...] = ()
    numa: NumaPlacement | None = None
    inventories: tuple[Inventory, ...] = ()
    allocators: tuple[AllocatorState, ...] = ()
    out_of_memory: tuple[OutOfMemoryRecord, ...] = ()

    @property
    def main_device(self) -> DeviceInfo:
        """The device that the figures of this rank describe: its first one; an empty entry where it has none."""
        return self.devices[0] if self.devices else DeviceInfo()


class PredictedTime(_Section, frozen=True, kw_only=True):
    """The range of the time of a part of an iteration: `iteration`, a phase, or `other`."""

    rank: Count
    iteration: Count
    phase: str
    low_ms: Milliseconds
    high_ms: Milliseconds


class PredictionInfo(_Section, frozen=True, kw_only=True):
    """The basis of a predicted trace.

    Attributes:
        machine: The machine whose rates were used; None: none was named.
        assumptions: What the times rest on, in words, by subject.
        times: Times under fast and slow assumptions; the tables have those under typical ones.
    """

    machine: str | None = None
    assumptions: dict[str, str] = {}
    times: tuple[PredictedTime, ...] = ()


class TraceMeta(_Section, frozen=True, kw_only=True):
    """The metadata of a trace.

    Attributes:
        state: `complete`, or `recording` while its spools are the data.
        warmup_iterations: Iterations at the start that medians leave out; None: the default of `steady_iterations`.
        hosts: Names of the hosts of a merged trace.
        machine: The object of a machine file, of a simulated trace.
        policy: The policy of a simulated trace.
        prediction: The basis of a predicted trace.
        provenance: The origin of a trace that others published.
    """

    ranks: tuple[RankInfo, ...]
    state: Literal["complete", "recording"] = "complete"
    source: Literal["recorded", "imported", "simulated", "predicted"] | None = None
    ebbtide: str | None = None
    command: tuple[str, ...] = ()
    cwd: str | None = None
    started_wall_ns: TimeNs | None = None
    started_ns: TimeNs | None = None
    ended_wall_ns: TimeNs | None = None
    clock: ClockInfo = ClockInfo()
    host: HostInfo = HostInfo()
    hosts: tuple[str | None, ...] = ()
    options: RecordingOptions = RecordingOptions()
    warmup_iterations: Count | None = None
    imported: tuple[ImportedFile, ...] = ()
    deepspeed: DeepSpeedInfo | None = None
    machine: dict[str, Any] | None = None
    policy: str | None = None
    prediction: PredictionInfo | None = None
    exit: ExitStatus = ExitStatus()
    notes: tuple[str, ...] = ()
    provenance: dict[str, Any] | None = None

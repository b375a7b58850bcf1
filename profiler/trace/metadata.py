"""The typed metadata of a trace: the keys of its meta.json (docs/trace-format.md).

What was not recorded is None or empty. Keys that the format does not specify are not
here; they stay in `Trace.raw_meta`, from which traces are written again.
"""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ebbtide import seams
from ebbtide.errors import TraceError
from ebbtide.json_files import validation_problem

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
TimeNs = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e15)]
BytesPerS = Annotated[float, Meta(ge=0, le=1e18)]


class _Section(msgspec.Struct, frozen=True, omit_defaults=True):
    """A JSON object of meta.json."""


class LinkInfo(_Section, frozen=True, kw_only=True):
    """The PCIe link of a GPU: as it was when described, and at most.

    The peak is for one direction.
    """

    generation: Count | None = None
    width: Count | None = None
    max_generation: Count | None = None
    max_width: Count | None = None
    peak_bytes_per_s: BytesPerS | None = None


class DeviceInfo(_Section, frozen=True, kw_only=True):
    """A GPU, or the CPU of a job without a GPU."""

    device: str | None = None
    kind: str | None = None
    name: str | None = None
    capacity_bytes: Count | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    link: LinkInfo = LinkInfo()
    driver: str | None = None
    cores: Count | None = None
    threads_per_core: Count | None = None
    index: Count | None = None
    link_source: str | None = None
    link_missing: str | None = None
    parent_uuid: str | None = None
    numa_node: Count | None = None


class NumaNodeInfo(_Section, frozen=True, kw_only=True):
    """A NUMA node of a host.

    cpus: its logical cores as Linux writes them (`0-15,64-79`), empty for memory alone.
    """

    node: Count
    cpus: str = ""
    memory_bytes: Count | None = None


class NumaPlacement(_Section, frozen=True, kw_only=True):
    """The NUMA nodes that a process uses."""

    cpu_nodes: tuple[Count, ...] = ()
    memory_bytes: dict[str, Count] = {}


class MemoryLimitInfo(_Section, frozen=True, kw_only=True):
    """The limit of host memory for the job, of the nearest control group that has
    one."""

    control_group: str | None = None
    bytes: Count | None = None


class HostInfo(_Section, frozen=True, kw_only=True):
    """The host of the recording.

    `nvml` says why NVML could not be used; None where it could.
    """

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
    """The options of the recorder."""

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
    """Threads of a process: torch's numbers, and OMP_NUM_THREADS as it was set."""

    torch: Count | None = None
    omp: int | str | None = None


class ModelInfo(_Section, frozen=True, kw_only=True):
    """The model of a rank."""

    classes: tuple[str, ...] = ()
    params: Count | None = None
    total_params: Count | None = None
    trainable_params: Count | None = None
    bytes: Count | None = None
    dtypes: dict[str, Count] = {}
    checkpointing: bool | None = None


class FrameworkInfo(_Section, frozen=True, kw_only=True):
    """The framework that trains, with the samples and tokens of its micro-step on a
    rank."""

    name: str | None = None
    version: str | None = None
    micro_batch: Count | None = None
    tokens: Count | None = None


class OptimizerInfo(_Section, frozen=True, kw_only=True):
    """The optimizers of one class on a rank."""

    # The class; under ZeRO the class of the optimizer inside. The JSON key is `class`.
    class_name: str | None = msgspec.field(default=None, name="class")
    count: Count | None = None
    # Whether they are ebbtide's, whose state includes masters that are not parameters.
    ebbtide: bool = False
    groups: Count | None = None
    # Parameters that they update on this rank, padding included.
    params: Count | None = None
    param_dtypes: tuple[str, ...] = ()
    # Bytes of state; None where it is stored on a disk or in another process.
    state_bytes: Count | None = None
    state_dtypes: dict[str, Count] = {}  # The number of state elements by dtype.
    # The same by name, as in state dicts. Only the state of ebbtide's optimizers may
    # have a `master`.
    state_names: dict[str, Count] = {}
    # Devices that hold state: `cpu`, `cuda`, `nvme`.
    state_devices: tuple[str, ...] = ()


class HeldMemory(_Section, frozen=True, kw_only=True):
    """Bytes of a device that a module holds.

    `category` is `parameter`, `buffer`, `gradient` or `optimizer_state`.
    """

    device: str
    category: str
    module: str | None = None
    bytes: Count


class Inventory(_Section, frozen=True, kw_only=True):
    """Parameters, buffers, gradients and optimizer state at one time.

    `reason` is `update` or `out of memory`.
    """

    t_ns: TimeNs
    iteration: Count | None = None
    phase: str | None = None
    reason: str | None = None
    holders: tuple[HeldMemory, ...] = ()


class AllocatorState(_Section, frozen=True, kw_only=True):
    """The segments of torch's allocator on a device when a memory snapshot ended."""

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
    """An out-of-memory error of the job."""

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


class OperatorTime(_Section, frozen=True, kw_only=True):
    """The calls of an operator of the CPU, and their time without operators inside."""

    name: str
    calls: Count
    self_ns: Count


class DetailedSlice(_Section, frozen=True, kw_only=True):
    """Iterations of a rank in which details were recorded, of a recording on demand."""

    iterations: tuple[Count, Count]
    span_ns: tuple[TimeNs, TimeNs]
    allocator_iterations: Count = 0
    transfers: bool = False


class RankInfo(_Section, frozen=True, kw_only=True):
    """One rank: its process, devices, model and optimizers."""

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
    gaps_recorded: bool = True
    started_ns: TimeNs | None = None
    stopped: str | None = None
    argv: tuple[str, ...] = ()
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    threads: ThreadInfo = ThreadInfo()
    model: ModelInfo = ModelInfo()
    framework: FrameworkInfo = FrameworkInfo()
    optimizers: tuple[OptimizerInfo, ...] = ()
    numa: NumaPlacement | None = None
    inventories: tuple[Inventory, ...] = ()
    allocators: tuple[AllocatorState, ...] = ()
    out_of_memory: tuple[OutOfMemoryRecord, ...] = ()
    operators: tuple[OperatorTime, ...] = ()

    @property
    def main_device(self) -> DeviceInfo:
        """The first device, which the figures of this rank describe; an empty entry
        where there is none."""
        return self.devices[0] if self.devices else DeviceInfo()


class PredictedTime(_Section, frozen=True, kw_only=True):
    """The range of the time of a part of an iteration.

    The part is `iteration`, a phase, or `other`.
    """

    rank: Count
    iteration: Count
    phase: str
    low_ms: Milliseconds
    high_ms: Milliseconds


class PredictionInfo(_Section, frozen=True, kw_only=True):
    """The basis of a predicted trace."""

    machine: str | None = None
    assumptions: dict[str, str] = {}
    times: tuple[PredictedTime, ...] = ()
    context_bytes: Count = 0
    reserved_bytes: tuple[Count, Count] | None = None
    batches: tuple[tuple[Count, ...], tuple[Count, ...]] | None = None
    host_bytes: dict[Literal["all", "pinned"], tuple[Count, float | None]] = {}
    bounds: dict[str, Count] = {}


class TraceMeta(_Section, frozen=True, kw_only=True):
    """The metadata of a trace."""

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
    machine: dict[str, Any] | None = None
    policy: str | None = None
    prediction: PredictionInfo | None = None
    exit: ExitStatus = ExitStatus()
    notes: tuple[str, ...] = ()
    provenance: dict[str, Any] | None = None


def parse_meta(raw: dict[str, Any], path: Path) -> TraceMeta:
    """Convert the object of a meta.json. Sections of frameworks are only checked to be
    objects: the features that plug into the seam `setups` convert them."""
    location = ""
    try:
        for location in _malformed_sections(raw):
            msgspec.convert(raw[location], dict[str, Any] | None)
        location = ""
        values = {
            key: without_nulls(value) if key in ("host", "ranks") else value
            for key, value in raw.items()
        }
        meta = msgspec.convert(values, TraceMeta)
    except msgspec.ValidationError as error:
        problem = validation_problem(error)
        location = location or problem.location
        where = f"{location} in its meta.json" if location else "its meta.json"
        raise TraceError(
            f"{path} is damaged: {where} is not valid ({problem.reason})"
        ) from None
    except (UnicodeEncodeError, RecursionError):
        raise TraceError(
            f"{path} is damaged: its meta.json is not valid (bad Unicode, or nested "
            "too deeply)"
        ) from None
    numbers = Counter(entry.rank for entry in meta.ranks)
    if len(numbers) < len(meta.ranks):
        rank, _ = numbers.most_common(1)[0]
        raise TraceError(
            f"{path} is damaged: its meta.json has rank {rank} more than once"
        )
    if meta.state == "recording" and "host" not in raw:
        raise TraceError(f"{path} is damaged: host in its meta.json is missing")
    return meta


def _malformed_sections(raw: dict[str, Any]) -> set[str]:
    """Return the keys of the sections of frameworks that are no objects."""
    specified = ("format", "schema", *TraceMeta.__struct_fields__)
    others = {
        key
        for key, value in raw.items()
        if key not in specified and not isinstance(value, dict | None)
    }
    # Features are looked up only where it is needed.
    return others & seams.plugs("setups").keys() if others else set()


def without_nulls(value: Any) -> Any:
    """Drop the keys whose value is null.

    Null and a missing key both mean that something was not recorded.
    """
    if isinstance(value, dict):
        return {
            key: without_nulls(item) for key, item in value.items() if item is not None
        }
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value

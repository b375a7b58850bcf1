"""The rates of a machine, of its box, GPU and storage; and their file.

Ranks share the box.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from ebbtide.errors import MachineError
from ebbtide.json_files import convert_object, number_range, read_object
from ebbtide.units import counted

MAX_RANKS = 1024
# The rates that ranks on a host share.
SHARED_RATES = ("cpu_update_params_per_s", "host_memory_bytes_per_s")
MAX_PATHS = 64
# Words of the note on GPUs that have the memory of their CPU.
SHARED_MEMORY = "share one memory"

# Ranges of today's machines; a value outside of them is in the wrong unit. A rate of 0
# would be a resource that the machine does not have, which is null.
DeviceBytes = Annotated[float, number_range(1e6, 1e14)]
HostBytes = Annotated[float, number_range(1e6, 1e16)]
Rate = Annotated[float, number_range(1e6, 1e13)]
DuplexRate = Annotated[float, number_range(1e6, 2e13)]
HostMemoryRate = Annotated[float, number_range(1e6, 1e14)]
GpuRate = Annotated[float, number_range(1e6, 1e15)]
RateShare = Annotated[float, number_range(0.01, 1.0)]
RateRatio = Annotated[float, number_range(0.01, 100.0)]
OverheadS = Annotated[float, number_range(0.0, 1e4)]
PeakFlops = Annotated[float, number_range(1e7, 1e18)]
MemoryRate = Annotated[float, number_range(1e7, 1e15)]
Ranks = Annotated[
    int, Meta(ge=1, le=MAX_RANKS, description=f"a whole number from 1 to {MAX_RANKS}")
]
TotalRate = Annotated[float, number_range(1e6, 1e15)]
StorageBytes = Annotated[float, number_range(1e6, 1e18)]
Text = Annotated[str, Meta(description="a text")]
# Measured with streaming stores on a host with AVX-512: 0.90 to 0.93.
DEFAULT_OUT_OF_PLACE_SHARE = 0.9
# Host memory that an update reads and writes, B per parameter, with fp32 masters and
# with remainders.
FP32_UPDATE_BYTES, _REMAINDER_UPDATE_BYTES = 28.0, 26.0


@dataclass(frozen=True)
class GpuCompute:
    """Peak rates of a GPU by its data sheet, for the times of a dry run.

    None is not known.
    """

    name: Text | None = None  # Its name, as torch reports it.
    # As in "9.0"; None for GPUs without one.
    compute_capability: (
        Annotated[str, Meta(pattern=r"^\d+\.\d+$", description='a text as in "9.0"')]
        | None
    ) = None
    # Peak of dense matrix products by type: `float32`, `tf32`, `float16`, `bfloat16`,
    # `float8`.
    flops_per_s: dict[str, PeakFlops] = field(default_factory=dict, hash=False)
    memory_bytes_per_s: MemoryRate | None = None  # Traffic with device memory.
    # Copies to other GPUs of its box, in one direction (NVLink, or PCIe where there is
    # none).
    peer_bytes_per_s: MemoryRate | None = None


@dataclass(frozen=True)
class Box:
    """Rates of a host with all its ranks busy; None is not known."""

    ranks: Ranks  # Ranks that were busy.
    # Parameters that all of them together update on the CPU.
    cpu_update_params_per_s: TotalRate | None = None
    # Traffic of all of them together with host memory.
    host_memory_bytes_per_s: TotalRate | None = None
    # The rate of one rank while the others are idle.
    one_rank_cpu_update_params_per_s: TotalRate | None = None
    # The same of host memory.
    one_rank_host_memory_bytes_per_s: TotalRate | None = None
    # Copies of all of them together to other boxes, in one direction.
    network_bytes_per_s: TotalRate | None = None


@dataclass(frozen=True)
class StoragePath:
    """Rates of one path for one rank while all ranks of its box use it.

    A path is a drive, an array, or a parallel file system.
    """

    read_bytes_per_s: Rate  # Sequential reads, with no writes at the same time.
    write_bytes_per_s: Rate  # Sequential writes, with no reads at the same time.
    # Free space for the rank; None: not known, taken as enough.
    bytes: StorageBytes | None = None
    # Reads and writes together; None: no limit beyond the rate of each.
    duplex_bytes_per_s: DuplexRate | None = None
    # Bytes that may be written in the drive's rated life (its TBW); None: not known.
    rated_write_bytes: StorageBytes | None = None
    path: Text | None = None  # The folder that was measured, for people.

    @property
    def s_per_byte(self) -> float:
        """Seconds to read and write a byte of state, both at the same time.

        Reads and writes run at once.
        """
        return max(
            1 / self.read_bytes_per_s,
            1 / self.write_bytes_per_s,
            2 / (self.duplex_bytes_per_s or float("inf")),
        )

    def for_ranks(self, measured_ranks: int, ranks: int) -> StoragePath:
        """Return the path of one of `ranks` ranks that share it, from the path with
        `measured_ranks`."""
        figures = {
            name: value
            for name, value in vars(self).items()
            if name != "path" and value is not None
        }
        return replace(
            self,
            **{name: value * measured_ranks / ranks for name, value in figures.items()},
        )


@dataclass(frozen=True)
class Machine:
    """Rates of one rank while all ranks of its box update and no copies run.

    None is not known.

    The box is the host that the ranks share. With one rank on a box these are the rates
    of that rank with nothing else running. Copies slow updates, and updates copies, by
    what they share of host memory; the simulator computes that. `for_ranks` has the
    rates for another number of ranks.

    Attributes:
        name: The name, for people.
        gpu_memory_bytes: Memory of the rank's GPU.
        host_memory_bytes: The rank's part of the host's memory.
        h2d_bytes_per_s: Pinned copies to the device, with no copies in the other
            direction.
        d2h_bytes_per_s: Pinned copies to the host, with no copies in the other
            direction.
        duplex_bytes_per_s: Both directions together; None: no limit beyond the rate of
            each direction.
        h2d_pageable_bytes_per_s: Copies to the device from pageable memory.
        d2h_pageable_bytes_per_s: Copies to pageable memory.
        host_memory_bytes_per_s: All traffic of a rank with host memory.
        cpu_update_params_per_s: Parameters updated on the CPU in one pass: state and
            gradient in, state and half-precision parameter out.
        cpu_cast_params_per_s: Parameters converted from fp32 to half precision on the
            CPU.
        cpu_out_of_place_share: Rate of updates on the CPU that write beside the old
            state, as a share of the rate in place; None: not known (see
            `out_of_place_share`).
        cpu_remainder_ratio: Rate of updates on the CPU whose masters are remainders of
            bf16 parameters, over the rate with fp32 masters; None: not known (see
            `cpu_update_rate`).
        gpu_update_params_per_s: Parameters updated on the GPU.
        gpu_cast_params_per_s: Parameters converted from fp32 to half precision on the
            GPU.
        cpu_norm_params_per_s: Parameters whose gradients' norm is computed on the CPU;
            None: as fast as host memory.
        step_overhead_s: The time of an update that does not depend on its size.
        operation_s: The time of each operation that does not depend on its size: launch
            and synchronization.
        pinned_memory_bytes: Host memory that the rank may pin; None: all of its part.
        unified_memory: Whether GPU and CPU share one memory, so that offload frees
            none.
        box: Totals of the box; None: measured with one rank, or not known with how
            many.
        gpu: Peak rates of the GPU's arithmetic; None: not known.
        storage: Paths for state that host memory does not hold; empty: none.
        extra: Further keys of the file, which are kept."""

    name: Text = "unnamed"
    gpu_memory_bytes: DeviceBytes | None = None
    host_memory_bytes: HostBytes | None = None
    h2d_bytes_per_s: Rate | None = None
    d2h_bytes_per_s: Rate | None = None
    duplex_bytes_per_s: DuplexRate | None = None
    h2d_pageable_bytes_per_s: Rate | None = None
    d2h_pageable_bytes_per_s: Rate | None = None
    host_memory_bytes_per_s: HostMemoryRate | None = None
    cpu_update_params_per_s: Rate | None = None
    cpu_cast_params_per_s: Rate | None = None
    gpu_update_params_per_s: GpuRate | None = None
    gpu_cast_params_per_s: GpuRate | None = None
    cpu_norm_params_per_s: Rate | None = None
    step_overhead_s: OverheadS | None = None
    operation_s: OverheadS | None = None
    pinned_memory_bytes: HostBytes | None = None
    cpu_out_of_place_share: RateShare | None = None
    cpu_remainder_ratio: RateRatio | None = None
    unified_memory: bool = False
    box: Box | None = None
    gpu: GpuCompute | None = None
    storage: tuple[StoragePath, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def gpu_name(self) -> str | None:
        """The name of the GPU; None if it is not known."""
        return None if self.gpu is None else self.gpu.name

    @property
    def out_of_place_share(self) -> float:
        """The measured `cpu_out_of_place_share`, or an assumed one if not known."""
        return (
            DEFAULT_OUT_OF_PLACE_SHARE
            if self.cpu_out_of_place_share is None
            else self.cpu_out_of_place_share
        )

    @property
    def remainder_ratio(self) -> float:
        """The measured `cpu_remainder_ratio`, or the ratio of the bytes.

        The latter is used where it is not known: as if memory alone limited updates.
        """
        by_bytes = FP32_UPDATE_BYTES / _REMAINDER_UPDATE_BYTES
        return (
            by_bytes if self.cpu_remainder_ratio is None else self.cpu_remainder_ratio
        )

    def cpu_update_rate(self, master: str) -> float | None:
        """Return the parameters updated on the CPU per second, None if it is not known.

        Args:
            master: `fp32`, or `remainder` for masters that are a bf16 parameter and its
                remainder.
        """
        rate = self.cpu_update_params_per_s
        return (
            rate * self.remainder_ratio
            if rate is not None and master == "remainder"
            else rate
        )

    def ring_bytes_per_s(self, ranks: int, stride: int = 1) -> float | None:
        """Return the rate at which each of `ranks` ranks sends in a ring; None: not
        known.

        A ring of several boxes passes each byte from box to box once, over the links of
        the box together (bus bandwidth in nccl-tests' doc/PERFORMANCE.md). So many
        rings share them as there are ranks between two of one, its `stride`."""
        peer = self.gpu.peer_bytes_per_s if self.gpu is not None else None
        peer = peer or self.h2d_bytes_per_s
        if self.box is None or ranks * stride <= self.box.ranks:
            return peer
        network = self.box.network_bytes_per_s
        rates = (peer, network and network / min(stride, self.box.ranks))
        return min((rate for rate in rates if rate), default=None)

    def for_ranks(self, ranks: int) -> Machine:
        """Return the machine with the rates of one of `ranks` ranks that share the box.

        A rank gets the smaller of its own rate and its part of the total, for updates
        on the CPU and for host memory. The box's memory and storage are divided by the
        ranks. Each rank has a GPU and link of its own.

        Raises:
            MachineError: The totals of the box are not known, and `ranks` is not 1."""
        if (box := self.box) is None:
            if ranks == 1:
                return self
            raise MachineError(
                f"machine {self.name} has no box, so its rates with {ranks} ranks on a "
                "host are not known: measure "
                f"them with `ebbtide calibrate --ranks {ranks}`, or fit them from a "
                "trace of such a job (--from-trace)"
            )
        measured_ranks = box.ranks
        update, memory = self.cpu_update_params_per_s, self.host_memory_bytes_per_s
        alone_update = _largest(box.one_rank_cpu_update_params_per_s, update)
        alone_memory = _largest(box.one_rank_host_memory_bytes_per_s, memory)
        if ranks < measured_ranks:
            update, memory = alone_update, alone_memory
        if ranks != measured_ranks:
            box = replace(
                box,
                ranks=ranks,
                one_rank_cpu_update_params_per_s=alone_update,
                one_rank_host_memory_bytes_per_s=alone_memory,
            )
        return replace(
            self,
            cpu_update_params_per_s=_rate_of_rank(
                update, box.cpu_update_params_per_s, ranks
            ),
            host_memory_bytes_per_s=_rate_of_rank(
                memory, box.host_memory_bytes_per_s, ranks
            ),
            host_memory_bytes=_divided(self.host_memory_bytes, measured_ranks, ranks),
            pinned_memory_bytes=_divided(
                self.pinned_memory_bytes, measured_ranks, ranks
            ),
            storage=tuple(
                path.for_ranks(measured_ranks, ranks) for path in self.storage
            ),
            box=box,
        )

    def limits(self, rank: Machine) -> list[str]:
        """Return in words which of these rates the box limits for `rank`.

        `rank` is this machine `for_ranks` of no more ranks.
        """
        if self.box is None or rank.box is None or rank.box.ranks > self.box.ranks:
            return []
        shared = {key: (getattr(self, key), getattr(rank, key)) for key in SHARED_RATES}
        return [
            f"box limits {key} to {used:.3g} of {own:.3g} with "
            f"{counted(rank.box.ranks, 'rank')}: raise its total, too"
            for key, (own, used) in shared.items()
            if own is not None and used < own
        ]

    def need(self, keys: Iterable[str], why: str) -> None:
        """Raise MachineError where one of the rates is not known.

        `why` says what needs it, for the message.
        """
        for key in keys:
            if getattr(self, key) is None:
                raise MachineError(
                    f"machine {self.name} has no {key}, which {why} needs: measure it "
                    "with `ebbtide calibrate` on a host with a GPU, or name a machine "
                    "that has it (`ebbtide machines`)"
                )

    def as_json(self) -> dict[str, Any]:
        """Return the object of a machine file."""
        values = {key: getattr(self, key) for key in _KEYS}
        objects = {
            key: asdict(part) if part else None
            for key, part in (("box", self.box), ("gpu", self.gpu))
        }
        return {
            **values,
            **objects,
            "storage": [asdict(path) for path in self.storage],
            **self.extra,
        }

    def save(self, path: Path) -> None:
        """Write a machine file. Raises MachineError where that fails."""
        try:
            path.write_text(
                json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8"
            )
        except OSError as error:
            raise MachineError(
                f"cannot write {path}: {error.strerror or error}"
            ) from None


def _largest(first: float | None, second: float | None) -> float | None:
    return max((value for value in (first, second) if value is not None), default=None)


def _rate_of_rank(rate: float | None, total: float | None, ranks: int) -> float | None:
    """Return the rate of one of several ranks: its own, or its part of the total where
    that is known and smaller."""
    return rate if rate is None or total is None else min(rate, total / ranks)


def _divided(part: float | None, ranks_before: int, ranks: int) -> float | None:
    """Return a rank's part of what `ranks` divide, from the part with another number of
    ranks."""
    return None if part is None else part * ranks_before / ranks


_KEYS = tuple(item.name for item in fields(Machine) if item.name != "extra")


def machine_from(values: dict[str, Any], where: str) -> Machine:
    """Convert the object of a machine file (null: not known).

    `where` names it in messages, and where it has no name.

    Raises MachineError where a value has the wrong type or is out of range."""
    extra = {key: value for key, value in values.items() if key not in _KEYS}
    rates = {
        "name": where,
        **{key: values[key] for key in _KEYS if values.get(key) is not None},
    }
    box, gpu, storage = (rates.pop(key, None) for key in ("box", "gpu", "storage"))
    storage = [] if storage is None else storage
    if not isinstance(storage, list) or len(storage) > MAX_PATHS:
        raise MachineError(
            f"{where}: storage is {storage!r:.40}; it must be a list of at most "
            f"{MAX_PATHS} objects"
        )
    machine = convert_object({**rates, "extra": extra}, Machine, where, MachineError)
    return replace(
        machine,
        box=None
        if box is None
        else convert_object(box, Box, f"{where}: box", MachineError),
        gpu=None
        if gpu is None
        else convert_object(gpu, GpuCompute, f"{where}: gpu", MachineError),
        storage=tuple(
            convert_object(
                entry, StoragePath, f"{where}: storage[{number}]", MachineError
            )
            for number, entry in enumerate(storage)
        ),
    )


def load_machine(path: str | Path) -> Machine:
    """Read a machine file. Raises MachineError where it is not a valid one."""
    path = Path(path)
    return machine_from(read_object(path, "machine", MachineError), path.name)


def unified_memory_text(machine: Machine) -> str | None:
    """Return why a machine with unified memory should not offload.

    Return None for any other machine.
    """
    if not machine.unified_memory:
        return None
    taken = machine.extra.get("shared_memory")
    return (
        f"GPU and CPU of {machine.name} {SHARED_MEMORY}: "
        f"{f'{taken}; ' if taken else ''}offload frees none of it, and its copies take "
        "time"
    )

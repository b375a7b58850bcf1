"""Storage of a machine: the paths to which optimizer state goes that host memory does not hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from ebbtide.json_files import number_range

MAX_PATHS = 64
StorageRate = Annotated[float, number_range(1e6, 1e13)]
StorageBothRate = Annotated[float, number_range(1e6, 2e13)]
StorageBytes = Annotated[float, number_range(1e6, 1e18)]


@dataclass(frozen=True)
class StoragePath:
    """Rates of one path (a drive, an array, a parallel file system) for one rank while all ranks of its box use it."""

    read_bytes_per_s: StorageRate  # Sequential reads, with no writes at the same time.
    write_bytes_per_s: StorageRate  # Sequential writes, with no reads at the same time.
    bytes: StorageBytes | None = None  # Free space for the rank; None: not known, taken as enough.
    duplex_bytes_per_s: StorageBothRate | None = None  # Reads and writes together; None: no limit beyond that of each.
    # Bytes that may be written in the drive's rated life (its TBW); None: not known.
    rated_write_bytes: StorageBytes | None = None
    path: Annotated[str, Meta(description="a text")] | None = None  # The folder that was measured, for people.

    @property
    def s_per_byte(self) -> float:
        """Seconds to read and write a byte of state, if reads and writes run at the same time."""
        return max(1 / self.read_bytes_per_s, 1 / self.write_bytes_per_s, 2 / (self.duplex_bytes_per_s or float("inf")))

    def for_ranks(self, measured_ranks: int, ranks: int) -> StoragePath:
        """Return the path of one of `ranks` ranks that share it, from that with `measured_ranks`."""
        figures = {name: value for name, value in vars(self).items() if name != "path" and value is not None}
        return replace(self, **{name: value * measured_ranks / ranks for name, value in figures.items()})

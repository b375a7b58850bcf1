"""The protocol of all importers.

Each sub-package of `importers` lists its importers in `IMPORTERS`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, Protocol

from ebbtide.features.importers.source import Source
from ebbtide.profiler.trace import TraceBuilder


class Recognition(IntEnum):
    """Feature by which a format is recognized. Importers are asked in this order, the
    strictest check first."""

    MAGIC_BYTES = 0
    FIXED_LAYOUT = 1
    JSON_KEYS = 2
    COLUMN_NAMES = 3
    LOG_LINES = 4
    WORDS = 5


class Stage(IntEnum):
    """Position of an importer among the importers of one trace, by what it needs from
    the others."""

    JOB = 0  # Creates all ranks of the job, with their phases
    # Adds what one rank recorded: phases (unless the rank has some), devices, memory
    # and copies
    PROFILE = 1
    MEMORY = 2  # Adds memory to ranks, on the device that an earlier stage has named
    # Adds data of devices to the ranks to which earlier stages have assigned those
    # devices
    DEVICES = 3


@dataclass(frozen=True)
class Hardware:
    """Hardware figures that the user states because the files do not."""

    capacity_bytes: int | None = None  # Memory of each device; None: as in the files
    # PCIe generation and number of lanes of each device; None: as in the files
    link: tuple[int, int] | None = None


@dataclass(frozen=True)
class ImportOptions:
    """Inputs of an importer other than the files of its own format."""

    # Figures that the user states. They replace the figures of the files after all
    # imports
    hardware: Hardware = Hardware()
    # All files of the run by format. The ranks that monitor files cover get the phases
    # of a log, for example.
    sources: Mapping[str, Sequence[Source]] = field(default_factory=dict)
    # Meanings of NVTX ranges by their names, where `*` stands for any text: `forward`,
    # `backward`, `update`, `iteration`, or `other` for ranges that are none of these.
    phases: Mapping[str, str] = field(default_factory=dict)
    # The run of a log that has several: its number from 1, or "all"; None: the last
    # complete one.
    run: int | Literal["all"] | None = None
    jobs: int = 1  # Number of processes that may read many files.
    # Address of a Dask cluster that reads several files; None: this machine.
    scheduler: str | None = None


class Importer(Protocol):
    """Imports the files of one format."""

    format: str  # Name of the format, as in `ebbtide import --format`
    recognition: Recognition  # Feature that `matches` looks for
    stage: Stage  # Position among the importers of one trace

    def matches(self, source: Source) -> bool:
        """Return whether the contents of a file look like this format."""

    def import_into(
        self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions
    ) -> list[Source]:
        """Add the contents of files of this format, at least one, to a trace.

        Return the files whose times have no date.

        Files without dates cannot be combined with others. `options`: other files of
        the run, and figures that the user states. Raises SourceError if a file is
        damaged or empty, or does not fit the others."""

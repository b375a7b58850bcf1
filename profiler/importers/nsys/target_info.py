"""Reads which devices, processes and ranks an export is about, and when it began."""

from __future__ import annotations

from typing import Any

from ebbtide.profiler.importers.nsys.capture import MISSING, process_of
from ebbtide.profiler.importers.nsys.database import Database

_GPUS = "TARGET_INFO_GPU"
_CUDA_DEVICES = "TARGET_INFO_CUDA_DEVICE"
_SESSION = "TARGET_INFO_SESSION_START_TIME"
_MPI_RANKS = "MPI_RANKS"
_MAX_MEMORY_BYTES = 1 << 44
_MAX_RANK = 10_000_000
# 2001 to 2096: other values are not Unix times in ns.
_FIRST_TIME, _LAST_TIME = 10**18, 4 * 10**18


def read_devices(database: Database) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the entries of devices by process and CUDA's number of the device in it.

    The ids of the table of GPUs are of the whole host. A process counts only the devices that it may use, from 0: a
    second table says which GPUs these are, except in old versions.
    """
    figures = database.integers(_GPUS, (), {"id": MISSING, "totalMemory": MISSING})
    texts = database.texts(_GPUS, "name", "uuid", "busLocation")
    entries = {
        number: {
            "name": name or None,
            "capacity_bytes": capacity if 0 < capacity <= _MAX_MEMORY_BYTES else None,
            "uuid": uuid or None,
            "pci_bus_id": bus or None,
        }
        for (number, capacity), (name, uuid, bus) in zip(figures.itertuples(index=False, name=None), texts, strict=True)
    }
    devices = {(MISSING, number): entry for number, entry in entries.items()}
    uses = database.integers(_CUDA_DEVICES, ("cudaId", "pid"), {"gpuId": MISSING})
    for device, pid, number in uses.itertuples(index=False, name=None):
        if number in entries:
            devices[pid, device] = {**entries[number], "index": number}
    return devices


def read_mpi_ranks(database: Database) -> dict[int, int]:
    """Return the rank of each process that initialized MPI."""
    ranks = database.integers(_MPI_RANKS, ("globalTid", "rank"), {})
    ranks = ranks[ranks["rank"].between(0, _MAX_RANK)]
    return dict(zip(process_of(ranks["globalTid"]).tolist(), ranks["rank"].tolist(), strict=True))


def read_session_start(database: Database) -> int | None:
    """Return the Unix time in ns from which the export's times count; None where it was not recorded."""
    times = database.integers(_SESSION, (), {"utcEpochNs": MISSING})["utcEpochNs"]
    times = times[times.between(_FIRST_TIME, _LAST_TIME)]
    return int(times.iloc[0]) if len(times) else None

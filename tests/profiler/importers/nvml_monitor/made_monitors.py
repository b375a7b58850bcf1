"""Monitor files made line by line, in the formats of dcgm-exporter, and what a trace has of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from ebbtide.profiler.importers.load import import_trace
from ebbtide.profiler.trace import Trace

MIB = 2**20
SECOND = 10**9
# 2026-11-22 10:00:00 UTC
START = 1_795_341_600 * SECOND
FIELDS = {
    "SM_CLOCK": "DCGM_FI_DEV_SM_CLOCK",
    "TEMP": "DCGM_FI_DEV_GPU_TEMP",
    "POWER": "DCGM_FI_DEV_POWER_USAGE",
    "UTIL": "DCGM_FI_DEV_GPU_UTIL",
    "FREE": "DCGM_FI_DEV_FB_FREE",
    "USED": "DCGM_FI_DEV_FB_USED",
    "TX": "DCGM_FI_PROF_PCIE_TX_BYTES",
    "RX": "DCGM_FI_PROF_PCIE_RX_BYTES",
}


def import_text(tmp_path: Path, text: str, name: str = "m.txt", **options: Any) -> Trace:
    file = tmp_path / name
    file.write_text(text)
    return import_trace([file], tmp_path / "m.ebb", force=True, **options)


def series(name: str, value: object, gpu: int = 0, after: str = "", host: str = "node-1", more: str = "") -> str:
    """Return a line of dcgm-exporter."""
    labels = (
        f'gpu="{gpu}",UUID="GPU-c2f76b33-{gpu}",pci_bus_id="00000000:3{gpu}:00.0",device="nvidia{gpu}",'
        f'modelName="NVIDIA L4",Hostname="{host}",DCGM_FI_DRIVER_VERSION="580.105.08"{more}'
    )
    return f"{name}{{{labels}}} {value}{after}\n"


def scrape(number: int, gpus: int = 2, after: str = "", before: str = "") -> str:
    """Return a scrape of dcgm-exporter: GPU g uses 100 + 10 g + number MiB, sends 5 and receives 7 bytes/s + number."""
    lines = []
    for short_name, name in FIELDS.items():
        lines += [f"{before}# HELP {name} Some help (in MiB).\n", f"{before}# TYPE {name} gauge\n"]
        for gpu in range(gpus):
            used = 100 + 10 * gpu + number
            values = {
                "SM_CLOCK": 1980, "TEMP": 31, "POWER": "316.365000", "UTIL": 90 + number, "FREE": 1000 - used,
                "USED": used, "TX": 5 + number, "RX": 7 + number,
            }  # fmt: skip
            lines.append(before + series(name, values[short_name], gpu, after))
    return "".join(lines)


def scrapes(count: int, marker: Callable[[int], str] = lambda number: "", **options: Any) -> str:
    """Return scrapes, each after a line that `marker` makes of its number."""
    return "".join(marker(number) + scrape(number, **options) for number in range(count))


def memory_rows(trace: Trace, rank: int = 0, pool: str = "device") -> list[tuple[float, float]]:
    """Return (seconds since the first row, MiB) of a pool."""
    rows = trace.memory(rank)
    rows = rows[rows["pool"] == pool]
    return [((t - rows["t_ns"].min()) / 1e9, size / MIB) for t, size in zip(rows["t_ns"], rows["bytes"], strict=True)]


def states(trace: Trace, column: str, rank: int = 0) -> list[float | None]:
    """Return a column of the table `gpu`."""
    return [None if pd.isna(value) else float(value) for value in trace.table(rank, "gpu")[column]]

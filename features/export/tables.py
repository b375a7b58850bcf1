"""Writes a trace as tables for pandas, R and spreadsheets."""

import json
import os
from pathlib import Path

import pandas as pd

from ebbtide.analysis.metrics.devices import free_pool, peak_pool
from ebbtide.analysis.metrics.iterations import durations_ms, intervals
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.metrics.phases import phase_bytes, phase_peaks
from ebbtide.output_files import new_output
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.frames import frame
from ebbtide.profiler.trace.schema import TABLES

FORMATS = ("csv", "parquet")
# A file next to the tables. It marks the folder as output of ebbtide and lists the
# files that belong to it.
_MANIFEST = "tables.json"
_FORMAT = "ebbtide-tables"


def raw_table(trace: Trace, name: str) -> pd.DataFrame:
    """Return a table of the trace for all ranks.

    Its columns are `rank`, then those in docs/trace-format.md.
    """
    parts = [trace.table(rank, name).assign(rank=rank) for rank in trace.ranks] or [
        frame(name).assign(rank=0)
    ]
    table = pd.concat(parts, ignore_index=True)
    return table[["rank", *(column.name for column in TABLES[name])]].astype(
        {"rank": "int64"}
    )


def iterations_table(trace: Trace) -> pd.DataFrame:
    """Return a row per rank and iteration, warm-up included.

    Columns: rank, iteration, start_ns, end_ns; iteration_ms and PHASE_ms; pool, and
    PHASE_peak_bytes of the pool; PHASE_h2d_bytes and PHASE_d2h_bytes; missing where not
    recorded, or not run. Times are the device's if every phase has them; peaks are
    between host times.
    """
    pool = peak_pool(trace)
    parts = [_iterations(trace, rank, pool) for rank in trace.ranks]
    columns = {
        "rank": "int64",
        "iteration": "int64",
        "start_ns": "int64",
        "end_ns": "int64",
    }
    columns |= {f"{name}_ms": "float64" for name in ("iteration", *ITERATION_PARTS)} | {
        "pool": "string"
    }
    columns |= {
        f"{phase}_{size}_bytes": "Int64"
        for size in ("peak", *DIRECTIONS)
        for phase in ITERATION_PARTS
    }
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    return table.reindex(columns=list(columns)).astype(columns)


def _iterations(trace: Trace, rank: int, pool: str | None) -> pd.DataFrame:
    times = intervals(trace, rank)
    table = times.spans.set_index("iteration").assign(rank=rank, pool=pool)
    sizes = {direction: phase_bytes(trace, rank, direction) for direction in DIRECTIONS}
    sizes["peak"] = phase_peaks(trace, rank, pool) if pool else None
    parts = [table, durations_ms(times).frame.round(6).add_suffix("_ms")]
    recorded = {
        name: by_phase.frame for name, by_phase in sizes.items() if by_phase is not None
    }
    parts += [
        by_phase.round().add_suffix(f"_{name}_bytes")
        for name, by_phase in recorded.items()
    ]
    return pd.concat(parts, axis=1).reset_index()


def write_tables(
    trace: Trace, folder: Path, format: str, min_bytes: int, force: bool = False
) -> list[str]:
    """Write the tables of a trace as files into a new folder, all or none, with a
    column `rank`; `iterations` and `windows` are added.

    `tables.json` lists them, and names the pool that free memory is computed from.
    Returns a line on the table of windows for each thing that it lacks. Raises
    UserError."""
    notes = []
    with new_output(
        folder, force, _is_table_folder, "a folder of tables, or contains other files"
    ) as temporary:
        temporary.mkdir()
        files = [f"{name}.{format}" for name in (*TABLES, "iterations")]
        for name in TABLES:
            _write(raw_table(trace, name), temporary / f"{name}.{format}")
        _write(iterations_table(trace), temporary / f"iterations.{format}")
        windows = JobMetrics(trace).windows(min_bytes)
        if windows.known_ranks:
            files.append(f"windows.{format}")
            _write(windows.to_pandas(), temporary / files[-1])
        notes += [
            f"{'windows' if windows.known_ranks else 'no table of windows'}: {line}"
            for line in windows.missing
        ]
        manifest = {
            "format": _FORMAT,
            "trace": trace.path.name,
            "windows_min_bytes": min_bytes,
            "free_pool": free_pool(trace),
            "files": files,
        }
        (temporary / _MANIFEST).write_text(
            json.dumps(manifest, indent=1) + "\n", encoding="utf-8"
        )
    return notes


def _write(table: pd.DataFrame, path: Path) -> None:
    if path.suffix == ".csv":
        table.to_csv(path, index=False, lineterminator="\n")
    else:
        table.to_parquet(path, index=False, compression="zstd")


def _is_table_folder(folder: Path) -> bool:
    """Return whether a folder contains only tables that `write_tables` wrote."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        return manifest["format"] == _FORMAT and set(os.listdir(folder)) <= {
            _MANIFEST,
            *manifest["files"],
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False

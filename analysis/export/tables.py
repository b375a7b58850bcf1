"""A trace as tables for pandas, R and spreadsheets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd

from ebbtide.analysis.metrics.devices import peak_pool
from ebbtide.analysis.metrics.iterations import durations_ms, intervals
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.metrics.phases import phase_bytes, phase_peaks
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.errors import TraceError
from ebbtide.output_files import new_output
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.schema import TABLES, frame

FORMATS = ("csv", "parquet")
# Beside the tables; it tells that the folder is one of ours, and which files in it are.
_MARK = "tables.json"
_FORMAT = "ebbtide-tables"


def raw_table(trace: Trace, name: str) -> pd.DataFrame:
    """A table of the trace for all ranks: `rank`, then its columns as in docs/trace-format.md."""
    parts = [trace.table(rank, name).assign(rank=rank) for rank in trace.ranks] or [frame(name).assign(rank=0)]
    table = pd.concat(parts, ignore_index=True)
    return table[["rank", *(column.name for column in TABLES[name])]].astype({"rank": "int64"})


def iterations_table(trace: Trace) -> pd.DataFrame:
    """A row per rank and iteration, the warm-up included.

    rank, iteration, start_ns, end_ns; iteration_ms and PHASE_ms; pool, the one that PHASE_peak_bytes are of;
    PHASE_h2d_bytes and PHASE_d2h_bytes. Phases are forward, backward, update, other. Times are the device's where
    every phase has them, peaks are between host times. Missing: what was not recorded, or a phase that did not run.
    """
    pool = peak_pool(trace)
    parts = [_iterations(trace, rank, pool) for rank in trace.ranks]
    columns = {"rank": "int64", "iteration": "int64", "start_ns": "int64", "end_ns": "int64"}
    columns |= {f"{name}_ms": "float64" for name in ("iteration", *ITERATION_PARTS)} | {"pool": "string"}
    columns |= {f"{phase}_{what}_bytes": "Int64" for what in ("peak", *DIRECTIONS) for phase in ITERATION_PARTS}
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    return table.reindex(columns=list(columns)).astype(columns)


def _iterations(trace: Trace, rank: int, pool: str | None) -> pd.DataFrame:
    cut = intervals(trace, rank)
    table = cut.spans.set_index("iteration").assign(rank=rank, pool=pool)
    sizes = {way: phase_bytes(trace, rank, way) for way in DIRECTIONS}
    sizes["peak"] = phase_peaks(trace, rank, pool) if pool else None
    parts = [table, durations_ms(cut).round(6).add_suffix("_ms")]
    parts += [size.round().add_suffix(f"_{what}_bytes") for what, size in sizes.items() if size is not None]
    return pd.concat(parts, axis=1).reset_index()


def windows_table(trace: Trace, min_bytes: int) -> pd.DataFrame:
    """A row per window with at least `min_bytes` free; the columns are those of `Window`. Raises TraceError where the
    trace has no memory line or no capacity."""
    return find_windows(trace, min_bytes).to_pandas()


def write_tables(trace: Trace, folder: Path, format: str, min_bytes: int, force: bool = False) -> list[str]:
    """Write every table of a trace as a file of its own into a new folder: the five of the trace with a `rank`,
    `iterations` and `windows`. Missing values are empty cells in CSV and nulls in Parquet.

    format: one of FORMATS. force: replace a folder of tables. Returns a line for each table that could not be made.
    Raises UserError where the folder stands already or cannot be written.
    """
    left_out = []
    with new_output(folder, force, _is_ours, "a folder of tables, or holds other files too") as temporary:
        temporary.mkdir()
        made = [f"{name}.{format}" for name in (*TABLES, "iterations")]
        for name in TABLES:
            _write(raw_table(trace, name), temporary / f"{name}.{format}")
        _write(iterations_table(trace), temporary / f"iterations.{format}")
        try:
            windows = windows_table(trace, min_bytes)
        except TraceError as error:
            left_out.append(f"no table of windows: {error}")
        else:
            made.append(f"windows.{format}")
            _write(windows, temporary / made[-1])
        mark = {"format": _FORMAT, "trace": trace.path.name, "windows_min_bytes": min_bytes, "files": made}
        (temporary / _MARK).write_text(json.dumps(mark, indent=1) + "\n", encoding="utf-8")
    return left_out


def _write(table: pd.DataFrame, path: Path) -> None:
    if path.suffix == ".csv":
        table.to_csv(path, index=False, lineterminator="\n")
    else:
        table.to_parquet(path, index=False, compression="zstd")


def _is_ours(folder: Path) -> bool:
    """Whether nothing is in a folder but tables that were written here."""
    try:
        mark = json.loads((folder / _MARK).read_bytes())
        return mark["format"] == _FORMAT and set(os.listdir(folder)) <= {_MARK, *mark["files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False

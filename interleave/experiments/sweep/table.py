"""Writes the rows of a sweep as a Parquet file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import ebbtide
from ebbtide.interleave.experiments.sweep.task import Row, Task

_FIGURES = (
    "least_free_bytes",
    "compute_ms",
    "iteration_ms",
    "forward_ms",
    "backward_ms",
    "update_ms",
    "other_ms",
    "exposed_ms",
    "h2d_bytes",
    "d2h_bytes",
    "cpu_busy_share",
    "gpu_busy_share",
    "h2d_busy_share",
    "d2h_busy_share",
    "peak_device_bytes",
    "host_bytes",
    "storage_read_bytes",
    "storage_written_bytes",
    "storage_written_bytes_per_day",
    "bound_update_ms",
    "bound_iteration_ms",
    "bound_exposed_ms",
    "bound_exposed_whole_subgroups_ms",
    "bound_overlap_iteration_ms",
    "bound_overlap_exposed_ms",
    "bound_overlap_exposed_whole_subgroups_ms",
    "redone_iteration_ms",
    "storage_read_busy_share",
    "storage_write_busy_share",
)
# Null means not known. scale_params, free_bytes, subgroup_params and host_free_bytes are the scenario (1 and null: the
# workload as it is); params, subgroups, largest_subgroup_params and least_free_bytes are those of the changed workload.
# compute_ms is the iteration without its optimizer; the other figures are those of `ebbtide replay`, busy shares of the
# update phase. note: why results are not exact. error: why there are no figures.
SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.string(), nullable=False) for name in ("workload", "machine", "policy")),
        pa.field("scale_params", pa.float64(), nullable=False),
        pa.field("free_bytes", pa.float64()),
        pa.field("host_free_bytes", pa.float64()),
        *(pa.field(name, pa.int64()) for name in ("subgroup_params", "params", "subgroups", "largest_subgroup_params")),
        *(pa.field(name, pa.float64()) for name in _FIGURES),
        pa.field("fits", pa.bool_()),
        pa.field("limited_by", pa.string()),
        pa.field("bound_overlap", pa.string()),
        pa.field("speculated_subgroups", pa.int64()),
        pa.field("stored_subgroups", pa.int64()),
        pa.field("exact", pa.bool_()),
        pa.field("note", pa.string()),
        pa.field("error", pa.string()),
    ]
)


def write_rows(rows: Sequence[Row], tasks: Sequence[Task], path: Path) -> None:
    """Write a table with a row per combination.

    Its metadata `ebbtide` contains all workloads and machines as JSON, so that it can be read without their files.

    Raises:
        OSError: The file cannot be written.
    """
    metadata = {
        "version": ebbtide.__version__,
        "workloads": _distinct(tasks, "workload"),
        "machines": _distinct(tasks, "machine"),
    }
    schema = SCHEMA.with_metadata({"ebbtide": json.dumps(metadata)})
    pq.write_table(pa.Table.from_pylist(list(rows), schema), path, compression="zstd")


def _distinct(tasks: Sequence[Task], part: str) -> list[object]:
    return list({task[part]["name"]: task[part] for task in tasks}.values())

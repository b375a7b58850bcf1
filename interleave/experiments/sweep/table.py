"""The rows of a sweep as a Parquet file."""

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
    "bound_update_ms",
    "bound_iteration_ms",
    "bound_exposed_ms",
    "bound_exposed_whole_subgroups_ms",
)
# What is not known is null. scale_params, free_bytes and subgroup_params are what was asked for (1 and null: as it
# is); params, subgroups, largest_subgroup_params and least_free_bytes what that comes to. compute_ms is the iteration
# without its optimizer; the other figures are those of `ebbtide replay`, busy shares of the update phase. error: why
# there are no figures.
SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.string(), nullable=False) for name in ("workload", "machine", "policy")),
        pa.field("scale_params", pa.float64(), nullable=False),
        pa.field("free_bytes", pa.float64()),
        *(pa.field(name, pa.int64()) for name in ("subgroup_params", "params", "subgroups", "largest_subgroup_params")),
        *(pa.field(name, pa.float64()) for name in _FIGURES),
        pa.field("fits", pa.bool_()),
        pa.field("limited_by", pa.string()),
        pa.field("error", pa.string()),
    ]
)


def write_rows(rows: Sequence[Row], tasks: Sequence[Task], path: Path) -> None:
    """Write a table, a row per combination. Its metadata `ebbtide` holds, as JSON, the workloads and machines in full,
    so that it can be understood without their files. Raises OSError."""
    about = {
        "version": ebbtide.__version__,
        "workloads": _distinct(tasks, "workload"),
        "machines": _distinct(tasks, "machine"),
    }
    schema = SCHEMA.with_metadata({"ebbtide": json.dumps(about)})
    pq.write_table(pa.Table.from_pylist(list(rows), schema), path, compression="zstd")


def _distinct(tasks: Sequence[Task], part: str) -> list[object]:
    return list({task[part]["name"]: task[part] for task in tasks}.values())

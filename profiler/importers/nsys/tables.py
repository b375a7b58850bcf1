"""Columns of a trace's tables, from the contents of a capture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ebbtide.profiler.gpu_activities.kinds import KINDS, TRANSFER, transfer_kind
from ebbtide.profiler.importers.nsys.capture import MISSING


def with_launches(work: pd.DataFrame, launches: pd.DataFrame) -> pd.DataFrame:
    """Return the work of one process with the column `launched`: the start of the call, missing where not recorded.

    Args:
        work: WORK_COLUMNS of one process.
        launches: LAUNCH_COLUMNS of the same process.
    """
    first = launches.sort_values("start", kind="stable").drop_duplicates("correlation")
    starts = first.set_index("correlation")["start"].astype("Int64")
    wanted = work["correlation"].where(work["correlation"] > 0, MISSING)
    return work.assign(launched=starts[starts.index > 0].reindex(wanted).array)


def kernel_columns(work: pd.DataFrame, names: list[str], base_ns: int) -> dict[str, Any]:
    """Return the columns of the table `kernels`. base_ns: added to all times."""
    rows = work[work["kind"] != TRANSFER]
    return {
        **_activity_columns(rows, base_ns),
        "device": _labels(rows["device"], lambda device: f"cuda:{device}"),
        "kind": pd.Categorical.from_codes(rows["kind"], [*KINDS]),
        "name": _labels(rows["name"], names.__getitem__),
    }


def transfer_columns(work: pd.DataFrame, names: list[str], base_ns: int) -> dict[str, Any]:
    """Return the columns of the table `transfers`. base_ns: added to all times."""
    rows = work[work["kind"] == TRANSFER]
    kinds = {number: transfer_kind(names[number]) for number in rows["name"].unique()}
    return {
        **_activity_columns(rows, base_ns),
        "device": "cuda:" + rows["device"].astype(str).array,
        "direction": [kinds[name].direction for name in rows["name"]],
        "bytes": rows["bytes"].astype("Int64").mask(rows["bytes"] == MISSING).array,
        "host_memory": [kinds[name].host_memory for name in rows["name"]],
        "name": [names[name] for name in rows["name"]],
    }


def annotation_columns(ranges: pd.DataFrame, names: list[str], base_ns: int) -> dict[str, Any]:
    """Return the columns of the table `annotations`. base_ns: added to all times."""
    return {
        "start_ns": (ranges["start"] + base_ns).to_numpy(),
        "end_ns": (ranges["end"] + base_ns).to_numpy(),
        "name": _labels(ranges["name"], names.__getitem__),
        "thread": ranges["thread"].astype("Int64").mask(ranges["thread"] == MISSING).array,
    }


def _activity_columns(rows: pd.DataFrame, base_ns: int) -> dict[str, Any]:
    return {
        "start_ns": (rows["start"] + base_ns).to_numpy(),
        "end_ns": (rows["end"] + base_ns).to_numpy(),
        "launch_ns": (rows["launched"] + base_ns).array,
        "stream": rows["stream"].astype("Int64").mask(rows["stream"] == MISSING).array,
    }


def _labels(numbers: pd.Series, text_of: Any) -> pd.Categorical:
    """Return the texts of numbers. Several numbers may have the same text."""
    used, positions = np.unique(numbers, return_inverse=True)
    codes, texts = pd.factorize(np.array([text_of(number) for number in used.tolist()], dtype=object))
    return pd.Categorical.from_codes(codes[positions] if len(used) else [], [*texts])

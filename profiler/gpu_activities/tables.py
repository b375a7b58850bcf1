"""Columns of the tables `kernels` and `transfers`, from the activities of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.profiler.chrome_trace.events import MISSING
from ebbtide.profiler.gpu_activities.kinds import KINDS, TRANSFER, transfer_kind


def kernel_columns(work: pd.DataFrame, names: list[str], base_ns: int) -> dict[str, Any]:
    """Return the columns of the table `kernels`, without groups of collectives.

    Args:
        work: Columns start, end and launched (ns), device, stream, kind (a position in KINDS, or TRANSFER), and name (a
            position in `names`). MISSING: not recorded.
        names: Names of activities.
        base_ns: Added to all times.
    """
    rows = work[work["kind"] != TRANSFER]
    return {
        **_times(rows, base_ns),
        "device": labels(rows["device"].clip(lower=0), "cuda:{}".format),
        "kind": pd.Categorical.from_codes(rows["kind"], [*KINDS]),
        "name": labels(rows["name"], names.__getitem__),
    }


def transfer_columns(work: pd.DataFrame, names: list[str], base_ns: int) -> dict[str, Any]:
    """Return the columns of the table `transfers`. Arguments as for `kernel_columns`; `work` also has bytes."""
    rows = work[work["kind"] == TRANSFER]
    kinds = {number: transfer_kind(names[number]) for number in rows["name"].unique()}
    return {
        **_times(rows, base_ns),
        "device": "cuda:" + rows["device"].clip(lower=0).astype(str).array,
        "direction": [kinds[name].direction for name in rows["name"]],
        "bytes": rows["bytes"].astype("Int64").mask(rows["bytes"] == MISSING).array,
        "host_memory": [kinds[name].host_memory for name in rows["name"]],
        "name": [names[name] for name in rows["name"]],
    }


def _times(rows: pd.DataFrame, base_ns: int) -> dict[str, Any]:
    """Return the columns that both tables have."""
    return {
        "start_ns": (rows["start"] + base_ns).to_numpy(),
        "end_ns": (rows["end"] + base_ns).to_numpy(),
        "launch_ns": (rows["launched"] + base_ns).array,
        "stream": rows["stream"].astype("Int64").mask(rows["stream"] == MISSING).array,
    }


def labels(numbers: pd.Series[int], text_of: Callable[[int], str]) -> pd.Categorical:
    """Return the texts of numbers. Several numbers may have the same text."""
    used, positions = np.unique(numbers, return_inverse=True)
    codes, texts = pd.factorize(np.array([text_of(number) for number in used.tolist()], dtype=object))
    return pd.Categorical.from_codes(codes[positions] if len(used) else [], [*texts])

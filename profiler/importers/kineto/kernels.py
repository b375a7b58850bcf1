"""Kinds of GPU activities in a Kineto trace, and the table `kernels`."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
import pandas as pd

from ebbtide.profiler.chrome_trace.events import MISSING, Event
from ebbtide.profiler.trace import transfers
from ebbtide.profiler.trace.schema import frame

KINDS = ("compute", "communication", "copy", "memset")
# Not a row of the table: copies between host and device are rows of the table `transfers`.
_TRANSFER = len(KINDS)
COMMUNICATION = KINDS.index("communication")
_MEMSETS = frozenset({"gpu_memset", "Memset"})
# ncclDevKernel_AllReduce_Sum_f32_RING_LL(...), ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(...); RCCL uses both names.
_COLLECTIVE = re.compile("nccl|rccl", re.IGNORECASE)


def kind_of(event: Event) -> int:
    """Return the index of an activity's kind in KINDS, or one more for a copy between host and device."""
    return _kind(event.cat, event.name)


@lru_cache(maxsize=1 << 14)
def _kind(category: str, name: str) -> int:
    if category in transfers.CATEGORIES:
        return _TRANSFER if transfers.is_transfer(name) else KINDS.index("copy")
    if category in _MEMSETS:
        return KINDS.index("memset")
    return COMMUNICATION if _COLLECTIVE.search(name) else KINDS.index("compute")


def kernel_table(activities: pd.DataFrame, names: list[str], base_ns: int) -> pd.DataFrame:
    """Return the table `kernels`.

    Args:
        activities: Columns start, end, device, stream, kind, name (a position in `names`) and launched (missing where
            the launching call was not recorded).
        names: Names of activities.
        base_ns: Added to all times.
    """
    rows = activities[activities["kind"] != _TRANSFER]
    devices, numbers = np.unique(rows["device"].clip(lower=0), return_inverse=True)
    used, name_numbers = np.unique(rows["name"], return_inverse=True)
    return frame(
        "kernels",
        {
            "start_ns": rows["start"] + base_ns,
            "end_ns": rows["end"] + base_ns,
            "device": _labels(numbers, [f"cuda:{device}" for device in devices], rows.index),
            "stream": rows["stream"].astype("Int64").mask(rows["stream"] == MISSING),
            "kind": _labels(rows["kind"].to_numpy(), [*KINDS], rows.index),
            "name": _labels(name_numbers, [names[number] for number in used], rows.index),
            "launch_ns": rows["launched"] + base_ns,
        },
    )


def _labels(codes: np.ndarray[tuple[int], np.dtype[np.int64]], labels: list[str], index: pd.Index) -> pd.Series:
    return pd.Series(pd.Categorical.from_codes(codes, categories=labels), index=index)

"""Columns of a trace's tables, from the contents of a capture."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ebbtide.profiler.gpu_activities.tables import labels
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


def annotation_columns(ranges: pd.DataFrame, names: list[str], base_ns: int) -> dict[str, Any]:
    """Return the columns of the table `annotations`. base_ns: added to all times."""
    return {
        "start_ns": (ranges["start"] + base_ns).to_numpy(),
        "end_ns": (ranges["end"] + base_ns).to_numpy(),
        "name": labels(ranges["name"], names.__getitem__),
        "thread": ranges["thread"].astype("Int64").mask(ranges["thread"] == MISSING).array,
    }

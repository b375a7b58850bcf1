"""The bytes that torch's allocators held, from the "[memory]" events of a Kineto trace."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.profiler.chrome_trace.events import MISSING, Event, spans
from ebbtide.profiler.chrome_trace.int_table import Rows

# An instant event has this category, or none (torch before 1.12).
CATEGORIES = frozenset({"cpu_instant_event", ""})
_NAME = "[memory]"
# c10::DeviceType
_CPU, _CUDA = 0, 1


class Memory:
    """Collects them."""

    def __init__(self) -> None:
        self._rows = Rows("t_ns", "type", "device", "allocated", "reserved")

    def add(self, events: list[Event]) -> None:
        """Of events of the CATEGORIES, those that tell the bytes held after an allocation or a release."""
        events = [event for event in events if event.name == _NAME and event.args.allocated != MISSING]
        if events:
            told = [(e.args.device_type, e.args.device_id, e.args.allocated, e.args.reserved) for e in events]
            self._rows.add(spans(events)[0], *np.array(told, np.int64).T)

    def lines(self) -> pd.DataFrame:
        """t_ns, device, pool, bytes, at each change: of the GPUs, and of the CPU where nothing tells of a GPU."""
        rows = self._rows.table().sort_values("t_ns", kind="stable")
        on_gpu = rows[rows["type"] == _CUDA]
        if len(on_gpu):
            rows, pools = (
                on_gpu.assign(device="cuda:" + on_gpu["device"].clip(lower=0).astype(str)),
                ["allocated", "reserved"],
            )
        else:
            rows, pools = rows[rows["type"] == _CPU].assign(device="cpu"), ["allocated"]
        lines = rows.melt(["t_ns", "device"], pools, var_name="pool", value_name="bytes")
        before = lines.groupby(["device", "pool"])["bytes"].shift()
        return lines[lines["bytes"].ne(before) & lines["bytes"].ne(MISSING)]

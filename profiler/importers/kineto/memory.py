"""Memory of torch's allocators over time, from the "[memory]" events of a Kineto trace."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.profiler.chrome_trace.events import MISSING, Event, spans
from ebbtide.profiler.chrome_trace.int_table import IntTable

# The category of instant events; torch before 1.12 gave them none.
CATEGORIES = frozenset({"cpu_instant_event", ""})
_NAME = "[memory]"
# c10::DeviceType of the CPU, and of accelerators with torch's names. HIP (ROCm) devices are `cuda` in torch.
_CPU = 0
_ACCELERATORS = {1: "cuda", 6: "cuda", 12: "xpu", 13: "mps", 19: "mtia", 20: "privateuseone"}


class AllocatorMemory:
    """Collects the memory events of a trace."""

    def __init__(self) -> None:
        self._rows = IntTable("t_ns", "type", "device", "allocated", "reserved")

    def add(self, events: list[Event]) -> None:
        """Add the memory events among events of the CATEGORIES."""
        events = [event for event in events if event.name == _NAME and event.args.allocated != MISSING]
        if events:
            rows = [(e.args.device_type, e.args.device_id, e.args.allocated, e.args.reserved) for e in events]
            self._rows.add(spans(events)[0], *np.array(rows, np.int64).T)

    def changes(self) -> pd.DataFrame:
        """Return the size of each pool whenever it changes.

        Returns:
            Columns t_ns, device, pool and bytes; for the accelerators, or for the CPU if they have no events.
        """
        rows = self._rows.table().sort_values("t_ns", kind="stable")
        accelerated = rows[rows["type"].isin(list(_ACCELERATORS))]
        if len(accelerated):
            names = accelerated["type"].map(_ACCELERATORS) + ":" + accelerated["device"].clip(lower=0).astype(str)
            rows, pools = accelerated.assign(device=names), ["allocated", "reserved"]
        else:
            rows, pools = rows[rows["type"] == _CPU].assign(device="cpu"), ["allocated"]
        sizes = rows.melt(["t_ns", "device"], pools, var_name="pool", value_name="bytes")
        previous = sizes.groupby(["device", "pool"])["bytes"].shift()
        return sizes[sizes["bytes"].ne(previous) & sizes["bytes"].ne(MISSING)]

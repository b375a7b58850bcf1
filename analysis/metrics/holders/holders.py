"""Divides the memory of a device at a time by what holds it."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.dataframes import TabularResult
from ebbtide.analysis.metrics.devices import (
    ALLOCATION_POOLS,
    main_device,
    memory_timeline,
    peak_pool,
)
from ebbtide.analysis.metrics.holders.categories import (
    CATEGORIES,
    call_site,
    categorized_allocations,
    in_loss,
)
from ebbtide.analysis.metrics.memory_spans import (
    memory_spans,
    trace_start_ns,
    within_spans,
)
from ebbtide.analysis.timeseries.step_functions import Ints
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.metadata import Inventory

_BEFORE = "allocated before the recording"
LOSS = "(loss)"
_KEYS = ["category", "module", "site"]


@dataclass(frozen=True)
class Holder:
    """Bytes held at a time by one category, module and call site (None: not known)."""

    # `parameter`, `gradient`, `optimizer_state`, `activation` or `temporary`; in an
    # imported memory timeline, the categories of torch's profiler.
    category: str | None
    module: str | None  # Dotted name of the module.
    # The place in the user's code that allocated it, as `function (file:line)`.
    site: str | None
    bytes: int


@dataclass(frozen=True, repr=False)
class Holders(TabularResult, table="holders"):
    """The holders of the memory of a device at a time.

    Attributes:
        pool: The pool that was divided.
        device: The device.
        at_ns: The time.
        t_ms: The time, from the start of the trace.
        bytes: Bytes of the pool at that time, the sum of all holders.
        holders: The largest first.
    """

    pool: str
    device: str
    at_ns: int
    t_ms: float
    bytes: int
    holders: list[Holder]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide memory --at ... --json` prints."""
        entries = asdict(self)
        del entries["at_ns"]
        return entries

    def by(self, key: str) -> list[tuple[str | None, int]]:
        """Return (value, bytes) for each value of a field, the largest first.

        The field is `category`, `module` or `site`.
        """
        sums: dict[str | None, int] = {}
        for holder in self.holders:
            value = getattr(holder, key)
            sums[value] = sums.get(value, 0) + holder.bytes
        return sorted(sums.items(), key=lambda item: -item[1])


def holders_at(
    trace: Trace, rank: int, at_ns: int | None = None, device: str | None = None
) -> Holders | None:
    """Divide the memory of a device at a time by what holds it.

    Device None is the rank's first one; time, in ns, None is the time of the largest
    use. Holders are recorded allocations where they include that time, else what the
    recorder found of parameters, gradients and optimizer state. None if no memory of
    the device was recorded at that time.
    """
    device = device or main_device(trace, rank)
    if device is None:
        return None
    detailed = _detailed_pool(trace, rank, device)
    start_ns, end_ns = recorded_span(trace, rank, device) if detailed else (0, -1)
    in_detail = at_ns is None or start_ns <= at_ns <= end_ns
    pool = detailed if detailed and in_detail else peak_pool(trace)
    reading = _reading(trace, rank, pool, device, at_ns) if pool else None
    if reading is None or not pool:
        return None
    at_ns, total = reading
    moment = np.array([at_ns])
    if not within_spans(memory_spans(trace, rank, pool), moment, moment)[0]:
        return None
    holders = (_from_allocations if pool == detailed else _from_inventory)(
        trace, rank, device, at_ns
    )
    rest = total - sum(holder.bytes for holder in holders)
    if rest > 0:
        holders.append(Holder(None, None, None, rest))
    trace_ns = trace_start_ns(trace)
    assert trace_ns is not None
    holders.sort(key=lambda holder: -holder.bytes)
    return Holders(pool or "", device, at_ns, (at_ns - trace_ns) / 1e6, total, holders)


def memory_by_category(
    trace: Trace, rank: int, device: str
) -> dict[str | None, tuple[Ints, Ints]]:
    """Return (times in ns, bytes) of each category of a device's allocations.

    None is the category of recorded allocations without one. At each time the bytes add
    up to the pool `requested` (`tensors` on the CPU). Empty where none were recorded.
    """
    rows = categorized_allocations(trace, rank, device)
    categories = rows["category"].where(rows["category"].notna(), None)
    timelines: dict[str | None, tuple[Ints, Ints]] = {}
    for category in (*CATEGORIES, None):
        live = rows[categories.isna() if category is None else categories == category]
        if live.empty:
            continue
        released = live[live["end_ns"] < np.iinfo(np.int64).max]
        times = np.concatenate([live["start_ns"], released["end_ns"]])
        changes = np.concatenate([live["bytes"], -released["bytes"]])
        order = np.argsort(times, kind="stable")
        times, sizes = times[order], changes[order].cumsum()
        last = np.append(times[1:] != times[:-1], True)
        timelines[category] = times[last], sizes[last]
    return timelines


def recorded_span(trace: Trace, rank: int, device: str) -> tuple[int, int]:
    """Return the first and the last time, ns, at which the pool of a device's recorded
    allocations is known."""
    times, _ = memory_timeline(
        trace, rank, _detailed_pool(trace, rank, device) or "", device
    )
    return int(times[0]), int(times[-1])


def _detailed_pool(trace: Trace, rank: int, device: str) -> str | None:
    """Return the pool that recorded allocations add up to, None without any."""
    if device not in trace.labels(rank, "allocations", "device"):
        return None
    pools = (
        pool
        for pool in ALLOCATION_POOLS
        if len(memory_timeline(trace, rank, pool, device)[0])
    )
    return next(pools, None)


def _reading(
    trace: Trace, rank: int, pool: str, device: str, at_ns: int | None = None
) -> tuple[int, int] | None:
    """Return a time and the bytes of a pool at that time.

    If no time is given, it is the time of the pool's peak. None where not known.
    """
    times, sizes = memory_timeline(trace, rank, pool, device)
    if at_ns is None and len(times):
        at_ns = int(times[np.argmax(sizes)])
    position = int(np.searchsorted(times, at_ns or 0, side="right")) - 1
    return None if at_ns is None or position < 0 else (at_ns, int(sizes[position]))


def _from_allocations(trace: Trace, rank: int, device: str, at_ns: int) -> list[Holder]:
    rows = categorized_allocations(trace, rank, device)
    live = rows[(rows["start_ns"] <= at_ns) & (rows["end_ns"] > at_ns)]
    stacks = live["stack"].cat.remove_unused_categories()
    sites = np.array([*map(call_site, stacks.cat.categories), None], dtype=object)[
        stacks.cat.codes.to_numpy()
    ]
    older = (
        (live["start_ns"] == rows["start_ns"].min())
        & live["stack"].isna()
        & live["category"].isna()
    )
    losses = np.array([*map(in_loss, stacks.cat.categories), False], dtype=bool)[
        stacks.cat.codes.to_numpy()
    ]
    live = live.assign(
        site=np.where(older, _BEFORE, sites),
        module=live["module"].astype(object).mask(losses, LOSS),
    )
    sums = live.groupby(_KEYS, dropna=False, observed=True)["bytes"].sum()
    holders = []
    for key, size in sums.items():
        category, module, site = (
            None if pd.isna(value) else str(value) for value in key
        )
        holders.append(Holder(category, module, site, int(size)))
    return holders


def _from_inventory(trace: Trace, rank: int, device: str, at_ns: int) -> list[Holder]:
    """Return what the recorder found of parameters and optimizer state.

    In an update, also return what it found of gradients.
    """
    inventories = trace.rank(rank).inventories
    if not inventories:
        return []
    inventory = next(
        (entry for entry in reversed(inventories) if entry.t_ns <= at_ns),
        inventories[0],
    )
    updates = trace.phases(rank)
    updates = updates[updates["phase"] == "update"]
    in_update = bool(
        ((updates["start_ns"] <= at_ns) & (updates["end_ns"] >= at_ns)).any()
    )
    return holders_of(
        inventory, device, with_gradients=in_update or inventory.t_ns == at_ns
    )


def holders_of(
    inventory: Inventory, device: str | None, with_gradients: bool
) -> list[Holder]:
    """Return the holders of a device in an inventory.

    Gradients come and go, so the gradients of another time are left out.
    """
    return [
        Holder(entry.category, entry.module, None, entry.bytes)
        for entry in inventory.holders
        if entry.device == device and (with_gradients or entry.category != "gradient")
    ]

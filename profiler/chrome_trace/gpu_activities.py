"""Collects the GPU activities of a Chrome trace and the calls that launched them as
columns of the trace's tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from ebbtide.profiler.chrome_trace.device_kinds import (
    ACTIVITY_CATEGORIES,
    CALL_CATEGORIES,
    COPIES,
    DEFAULT_KIND,
    KIND_OF_CATEGORY,
    KIND_OF_TYPE,
    MEMSETS,
    SYNC_CATEGORIES,
    TASK_CALL,
    TASKS_KIND,
    copy_name,
    is_collective,
    task_category,
)
from ebbtide.profiler.chrome_trace.events import MISSING, Args, Event, IntTable, spans
from ebbtide.profiler.chrome_trace.host_calls import (
    HostCalls,
    matching,
    with_launches,
)

KINDS = ("compute", "communication", "copy", "memset")
COMMUNICATION = KINDS.index("communication")
# The number of a copy between host and device, which is a row of the table `transfers`
# and not of `kernels`.
TRANSFER = len(KINDS)
# All categories that are read here.
DEVICE_CATEGORIES = ACTIVITY_CATEGORIES | CALL_CATEGORIES | SYNC_CATEGORIES
# The note on work that `without_empty` leaves out.
NO_TIME = "kernels that took no time are left out: {:,}"
# Calls between two ranks of a group: the other ranks of the group do not take part.
_POINT_TO_POINT = ("send", "recv", "isend", "irecv")
# No copy has this many bytes, and no trace has enough copies that their sum overflows.
_MAX_BYTES = 1 << 44


@lru_cache(maxsize=1 << 14)
def kind_of(category: str, name: str) -> int:
    """Return the position of an activity's kind in KINDS, or TRANSFER."""
    if category in COPIES:
        copy = copy_name(name)
        return TRANSFER if copy and copy[0] else KINDS.index("copy")
    if category in MEMSETS:
        return KINDS.index("memset")
    return COMMUNICATION if is_collective(name) else KINDS.index("compute")


def without_empty(work: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Return work without kernels and memsets that take no time, and their number.
    Copies stay, for their bytes."""
    empty = (work["end"] <= work["start"]) & (work["kind"] != TRANSFER)
    return work[~empty].reset_index(drop=True), int(empty.sum())


def kernel_columns(
    work: pd.DataFrame, names: list[str], base_ns: int, device: str = DEFAULT_KIND
) -> dict[str, Any]:
    """Return the columns of the table `kernels`, without groups. `work` has start, end
    and launched (ns, to which `base_ns` is added), device, stream, kind (a position in
    KINDS, or TRANSFER), and name (in `names`). MISSING: not recorded. `device`: the
    kind of the devices."""
    rows = work[work["kind"] != TRANSFER]
    return {
        **_times(rows, base_ns),
        "device": labels(rows["device"].clip(lower=0), f"{device}:{{}}".format),
        "kind": pd.Categorical.from_codes(rows["kind"], [*KINDS]),
        "name": labels(rows["name"], names.__getitem__),
    }


def transfer_columns(
    work: pd.DataFrame, names: list[str], base_ns: int, device: str = DEFAULT_KIND
) -> dict[str, Any]:
    """Return the columns of the table `transfers`. Arguments as for `kernel_columns`;
    `work` also has bytes."""
    rows = work[work["kind"] == TRANSFER]
    kinds = {
        number: copy_name(names[number]) or (None, None)
        for number in rows["name"].unique()
    }
    return {
        **_times(rows, base_ns),
        "device": f"{device}:" + rows["device"].clip(lower=0).astype(str).array,
        "direction": [kinds[name][0] for name in rows["name"]],
        "bytes": rows["bytes"].astype("Int64").mask(rows["bytes"] == MISSING).array,
        "host_memory": [kinds[name][1] for name in rows["name"]],
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


def labels(
    numbers: pd.Series[int], text_of: Callable[[int], str | None]
) -> pd.Categorical:
    """Return the texts of numbers. Several numbers may have the same text; None is a
    missing one."""
    used, positions = np.unique(numbers, return_inverse=True)
    codes, texts = pd.factorize(
        np.array([text_of(number) for number in used.tolist()], dtype=object)
    )
    return pd.Categorical.from_codes(codes[positions] if len(used) else [], [*texts])


def process_group(args: Args) -> str | None:
    """Return a label of the process group of a collective: the group's name, then its
    ranks, such as `3 [0, 1]`.

    None where the kernel states no group (torch before 2.4, ROCm), and for a call
    between two ranks."""
    if args.group_name is None or str(args.collective).lower() in _POINT_TO_POINT:
        return None
    return (
        f"{args.group_name} {args.group_ranks}"
        if args.group_ranks is not None
        else str(args.group_name)
    )


def _connected(event: Event, category: str) -> Event:
    """Return an event of Ascend with its connection and its stream where other events
    have theirs."""
    args = event.args
    args = msgspec.structs.replace(
        args,
        correlation=args.connection,
        stream=max(args.stream_id, args.task_stream),
    )
    return msgspec.structs.replace(event, cat=category, args=args)


class GpuActivities:
    """Collects the GPU activities of one trace, and the calls that launched them. Add
    all events before reading. `duplicates`: number of activities that were in the trace
    twice, known once `work` was read."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._groups: dict[str | None, int] = {None: MISSING}
        columns = (
            "start",
            "end",
            "correlation",
            "device",
            "stream",
            "kind",
            "name",
            "bytes",
            "group",
        )
        self._activities = IntTable(*columns)
        self._calls = HostCalls()
        self._sizes = IntTable("correlation", "bytes")
        self.duplicates = 0
        self._kinds: Counter[str] = Counter()
        # Copies whose names do not tell their direction, and tasks that are left out.
        self.unclear_copies, self.waits = 0, 0
        self.empty = 0  # Kernels that took no time, known once `work` was read.

    @property
    def device_kind(self) -> str:
        """The kind of the devices by the events that tell."""
        return self._kinds.most_common(1)[0][0] if self._kinds else DEFAULT_KIND

    def add_types(self, types: Iterable[int]) -> None:
        """Add the types of devices (c10::DeviceType) of other events."""
        self._kinds.update(KIND_OF_TYPE[kind] for kind in types if kind in KIND_OF_TYPE)

    def add_tasks(self, events: list[Event]) -> None:
        """Add the tasks of Ascend and the calls that launched them among events without
        a category: tasks have a type, and the connection of their call."""
        tasks, calls = [], []
        for event in events:
            if event.args.task is not None:
                category = task_category(event.args.task)
                self._kinds[TASKS_KIND] += 1
                self.waits += category is None
                if category is not None:
                    tasks.append(_connected(event, category))
            elif event.args.connection > 0 and TASK_CALL.match(event.name):
                calls.append(_connected(event, ""))
        if tasks:
            self._add_activities(tasks)
        if calls:
            self._calls.add(calls)

    def add(self, events: list[Event]) -> None:
        """Add the events of DEVICE_CATEGORIES among events that have times."""
        if activities := [
            event for event in events if event.cat in ACTIVITY_CATEGORIES
        ]:
            self._add_activities(activities)
        if calls := [event for event in events if event.cat in CALL_CATEGORIES]:
            self._calls.add(calls)
            self._kinds[KIND_OF_CATEGORY[calls[0].cat]] += len(calls)
            # Some ROCm versions state the sizes of copies only there.
            sizes = [
                (event.args.correlation, event.args.bytes)
                for event in calls
                if event.args.bytes != MISSING
            ]
            self._sizes.add(*np.array(sizes, np.int64).reshape(-1, 2).T)
        if waits := [event for event in events if event.cat in SYNC_CATEGORIES]:
            self._calls.add_waits(waits)

    def _add_activities(self, events: list[Event]) -> None:
        names = self._names
        rows = []
        for event in events:
            args, kind = event.args, kind_of(event.cat, event.name)
            name = names.setdefault(event.name, len(names))
            if event.cat in COPIES and copy_name(event.name) is None:
                self.unclear_copies += 1
            group = MISSING
            if kind == COMMUNICATION:
                group = self._groups.setdefault(
                    process_group(args), len(self._groups) - 1
                )
            rows.append(
                (
                    args.correlation,
                    args.device,
                    max(args.stream, args.queue, args.stream_id),
                    kind,
                    name,
                    args.bytes,
                    group,
                )
            )
        self._activities.add(*spans(events), *np.array(rows, np.int64).T)

    @cached_property
    def work(self) -> pd.DataFrame:
        """All activities, each once.

        The columns are start, end (ns), correlation, device, stream, kind (a position
        in KINDS, or TRANSFER), name and group (numbers), bytes, and the columns of
        `with_launches`.
        """
        work = self._activities.table()
        # One stream runs one activity at a time: the same one at the same time is the
        # same event.
        repeated = work.duplicated()
        self.duplicates = int(repeated.sum())
        if self.duplicates:
            work = work[~repeated]
        work, self.empty = without_empty(work)
        return with_launches(work, self._calls.table())

    def busiest(self) -> list[int]:
        """Return the numbers of the devices that ran anything, the busiest first."""
        busy = (
            (self.work["end"] - self.work["start"])
            .groupby(self.work["device"].clip(lower=0))
            .sum()
        )
        return [
            int(device)
            for device in busy.sort_values(ascending=False, kind="stable").index
        ]

    def transfers(self, base_ns: int) -> dict[str, Any]:
        """Return the columns of the table `transfers`.

        base_ns: added to the times of the events.
        """
        copies = self.work[self.work["kind"] == TRANSFER]
        (stated,), recorded = matching(self._sizes.table(), copies["correlation"])
        sizes = copies["bytes"].mask((copies["bytes"] == MISSING) & recorded, stated)
        copies = copies.assign(bytes=sizes.where(sizes.between(0, _MAX_BYTES), MISSING))
        return transfer_columns(copies, [*self._names], base_ns, self.device_kind)

    def kernels(self, base_ns: int) -> dict[str, Any]:
        """Return the columns of the table `kernels`.

        base_ns: added to the times of the events.
        """
        groups = [group for group in self._groups if group is not None]
        codes = self.work.loc[self.work["kind"] != TRANSFER, "group"]
        columns = kernel_columns(self.work, [*self._names], base_ns, self.device_kind)
        return {**columns, "group": pd.Categorical.from_codes(codes, groups)}

    def calls(self, base_ns: int) -> dict[str, Any]:
        """Return the columns of the table `calls`.

        base_ns: added to the times of the events.
        """
        return self._calls.columns(self.work["correlation"].to_numpy(), base_ns)

"""Rules about the host's memory, and about jobs that ended for it; they are in
`host_tables.toml`."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ebbtide.features.explain import formats
from ebbtide.features.explain.answer import OpenQuestion, Result, rule
from ebbtide.features.explain.line_formats import file_content
from ebbtide.features.explain.readers.gpu_tables import GpuTable
from ebbtide.features.explain.readers.host_tables import HostMemoryTable, HostMessage
from ebbtide.features.explain.readers.step_logs import StepLog
from ebbtide.features.explain.record import Records
from ebbtide.features.explain.rule_tables import entry_answer, holds
from ebbtide.units import bytes_text

_GIB = 1 << 30
_MIN_TABLES = 3
_WHO_KILLED = (
    "dmesg -T | grep -iE 'oom-kill|killed process'; cat /sys/fs/cgroup/memory.events"
)
_KINDS_OF_KILLS = ("kill", "sigkill", "group-kill")
_PARTS_OF_KILL = ("anon", "file", "shared")


@rule(5)
def explain_host(records: Records) -> Iterator[Result]:
    messages, tables = records.of(HostMessage), records.of(HostMemoryTable)
    if not messages and not tables:
        return
    figures: dict[str, Any] = {
        **dict.fromkeys(_KINDS_OF_KILLS, 0),
        **Counter(one.kind for one in messages),
    }
    words: dict[str, Any] = {}
    for table in tables:
        total = table.sizes["total"]
        for name, size in table.sizes.items():
            figures |= {name: size, f"{name}_share": size / total}
            words[name] = bytes_text(size)
    _add_fall(figures, words, tables)
    _add_messages(figures, words, messages)
    _add_nodes(figures, words, messages)
    readings = [one for table in records.of(GpuTable) for one in table.readings]
    shares = [one.share for one in readings if one.share is not None]
    if shares:
        words["gpu_share"] = max(shares)
    printed = [log for log in records.of(StepLog) if formats.HOST_SHARE in log.steps]
    if printed:
        words["host_used"] = bytes_text(printed[-1].values(formats.HOST)[-1])
        words["host_share"] = printed[-1].values(formats.HOST_SHARE)[-1]
    places = [one.place for one in (*messages, *tables)]
    names = set()
    for entry in file_content("rules/host_tables.toml")["rule"]:
        if entry["name"] not in names and holds(entry["where"], figures):
            names.add(entry["name"])
            yield entry_answer(entry, words, *places[:1])
    if "killed" in names:
        yield OpenQuestion("who ended the process, and its memory", _WHO_KILLED)


def _add_messages(
    figures: dict[str, Any], words: dict[str, Any], messages: list[HostMessage]
) -> None:
    """Add what messages say: of the largest process that was killed, of limits and of
    nodes."""
    by_kind = {one.kind: one for one in reversed(messages)}
    kills = [one for one in messages if one.kind == "kill"]
    if kills:
        kill = max(kills, key=lambda one: one.size(*_PARTS_OF_KILL))
        words |= {**kill.values, "size": bytes_text(kill.size(*_PARTS_OF_KILL))}
        is_group = any(
            "MEMCG" in one.text for one in messages if one.kind == "constraint"
        )
        figures["group"] = is_group or "cgroup" in kill.values
        if kill.size("shared") >= _GIB:
            words["shared_of_kill"] = bytes_text(kill.size("shared"))
    if limit := by_kind.get("limit"):
        words |= {name: bytes_text(limit.size(name)) for name in ("limit", "usage")}
    tasks = [one for one in messages if one.kind == "task"]
    tasks.sort(key=lambda one: -one.size("rss"))
    rows = [f"{one.values['name']} {bytes_text(one.size('rss'))}" for one in tasks[:3]]
    if rows:
        all_tasks = bytes_text(sum(one.size("rss") for one in tasks))
        words["tasks"] = f"{', '.join(rows)}; all {all_tasks}"
    if lock := by_kind.get("lock-limit"):
        figures["lock_limit"] = lock.size("limit")
        words["lock_limit"] = bytes_text(lock.size("limit"))
    if by_kind.keys() >= {"numa-hit", "numa-miss"}:
        hits, misses = (
            [int(word) for word in by_kind[kind].text.split()[1:]]
            for kind in ("numa-hit", "numa-miss")
        )
        pairs = zip(hits, misses, strict=False)
        figures["other_node"] = max(miss / max(hit + miss, 1) for hit, miss in pairs)
        words["other_node_share"] = f"{figures['other_node']:.0%}"


def _add_fall(
    figures: dict[str, Any], words: dict[str, Any], tables: list[HostMemoryTable]
) -> None:
    """Add by how much available memory falls from table to table."""
    sizes = [one.sizes["available"] for one in tables if "available" in one.sizes]
    if len(sizes) < _MIN_TABLES or sizes != sorted(sizes, reverse=True):
        return
    figures["fall_share"] = (sizes[0] - sizes[-1]) / tables[-1].sizes["total"]
    words["fall"] = f"{bytes_text(sizes[0])} to {bytes_text(sizes[-1])}"
    words["tables"] = len(sizes)


def _add_nodes(
    figures: dict[str, Any], words: dict[str, Any], messages: list[HostMessage]
) -> None:
    """Add the node of the host with the least memory left, and that with the most."""
    rows = {
        one.values["row"]: [float(word) for word in one.text.split()[1:]]
        for one in messages
        if one.kind == "numa-memory"
    }
    if not rows.keys() >= {"MemTotal", "MemFree"}:
        return
    totals, files = rows["MemTotal"], rows.get("FilePages", [])
    # The last column is the sum of all nodes, unless there are too many.
    is_sum = abs(sum(totals[:-1]) - totals[-1]) < 0.01 * totals[-1]
    count = len(totals) - is_sum
    left = {}
    for node, (total, free) in enumerate(zip(totals, rows["MemFree"], strict=False)):
        if node < count and total:
            pages = files[node] if node < len(files) else 0
            left[node] = (free + pages) / total
    if len(left) < 2:
        return
    fullest, emptiest = min(left, key=left.__getitem__), max(left, key=left.__getitem__)
    figures |= {"least_left": left[fullest], "most_left": left[emptiest]}
    words |= {
        "full_node": fullest,
        "empty_node": emptiest,
        "least_left": f"{left[fullest]:.0%}",
        "most_left": f"{left[emptiest]:.0%}",
    }

"""Rules about the host's memory, and about jobs that ended for it; they are in
`host_tables.toml`."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ebbtide.features.explain import formats
from ebbtide.features.explain.answer import OpenQuestion, Result, rule
from ebbtide.features.explain.line_formats import file_content
from ebbtide.features.explain.readers.gpu_tables import GpuTable
from ebbtide.features.explain.readers.host_tables import HostMemory, HostMessage
from ebbtide.features.explain.readers.step_logs import StepLog
from ebbtide.features.explain.record import Records
from ebbtide.features.explain.rule_tables import entry_answer, holds
from ebbtide.units import bytes_text

_GIB = 1 << 30
_WHO_KILLED = (
    "dmesg -T | grep -iE 'oom-kill|killed process'; cat /sys/fs/cgroup/memory.events"
)
_KINDS_OF_KILLS = ("kill", "sigkill", "group-kill")
_PARTS_OF_KILL = ("anon", "file", "shared")


@rule(5)
def explain_host(records: Records) -> Iterator[Result]:
    messages, tables = records.of(HostMessage), records.of(HostMemory)
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
    _add_messages(figures, words, messages)
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

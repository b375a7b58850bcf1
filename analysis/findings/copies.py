"""How copies between host and device are made."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.analysis.findings.finding import Finding, Unknown
from ebbtide.analysis.metrics.link_throughput import covering
from ebbtide.analysis.metrics.trace_metrics import Study, at_most
from ebbtide.analysis.timeseries.step_functions import union, union_length
from ebbtide.units import bytes_text, ms_text, rate_text

# What costs less than this share of an iteration is not worth a line.
_LEAST_SHARE = 0.01
_QUESTION = "are copies made from pinned or from pageable memory?"
_RECORD = "record each copy: ebbtide profile --transfers"
# Copies at least this long tell a link's rate; shorter ones tell the cost of a launch.
_LARGE_BYTES = 1 << 20
# So much slower beside another rank's copies than alone, and the two share a link.
_SLOWER = 1.4


def pageable_copies(study: Study) -> Finding | Unknown | None:
    """Copies from or to pageable host memory, which the driver stages through a buffer of its own."""
    if not study.has_gpu or not study.iteration_ms:
        return None
    if not study.has_copies:
        return Unknown("pageable-copies", _QUESTION, _RECORD)
    if len(study.counted_copies) and study.counted_copies["host_memory"].isna().all():
        return Unknown("pageable-copies", _QUESTION, "the copies of this trace do not tell: " + _RECORD)
    gains: list[float] = []
    cost = 0.0
    evidence = []
    for way in ("h2d", "d2h"):
        pageable, pinned = (study.copies_of(way, kind) for kind in ("pageable", "pinned"))
        if pageable is None or pageable.bytes is None or pageable.busy_ms <= 0:
            continue
        rate = pageable.bytes / pageable.busy_ms * 1e3
        fast = pinned.bytes / pinned.busy_ms * 1e3 if pinned and pinned.bytes and pinned.busy_ms else None
        fast = fast if fast is not None and fast > rate else study.peak_bytes_per_s
        if fast is not None:
            gains.append(at_most(pageable.busy_ms * (1 - rate / fast)))
        cost += gains[-1] if fast is not None else pageable.busy_ms
        beside = f"; pinned ones could run at {rate_text(fast)}" if fast is not None and fast > rate else ""
        evidence.append(
            f"{way}: {pageable.count:,} pageable copies per iteration, {bytes_text(pageable.bytes)} in "
            f"{ms_text(pageable.busy_ms)} ({rate_text(rate)}{beside})"
        )
    if not evidence or cost < _LEAST_SHARE * study.iteration_ms:
        return None
    return Finding(
        "pageable-copies",
        "Copies go through pageable host memory",
        at_most(sum(gains)) if gains else None,
        tuple(evidence),
        "keep what is copied in pinned memory (pin_memory=True, offload_optimizer.pin_memory)",
    )


def one_direction(study: Study) -> Finding | Unknown | None:
    """The link carries both directions at once; copies that take turns waste it."""
    if not study.has_gpu or not study.iteration_ms:
        return None
    if not study.has_copies:
        return Unknown("one-direction", "do copies of both directions run at once or take turns?", _RECORD)
    worth = 0.0
    evidence = []
    for phase in ("forward", "backward", "update", "other"):
        busy = [
            (up.busy_ms, down.busy_ms, up.both_ms)
            for up, down in study.both_ways(phase)
            if up.busy_ms is not None and down.busy_ms is not None and up.both_ms is not None
        ]
        up, down, both = max(busy, key=lambda ms: min(ms[:2]) - ms[2], default=(0.0, 0.0, 0.0))
        gain = min(up, down) - both
        if gain >= _LEAST_SHARE * study.iteration_ms:
            worth += gain
            evidence.append(f"{phase}: h2d busy {ms_text(up)}, d2h busy {ms_text(down)}, both at once {ms_text(both)}")
    if not evidence:
        return None
    return Finding(
        "one-direction",
        "Copies of the two directions take turns",
        at_most(worth),
        tuple(evidence),
        "put h2d and d2h copies on streams of their own, so that they overlap",
    )


def shared_link(study: Study) -> Finding | Unknown | None:
    """Ranks whose copies run slower while another rank copies share a part of the way."""
    if not study.has_gpu or study.world_size < 2:
        return None
    recorded = [rank for rank in study.trace.ranks if study.trace.rank(rank).get("transfers_recorded")]
    if len(recorded) < 2:
        return Unknown("shared-link", "do ranks share a link?", _RECORD + ", on every rank")
    worth = 0.0
    evidence = []
    for (way, kind), rows in _with_company(study).groupby(["direction", "kind"]):
        together, alone = rows[rows["company"] > 0.5], rows[rows["company"] < 0.1]
        if len(together) < 3 or len(alone) < 3:
            continue
        slow, fast = together["rate"].median(), alone["rate"].median()
        if fast > _SLOWER * slow:
            lengths = [_busy_ms(copies) for _, copies in together.groupby("rank")]
            worth += max(lengths) / len(study.counted) * (1 - slow / fast)
            evidence.append(
                f"{way}: {kind or 'all'} copies run at {rate_text(fast)} alone and at {rate_text(slow)} beside another "
                f"rank's ({len(alone):,} and {len(together):,} copies of 1 MiB or more)"
            )
    if not evidence:
        return None
    return Finding(
        "shared-link",
        "Ranks share a link",
        at_most(worth),
        tuple(evidence),
        "spread the ranks over PCIe switches and sockets (nvidia-smi topo -m), or let them copy at different times",
    )


def _with_company(study: Study) -> pd.DataFrame:
    """rank, direction, kind, start_ns, end_ns, rate (bytes/s), company (the share of its time in which another rank of
    the host copied the same way) of each large copy."""
    rows = study.counted_copies
    rows = rows[(rows["bytes"].fillna(0) >= _LARGE_BYTES) & (rows["end_ns"] > rows["start_ns"])]
    hosts = {rank: study.trace.rank(rank).get("host") for rank in study.trace.ranks}
    rows = rows.assign(host=rows["rank"].map(hosts))
    found = []
    for (rank, way), own in rows.groupby(["rank", "direction"]):
        others = rows[(rows["rank"] != rank) & (rows["direction"] == way) & (rows["host"] == hosts[rank])]
        busy = covering(*union(others["start_ns"].to_numpy(np.int64), others["end_ns"].to_numpy(np.int64)))
        starts, ends = own["start_ns"].to_numpy(np.int64), own["end_ns"].to_numpy(np.int64)
        rate = own["bytes"].to_numpy(np.float64) / (ends - starts) * 1e9
        kind = own["host_memory"].fillna("")
        found.append(own.assign(rate=rate, company=(busy(ends) - busy(starts)) / (ends - starts), kind=kind))
    return pd.concat(found) if found else rows.assign(rate=0.0, company=0.0, kind="")


def _busy_ms(rows: pd.DataFrame) -> float:
    return union_length(rows["start_ns"].to_numpy(np.int64), rows["end_ns"].to_numpy(np.int64)) / 1e6

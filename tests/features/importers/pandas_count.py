"""Counts figures of a torch.profiler trace for every microsecond, from its JSON alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

PARTS = ("forward", "backward", "update", "other")
NAMES = {"forward": 0, "backward": 1, "Optimizer.step#A.step": 2}
KINDS = {"kernel": "compute", "gpu_memcpy": "copy", "gpu_memset": "memset"}
NEVER = 1 << 60


def grid(phases: pd.DataFrame, marks: Any, first: int, length: int) -> Any:
    """Return for each microsecond 4 times its step, plus its part; -1 outside."""
    steps, keys = phases.groupby("step"), np.full(length, -1)
    ends = np.minimum(marks, steps["ts"].min().shift(-1, fill_value=NEVER))
    begin = min(first, phases["ts"].min())
    for step, end in np.maximum(ends, steps["end"].max()).items():
        keys[begin:end], begin = 4 * step + 3, end
    for row in phases.itertuples():
        keys[row.ts : row.end] = 4 * row.step + row.part
    return keys


def moments(rows: pd.DataFrame, length: int) -> Any:
    """Return in which microseconds any of some rows runs."""
    ran = np.zeros(length, bool)
    for row in rows.itertuples():
        ran[row.ts : row.end] = True
    return ran


def count(path: Path) -> dict[str, Any]:
    """Return the figures of `summary`, `summary --by activity` and `memory`."""
    rows = pd.DataFrame(json.loads(path.read_text())["traceEvents"])
    rows = rows.join(pd.json_normalize(rows["args"].tolist())).fillna({"dur": 0})
    rows = rows.astype({"ts": int, "dur": int}).assign(end=lambda r: r["ts"] + r["dur"])
    length = rows["end"].max() + 1
    calls = rows[rows["cat"] == "cuda_runtime"].set_index("correlation")["ts"]
    work = rows[rows["cat"].isin(KINDS)].assign(kind=rows["cat"].map(KINDS))
    work["launch"] = work["correlation"].map(calls).astype(int)
    work.loc[work["name"].str.contains("nccl"), "kind"] = "communication"
    steps = rows[rows["name"].str.startswith("ProfilerStep")].reset_index(drop=True)
    host = rows[rows["name"].isin(NAMES)].sort_values("ts", ignore_index=True)
    host["step"] = np.searchsorted(steps["ts"], host["ts"], "right") - 1
    host["part"] = host["name"].map(NAMES)
    own = [work[work["launch"].between(r.ts, r.end, "left")] for r in host.itertuples()]
    main = [rows[rows["stream"] == 7] for rows in own]
    begins = [rows["ts"].min() for rows in main]
    ends = [rows["end"].max() for rows in main]
    late = [rows["end"][rows["kind"] == "communication"].max() for rows in own]
    late = np.minimum(late, [*begins[1:], NEVER])
    device = host.assign(ts=begins, end=np.fmax(ends, late).astype(int))
    by_step = np.searchsorted(steps["ts"], work["launch"], "right") - 1
    counted = (work["stream"] == 7) | (by_step == len(steps) - 1)
    marks = work["end"][counted].groupby(by_step[counted]).max()
    on_device = grid(device, marks, steps["ts"][0], length)
    on_host = grid(host, steps["end"], steps["ts"][0], length)
    work["key"] = on_host[work["launch"]]

    def by_part(values: Any, keys: Any = on_device) -> dict[str, Any]:
        sums = np.bincount(keys[keys >= 0], values[keys >= 0], 4 * len(steps))
        return dict(zip(PARTS, sums.reshape(-1, 4)[2:].T, strict=True))

    used = {kind: moments(own, length) for kind, own in work.groupby("kind")}
    busy = np.any([*used.values()], axis=0)
    span = np.zeros(length, bool)
    span[work["ts"].min() : work["end"].max()] = True
    figures: dict[str, Any] = {"time": by_part(np.ones(length) / 1e3)}
    figures |= {"copy": by_part(used["copy"] / 1e3), "idle": by_part(~busy / 1e3)}
    for kind in ("compute", "communication"):
        total = np.zeros(4 * len(steps))
        for key, group in work[work["kind"] == kind].groupby("key"):
            total[key] += moments(group, length).sum() / 1e3 if key >= 0 else 0
        figures[kind] = by_part(total, np.arange(len(total)))
    for direction, word in (("h2d", "HtoD"), ("d2h", "DtoH")):
        copies, rate = work[work["name"].str.contains(word)], np.zeros(length)
        for row in copies.itertuples():
            rate[row.ts : row.end] += row.bytes / row.dur
        figures[direction] = by_part(rate)
        figures[f"{direction} total"] = [len(copies), copies["bytes"].sum()]
    both = used["compute"] & used.get("communication", False)
    totals = {**used, "span": span, "idle": span & ~busy, "overlap": both}
    figures["total"] = {name: at.sum() / 1e3 for name, at in totals.items()}
    kernels = work[work["kind"].isin(["compute", "communication"])].groupby("name")
    columns = kernels["dur"].agg(["size", "sum", "min", "median", "max"])
    figures["kernels"] = columns.T.to_dict("list")
    delays = (work["ts"] - work["launch"])[work["kind"] == "compute"]
    figures["delays"] = delays.quantile([0.5, 0.95]).tolist()
    for pool in ("Allocated", "Reserved"):
        sizes = rows[rows["name"] == "[memory]"].groupby("ts")[f"Total {pool}"].last()
        at = sizes.reindex(range(length)).ffill().groupby(on_host).agg(["min", "max"])
        at = at.reindex(range(4 * len(steps)))
        sides = {side: by_part(at[side].to_numpy(), at.index) for side in at}
        figures[pool.lower()] = sides
    return figures

"""Each importer with a generated file in twelve variations: the figures of the plain
file, or one line that says what is wrong."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.source import SourceError
from ebbtide.profiler.trace import Trace
from tests.features.importers.kineto.made_kineto import BASE, iteration, launched
from tests.features.importers.nsys.made_exports import training

STEPS = 12
START = pd.Timestamp("2026-03-16 10:00:00")
MIB = 1 << 20

# -- text: a stamp and the rest of each line


def stamped(number: int, text: str) -> str:
    return f"[{START + pd.Timedelta(seconds=2 * number):%Y-%m-%d %H:%M:%S},000] {text}"


def deepspeed(number: int) -> str:
    timers = "fwd: 400.00 | bwd: 500.00 | bwd_inner: 490.00 | step: 50.00"
    return stamped(number, f"[INFO] [Rank 0] time (ms) | {timers}")


def megatron(number: int) -> str:
    return stamped(
        number,
        f"iteration {number + 1:8d}/{STEPS:8d} | consumed samples: 16 | elapsed time "
        "per iteration (ms): 1900.0 | lm loss: 1.2E+01 |",
    )


def monitor(number: int) -> str:
    moment = START + pd.Timedelta(seconds=2 * number)
    return f"{moment:%Y/%m/%d %H:%M:%S}.000, 0, {1000 + number} MiB, 300.00 W"


MONITOR_HEAD = "timestamp, index, memory.used [MiB], power.draw [W]"
BANNER = "[launch.py:256:main] WORLD INFO DICT: {'localhost': [0, 1]}"
_STAMP = re.compile(r"(\d{4})([-/])(\d\d)[-/](\d\d) (\d\d):")


def phase_lengths(trace: Trace) -> Any:
    phases = trace.phases(0)
    lengths = (phases["end_ns"] - phases["start_ns"]) / 1e6
    return lengths.groupby(phases["phase"]).median().to_dict()


def marked_lengths(trace: Trace) -> Any:
    marks = trace.iteration_marks(0)
    return float((marks["end_ns"] - marks["start_ns"]).median() / 1e6)


def sampled(trace: Trace) -> Any:
    rows = trace.gpu(0)
    span_s = (rows["t_ns"].max() - rows["t_ns"].min()) / 1e9
    return span_s, float(rows["power_w"].median()), int(trace.memory(0)["bytes"].max())


TEXTS: dict[str, tuple[list[str], Callable[[Trace], Any]]] = {
    "deepspeed": ([deepspeed(n) for n in range(STEPS)], phase_lengths),
    "megatron": ([megatron(n) for n in range(STEPS)], marked_lengths),
    "monitor": ([MONITOR_HEAD, *map(monitor, range(STEPS))], sampled),
}


def one_hour_back(lines: list[str]) -> list[str]:
    half = len(lines) // 2
    back = [
        _STAMP.sub(
            lambda m: f"{m[1]}{m[2]}{m[3]}{m[2]}{m[4]} {int(m[5]) - 1:02d}:", line
        )
        for line in lines[half:]
    ]
    return [*lines[:half], *back]


def old_wording(line: str) -> str:
    words = {
        "fwd:": "forward:",
        "bwd:": "backward:",
        "bwd_inner:": "backward_inner:",
        "iteration  ": "iteration=",
        "elapsed time per iteration (ms): ": "elapsed_time_per_iteration_ms=",
        "power.draw": "power.draw.average",
    }
    for word, older in words.items():
        line = line.replace(word, older)
    return line


def joined(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode()


def labelled(lines: list[str]) -> list[str]:
    other = [line.replace(": 1900.0", ": 9999.0") for line in lines]
    pairs = zip(lines, other, strict=True)
    return [
        f"[default{rank}]:{line.replace('[Rank 0]', f'[Rank {rank}]')}"
        for pair in pairs
        for rank, line in enumerate(pair)
    ]


TEXT_VARIATIONS: dict[str, Callable[[list[str]], bytes]] = {
    "clock back": lambda lines: joined(one_hour_back(lines)),
    "two runs": lambda lines: joined([*lines, BANNER, *lines]),
    "no times": lambda lines: joined([re.sub(r"^\[20.{22}\] ", "", x) for x in lines]),
    "utf-16": lambda lines: joined(lines).decode().encode("utf-16"),
    "ranks interleaved": lambda lines: joined(labelled(lines)),
    "cut line": lambda lines: joined([*lines[:5], lines[5][:30], *lines[5:]]),
    "colours": lambda lines: joined([f"\x1b[36m{line}\x1b[0m" for line in lines]),
    "bars": lambda lines: joined([f" 5%|#  | 1/20\r{line}" for line in lines]),
    "banner": lambda lines: joined([BANNER, "cdb=None", *lines]),
    "no end": lambda lines: joined(lines).rstrip(b"\n"),
    "windows": lambda lines: joined(lines).replace(b"\n", b"\r\n"),
    "older": lambda lines: joined([*map(old_wording, lines)]),
}
# Files that are no table with these: refused in one line.
REFUSED = {("monitor", name) for name in ("ranks interleaved",)}
# The second run of a table is more rows of it.
LONGER = {("monitor", "two runs")}


def outcome(folder: Path, contents: bytes, figures: Callable[[Trace], Any]) -> Any:
    file = folder / "file"
    file.write_bytes(contents)
    try:
        return figures(import_trace([file], folder / "t.ebb", force=True))
    except SourceError as error:
        lines = str(error).splitlines()
        return "refused" if len(lines) == 1 else lines


@pytest.mark.parametrize("variation", TEXT_VARIATIONS)
@pytest.mark.parametrize("kind", TEXTS)
def test_import__reads_text_in_every_variation(
    tmp_path: Path, kind: str, variation: str
) -> None:
    lines, figures = TEXTS[kind]
    varied = outcome(tmp_path, TEXT_VARIATIONS[variation](lines), figures)
    if (kind, variation) in REFUSED:
        assert varied == "refused"
    elif (kind, variation) not in LONGER:
        assert varied == outcome(tmp_path, joined(lines), figures)


# -- torch.profiler

EVENTS = [
    event
    for number in range(6)
    for event in (
        *iteration(number, 100.0 * number + 1000),
        *launched(
            100.0 * number + 1012,
            100.0 * number + 1015,
            100.0 * number + 1035,
            number + 1,
        ),
    )
]


def kineto(events: Any, **meta: Any) -> bytes:
    head = {"schemaVersion": 1, "baseTimeNanoseconds": BASE, **meta}
    return json.dumps({**head, "traceEvents": events}).encode()


def changed(**fields: Callable[[Any], Any]) -> bytes:
    return kineto(
        [
            {**event, **{name: change(event[name]) for name, change in fields.items()}}
            for event in EVENTS
        ]
    )


def device_figures(trace: Trace) -> Any:
    kernels, phases = trace.kernels(0), trace.phases(0)
    lengths = (phases["gpu_end_ns"] - phases["gpu_start_ns"]).dropna()
    return (
        len(kernels),
        int((kernels["end_ns"] - kernels["start_ns"]).sum()),
        [*lengths],
    )


KINETO_VARIATIONS: dict[str, bytes] = {
    "packed": gzip.compress(kineto(EVENTS)),
    "byte order mark": b"\xef\xbb\xbf" + kineto(EVENTS),
    "utf-16": kineto(EVENTS).decode().encode("utf-16"),
    "list": json.dumps(EVENTS).encode(),
    "shuffled": kineto(EVENTS[::-1]),
    "twice": kineto([*EVENTS, *[e for e in EVENTS if e["cat"] == "kernel"]]),
    "no base": kineto(EVENTS, baseTimeNanoseconds=0),
    "negative times": changed(ts=lambda ts: ts - 5000),
    "times as text": changed(ts=str),
    "nan": kineto(EVENTS).replace(b'"device": 0', b'"device": 0, "occupancy": nan'),
    "events of nobody": kineto(
        [*EVENTS, {"ph": "X", "cat": "new", "name": "x", "ts": 5}]
    ),
    "kernel without time": kineto(
        [*EVENTS, {"ph": "X", "cat": "kernel", "name": "x", "ts": 1100, "dur": 0}]
    ),
    "kernel far away": kineto(
        [*EVENTS, {"ph": "X", "cat": "kernel", "name": "x", "ts": -(2**51), "dur": 1}]
    ),
    "steps that descend": kineto(
        [
            {**e, "name": re.sub(r"#(\d)$", lambda m: f"#{9 - int(m[1])}", e["name"])}
            for e in EVENTS
        ]
    ),
}


@pytest.mark.parametrize("variation", KINETO_VARIATIONS)
def test_import__reads_kineto_in_every_variation(
    tmp_path: Path, variation: str
) -> None:
    plain = outcome(tmp_path, kineto(EVENTS), device_figures)
    assert plain[0] == 6
    assert outcome(tmp_path, KINETO_VARIATIONS[variation], device_figures) == plain


# -- Nsight Systems

Change = Callable[[sqlite3.Connection], object]


def sql(*statements: str) -> Change:
    return lambda database: [database.execute(text) for text in statements]


KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
NSYS_VARIATIONS: dict[str, Change] = {
    "reversed": sql(
        f"CREATE TABLE k AS SELECT * FROM {KERNELS} ORDER BY start DESC",
        f"DELETE FROM {KERNELS}",
        f"INSERT INTO {KERNELS} SELECT * FROM k",
        "DROP TABLE k",
    ),
    "more columns": sql(f"ALTER TABLE {KERNELS} ADD COLUMN registers INTEGER"),
    "a view": sql(f"CREATE VIEW evil AS SELECT * FROM {KERNELS}"),
    "no session": sql("DROP TABLE TARGET_INFO_SESSION_START_TIME"),
    "no memory": sql("DROP TABLE CUDA_GPU_MEMORY_USAGE_EVENTS"),
    "no gpus": sql("DROP TABLE TARGET_INFO_GPU"),
    "ends before": sql(
        f"INSERT INTO {KERNELS} SELECT start, start - 9, deviceId, contextId, streamId,"
        f" 0, globalPid, demangledName, shortName, gridX FROM {KERNELS} LIMIT 1"
    ),
    "no length": sql(
        f"INSERT INTO {KERNELS} SELECT start, start, deviceId, contextId, streamId,"
        f" 0, globalPid, demangledName, shortName, gridX FROM {KERNELS} LIMIT 1"
    ),
    "negative start": sql(
        f"INSERT INTO {KERNELS} SELECT -5, 9, deviceId, contextId, streamId,"
        f" 0, globalPid, demangledName, shortName, gridX FROM {KERNELS} LIMIT 1"
    ),
    "huge device": sql(
        f"INSERT INTO {KERNELS} SELECT start, end, 99999, contextId, streamId,"
        f" 0, globalPid, demangledName, shortName, gridX FROM {KERNELS} LIMIT 1"
    ),
    "other tables": sql("CREATE TABLE OSRT_API (start INTEGER, end INTEGER)"),
    "an index": sql(f"CREATE INDEX i ON {KERNELS} (start)"),
}


@pytest.mark.parametrize("variation", NSYS_VARIATIONS)
def test_import__reads_nsys_in_every_variation(tmp_path: Path, variation: str) -> None:
    plain = training(tmp_path / "plain.sqlite", 4).write()
    expected = outcome(tmp_path, plain.read_bytes(), device_figures)
    with sqlite3.connect(plain) as database:
        NSYS_VARIATIONS[variation](database)
    database.close()
    assert outcome(tmp_path, plain.read_bytes(), device_figures) == expected


# -- snapshots of memory


def snapshot(**changes: Any) -> dict[str, Any]:
    blocks = [{"size": MIB, "requested_size": MIB, "state": "active_allocated"}]
    segment = {"device": 0, "address": 1 << 40, "total_size": MIB, "blocks": blocks}
    events = [
        {
            "action": action,
            "addr": addr,
            "size": MIB,
            "time_us": 1_790_857_026_000_000 + n,
        }
        for addr in (1 << 41, 1 << 42)
        for n, action in enumerate(("alloc", "free_requested", "free_completed"))
    ]
    return {"segments": [segment], "device_traces": [events], **changes}


def with_events(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    own = snapshot()
    for event in own["device_traces"][0]:
        change(event)
    return own


def requested(trace: Trace) -> Any:
    rows = trace.memory(0)
    sizes = rows.loc[rows["pool"] == "requested", "bytes"]
    return int(sizes.max()), int(sizes.iloc[-1]), len(trace.allocations(0))


EARLY = {
    "action": "free_completed",
    "addr": 7,
    "size": 9 * MIB,
    "time_us": 1_790_857_025_000_000,
}
SNAPSHOT_VARIATIONS: dict[str, bytes] = {
    **{f"protocol {n}": pickle.dumps(snapshot(), n) for n in range(2, 6)},
    "packed": gzip.compress(pickle.dumps(snapshot())),
    "frames": pickle.dumps(with_events(lambda event: event.update(frames=[]))),
    "streams": pickle.dumps(with_events(lambda event: event.update(stream=5))),
    "actions of nobody": pickle.dumps(
        snapshot(
            device_traces=[[*snapshot()["device_traces"][0], {**EARLY, "action": "x"}]]
        )
    ),
    "freed before": pickle.dumps(
        snapshot(device_traces=[[EARLY, *snapshot()["device_traces"][0]]])
    ),
    "empty devices": pickle.dumps(
        snapshot(device_traces=[*snapshot()["device_traces"], [], []])
    ),
    "annotations": pickle.dumps(snapshot(external_annotations=[])),
    "settings": pickle.dumps(
        snapshot(allocator_settings={"expandable_segments": True})
    ),
}


@pytest.mark.parametrize("variation", SNAPSHOT_VARIATIONS)
def test_import__reads_snapshots_in_every_variation(
    tmp_path: Path, variation: str
) -> None:
    plain = outcome(tmp_path, pickle.dumps(snapshot()), requested)
    assert plain == (2 * MIB, MIB, 3)
    assert outcome(tmp_path, SNAPSHOT_VARIATIONS[variation], requested) == plain


@pytest.mark.slow
@pytest.mark.parametrize("share", np.linspace(0.02, 0.98, 12).round(2).tolist())
@pytest.mark.parametrize("kind", [*TEXTS, "kineto", "snapshot"])
def test_import__reads_or_refuses_cut_files(
    tmp_path: Path, kind: str, share: float
) -> None:
    binary = {"kineto": kineto(EVENTS), "snapshot": pickle.dumps(snapshot())}
    data = binary.get(kind) or joined(TEXTS[kind][0])
    varied = outcome(tmp_path, data[: int(len(data) * share)], lambda _: "trace")
    assert varied in ("trace", "refused")

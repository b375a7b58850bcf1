"""Kineto traces for tests: real traces of small CPU jobs, and made traces of what needs
a GPU."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ebbtide.features.importers.kineto.importer import KinetoImporter, read_trace
from ebbtide.features.importers.source import Source
from ebbtide.profiler.trace import Trace, TraceBuilder

Event = dict[str, Any]
BASE = 1_790_857_026_000_000_000


def profiled(
    path: Path,
    steps: int,
    step: Callable[[int], None],
    mark: bool = True,
    **options: Any,
) -> Path:
    """Profile `step(0)`, `step(1)`, ... and write the trace of all but the first two.
    mark: call prof.step()."""
    when = schedule(wait=1, warmup=1, active=steps - 2, repeat=1) if mark else None
    if not mark:
        step(0)
        step(1)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=when, **options
    ) as profiler:
        for number in range(0 if mark else 2, steps):
            step(number)
            if mark:
                profiler.step()
    profiler.export_chrome_trace(str(path))
    return path


class Job:
    """A small model and its optimizer."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def forward(self) -> torch.Tensor:
        return torch.nn.functional.mse_loss(
            self.model(torch.randn(8, 16)), torch.zeros(8, 4)
        )

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@lru_cache(maxsize=4)
def events(path: Path) -> list[Event]:
    """Return all events of a trace, read by the standard library, with start and end in
    ns after the base."""
    raw = (
        gzip.decompress(path.read_bytes())
        if path.suffix == ".gz"
        else path.read_bytes()
    )
    trace_events: list[Event] = json.loads(raw, parse_float=Decimal)["traceEvents"]
    for event in trace_events:
        event["start"] = int(event.get("ts", 0) * 1000)
        event["end"] = event["start"] + int(event.get("dur", 0) * 1000)
    return trace_events


def base(path: Path) -> int:
    return int(json.loads(path.read_text())["baseTimeNanoseconds"])


def named(path: Path, name: str) -> list[Event]:
    return sorted(
        (event for event in events(path) if event.get("name") == name),
        key=lambda event: event["start"],
    )


def import_files(*paths: Path) -> Trace:
    builder = TraceBuilder("imported")
    for number, path in enumerate(paths):
        source = Source(path)
        assert KinetoImporter().matches(source)
        read_trace(source, builder, number)
    trace = builder.build()
    for rank in trace.ranks:
        in_order(trace.phases(rank))
    return trace


def in_order(phases: pd.DataFrame) -> None:
    """No phase overlaps another, neither on the host nor on the device."""
    on_device = phases[phases["gpu_start_ns"].notna()]
    for rows, where in ((phases, ""), (on_device, "gpu_")):
        start, end = rows[f"{where}start_ns"].tolist(), rows[f"{where}end_ns"].tolist()
        assert all(a <= b for a, b in zip(start, end, strict=True))
        assert all(a <= b for a, b in zip(end, start[1:], strict=False))


def shape(phases: pd.DataFrame) -> dict[int, str]:
    """Return the phases of each iteration by their first letters: {3: "fbu"}."""
    letters = phases["phase"].str[0].groupby(phases["iteration"]).agg("".join)
    return {int(iteration): letters[iteration] for iteration in letters.index}


# -- made traces
# -------------------------------------------------------------------------------------------------------


def write_trace(path: Path, events: Iterable[Event], **meta: Any) -> Path:
    head = {"schemaVersion": 1, "baseTimeNanoseconds": BASE, **meta}
    text = json.dumps({**head, "traceEvents": list(events)})
    path.write_bytes(
        gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode()
    )
    return path


def span(
    name: str, ts: float, end: float, cat: str = "user_annotation", **args: Any
) -> Event:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": ts,
        "dur": round(end - ts, 3),
        "args": args,
    }


def launched(
    launch_ts: float,
    ts: float,
    end: float,
    correlation: int,
    stream: int = 7,
    **fields: Any,
) -> list[Event]:
    """Return work on the GPU and the call that launched it. fields: cat, name, device,
    bytes."""
    fields = {"cat": "kernel", "name": "gemm", "device": 0, **fields}
    cat, name = fields.pop("cat"), fields.pop("name")
    return [
        span(
            "cudaLaunchKernel",
            launch_ts,
            launch_ts + 0.5,
            "cuda_runtime",
            correlation=correlation,
        ),
        span(name, ts, end, cat, correlation=correlation, stream=stream, **fields),
    ]


def memory_event(
    ts: float, allocated: int, reserved: int = 0, type: int = 1, device: int = 0
) -> Event:
    args = {
        "Total Allocated": allocated,
        "Total Reserved": reserved,
        "Device Type": type,
        "Device Id": device,
    }
    return {
        "ph": "i",
        "s": "t",
        "cat": "cpu_instant_event",
        "name": "[memory]",
        "ts": ts,
        "args": args,
    }


def iteration(number: int, ts: float) -> list[Event]:
    """Return a marked iteration of 100 us: forward 10 to 30, backward 40 to 70, update
    80 to 90."""
    return [
        span(f"ProfilerStep#{number}", ts, ts + 100),
        span("forward", ts + 10, ts + 30),
        span("backward", ts + 40, ts + 70),
        span("Optimizer.step#AdamW.step", ts + 80, ts + 90),
    ]

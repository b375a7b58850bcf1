"""Compare `ebbtide summary --by activity` with a direct count and with
HolisticTraceAnalysis (HTA).

    python benchmarks/activity.py --hta-python PATH FILE...

PATH is the Python of an environment with HTA. Each file is a torch.profiler trace, or a
folder of them. The direct count goes through the events in the order of time, and
shares no code with ebbtide. HTA counts other events: where it differs, a second direct
count applies HTA's own rules to show that they are the cause. These are: an event
counts if it has a stream (annotations and waits included), times with fractions are
rounded inwards to microseconds, kernels launched after the last ProfilerStep are left
out, and only names that begin with "nccl" are communication.

Differences are in percent of the span, from the first start to the last end of work on
the GPU. Prints Markdown.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tables import machine_line, table

Event = dict[str, Any]
Interval = tuple[float, float]

# Prints what HTA computes of one trace: microseconds and percent.
HTA = """
import json, logging, sys, warnings
logging.disable(logging.CRITICAL); warnings.filterwarnings("ignore")
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/", include_last_profiler_step=True)
breakdown = analysis.get_temporal_breakdown(visualize=False).iloc[0]
figures = {key: float(breakdown[f"{key}_time(us)"]) for key in ("idle", "compute", "kernel")}
try:
    overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]
    figures["overlap_percent"] = float(overlap["comp_comm_overlap_pctg"])
except Exception:
    figures["overlap_percent"] = None
kernels = analysis.get_gpu_kernel_breakdown(visualize=False, num_kernels=10**6, duration_ratio=1.0)[1]
figures["kernels"] = kernels.groupby("name")["sum (us)"].sum().to_dict()
print(json.dumps(figures))
"""
HTA_VERSION = (
    "from importlib.metadata import version; print(version('HolisticTraceAnalysis'))"
)

KERNELS, COPIES, MEMSETS = (
    ("kernel", "Kernel"),
    ("gpu_memcpy", "Memcpy"),
    ("gpu_memset", "Memset"),
)
CALLS = ("cuda_runtime", "cuda_driver", "Runtime")


class Figures(NamedTuple):
    """Times in us; None where the trace has no communication, or a tool does not give
    the figure."""

    span: float
    compute: float
    idle: float
    overlap: float | None
    top_kernel: float


def union(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    length, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


def count(work: Sequence[tuple[Interval, str, str]]) -> Figures:
    """Count work given as (interval, kind, name)."""
    every = [interval for interval, _, _ in work]
    compute = [interval for interval, kind, _ in work if kind == "compute"]
    communication = [interval for interval, kind, _ in work if kind == "communication"]
    span = max(end for _, end in every) - min(start for start, _ in every)
    both = union(compute) + union(communication) - union([*compute, *communication])
    by_name: Counter[str] = Counter()
    for (start, end), kind, name in work:
        if kind in ("compute", "communication"):
            by_name[name] += end - start  # type: ignore[assignment]
    top = max(by_name.values(), default=0.0)
    return Figures(
        span, union(compute), span - union(every), both if communication else None, top
    )


def interval_of(event: Event) -> Interval:
    start = float(event["ts"])
    return start, start + float(event.get("dur", 0))


def work_of(events: Sequence[Event]) -> list[tuple[Interval, str, str]]:
    """Return the work of the GPU that is busy longest, each event once, by the rules of
    docs/activity.md."""
    kinds = (
        dict.fromkeys(KERNELS, "compute")
        | dict.fromkeys(COPIES, "copy")
        | dict.fromkeys(MEMSETS, "memset")
    )
    of_device: dict[Any, set[tuple[Interval, str, str, Any, Any]]] = {}
    for event in events:
        kind = kinds.get(event.get("cat", ""))
        if kind is None or "ts" not in event:
            continue
        name, args = event["name"], event.get("args", {})
        if kind == "compute" and ("nccl" in name.lower() or "rccl" in name.lower()):
            kind = "communication"
        row = (
            interval_of(event),
            kind,
            name,
            args.get("stream"),
            args.get("correlation"),
        )
        of_device.setdefault(args.get("device"), set()).add(row)
    busiest = max(
        of_device.values(),
        key=lambda rows: sum(end - start for (start, end), *_ in rows),
    )
    return [row[:3] for row in busiest]


def work_by_hta(events: Sequence[Event]) -> list[tuple[Interval, str, str]]:
    """Return the work that HTA 0.5 counts, as it counts it."""
    timed = [
        event
        for event in events
        if "dur" in event and event.get("cat") not in (None, "Trace")
    ]
    fractions = any(isinstance(event["ts"], float) for event in timed)
    steps = [
        event
        for event in timed
        if "ProfilerStep" in event["name"] and "stream" not in event.get("args", {})
    ]
    launched: set[Any] | None = None
    if len({event["name"] for event in steps}) > 1:
        last = max(interval_of(event)[1] for event in steps)
        launches = [
            event
            for event in timed
            if "stream" not in event.get("args", {}) and event["ts"] <= last
        ]
        launched = {event.get("args", {}).get("correlation", -1) for event in launches}
    work = []
    for event in timed:
        args, name = event.get("args", {}), event["name"]
        if not isinstance(args.get("stream"), int) or args["stream"] < 0:
            continue
        if launched is not None and args.get("correlation", -1) not in launched:
            continue
        start, end = interval_of(event)
        if fractions:
            start, end = math.ceil(start), math.floor(end)
        if name.startswith("nccl") and "Kernel" in name:
            kind = "communication"
        elif (
            name.startswith(("Memcpy", "Memset", "dma"))
            or "Memcpy" in name
            or "Sync" in name
        ):
            kind = "other"
        else:
            kind = "compute"
        work.append(((start, max(start, end)), kind, name))
    return work


def read(file: Path) -> list[Event]:
    raw = file.read_bytes()
    trace = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    events = trace.get("traceEvents", []) if isinstance(trace, dict) else trace
    return [event for event in events if isinstance(event, dict)]


def by_ebbtide(file: Path) -> Figures | None:
    """Run `ebbtide import` and `ebbtide summary --by activity`. Return None where no
    kernels were recorded."""
    command = [sys.executable, "-m", "ebbtide"]
    with tempfile.TemporaryDirectory() as folder:
        trace = str(Path(folder) / "run.ebb")
        subprocess.run(
            [*command, "import", "-o", trace, str(file)],
            check=True,
            capture_output=True,
        )
        activity = json.loads(
            subprocess.run(
                [*command, "summary", trace, "--by", "activity", "--json"],
                check=True,
                capture_output=True,
            ).stdout
        )
    total = activity["total"]
    if total["span_ms"] is None:
        return None
    share = total["communication_overlap_share"]
    overlap = None if share is None else 1e3 * share * total["communication_ms"]
    top = 1e3 * max((kernel["time_ms"] for kernel in activity["kernels"]), default=0.0)
    return Figures(
        1e3 * total["span_ms"],
        1e3 * total["compute_ms"],
        1e3 * total["idle_ms"],
        overlap,
        top,
    )


def by_hta(file: Path, python: str, communication: float) -> Figures | str:
    """Run HTA. Return its error where it fails.

    Args:
        file: The trace.
        python: The Python of its environment.
        communication: The time of communication, of which HTA gives the share that
            overlaps, us.
    """
    run = subprocess.run(
        [python, "-c", HTA, str(file.resolve())],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        return run.stderr.strip().splitlines()[-1][:60]
    figures = json.loads(run.stdout.splitlines()[-1])
    percent = figures["overlap_percent"]
    overlap = (
        None if percent is None or not communication else percent / 100 * communication
    )
    top = max(figures["kernels"].values(), default=0.0)
    return Figures(figures["kernel"], figures["compute"], figures["idle"], overlap, top)


def difference(first: Figures, second: Figures) -> str:
    """Return the largest difference of two tools, in percent of the span."""
    pairs = [
        (a, b)
        for a, b in zip(first, second, strict=True)
        if a is not None and b is not None
    ]
    return f"{100 * max(abs(a - b) for a, b in pairs) / second.span:.3f}"


def row(file: Path, hta_python: str) -> list[str] | None:
    events = read(file)
    if not any(event.get("cat") in KERNELS and "ts" in event for event in events):
        return None
    counted = count(work_of(events))
    hta_work = work_by_hta(events)
    communication = union(
        interval for interval, kind, _ in hta_work if kind == "communication"
    )
    ours, theirs = by_ebbtide(file), by_hta(file, hta_python, communication)
    cells = [f"`{file.name}`", f"{counted.span / 1e3:,.2f}"]
    cells.append("not known" if ours is None else difference(ours, counted))
    if isinstance(theirs, str):
        return [*cells, f"fails: {theirs}", "-"]
    return [
        *cells,
        difference(theirs, counted),
        difference(theirs, count(hta_work)) if hta_work else "-",
    ]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("files", type=Path, nargs="+", metavar="FILE")
    flags.add_argument(
        "--hta-python", required=True, help="Python of an environment with HTA"
    )
    args = flags.parse_args()
    version = subprocess.run(
        [args.hta_python, "-c", HTA_VERSION], capture_output=True, text=True, check=True
    ).stdout
    print(
        f"{time.strftime('%Y-%m-%d')}, {machine_line()}, HolisticTraceAnalysis "
        f"{version.strip()}\n"
    )
    files = [
        file
        for path in args.files
        for file in (sorted(path.glob("*.json*")) if path.is_dir() else [path])
    ]
    rows = [
        cells for file in files if (cells := row(file, args.hta_python)) is not None
    ]
    table(
        [
            "trace",
            "span, ms",
            "ebbtide - count, %",
            "HTA - count, %",
            "HTA - count by HTA's rules, %",
        ],
        rows,
    )


if __name__ == "__main__":
    main()

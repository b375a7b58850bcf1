"""Measure the import of torch.profiler traces by ebbtide, HolisticTraceAnalysis (HTA)
and TraceLens.

    python benchmarks/import.py --hta-python PATH [--tracelens-python PATH] [--rounds 5]
        [--events 3000000] FILE...

PATH is the Python of an environment with the rival. For ebbtide the whole command is
measured, up to the trace on disk; for HTA only parsing, up to its table in memory, for
TraceLens up to its tree of events. Each file is imported as it is; the first one is
also repeated, with continued steps, times and numbers, up to the given number of
events. All run in turn in their own processes. The figures are processor time and peak
resident memory of the process, and ratios within each round. Prints Markdown.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tables import machine_line, spread, table

HTA = """
import sys
from hta.common.trace import parse_trace_file
parse_trace_file(sys.argv[1])
"""
TRACELENS = """
import sys
from TraceLens import TreePerfAnalyzer
TreePerfAnalyzer.from_file(profile_filepath=sys.argv[1])
"""
VERSION = (
    "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
)
Rivals = dict[str, tuple[str, str, str]]  # Python, program and distribution by name.


def commands(file: Path, rivals: Rivals, folder: Path) -> dict[str, list[str]]:
    trace = str(folder / "run.ebb")
    own = {
        "ebbtide": [
            sys.executable,
            "-m",
            "ebbtide",
            "import",
            "--force",
            "-o",
            trace,
            str(file),
        ],
    }
    others = {
        name: [python, "-c", program, str(file)]
        for name, (python, program, _) in rivals.items()
    }
    return own | others


def cost(command: list[str]) -> tuple[float, float]:
    """Return the processor time in s and the peak resident memory in MiB of one
    run."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        error_output = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(
            f"{command[0]} failed: {error_output.decode(errors='replace')[-2000:]}"
        )
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def compare(
    file: Path, rivals: Rivals, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    costs: dict[str, list[tuple[float, float]]] = {
        name: [] for name in ("ebbtide", *rivals)
    }
    with tempfile.TemporaryDirectory() as folder:
        order = list(commands(file, rivals, Path(folder)).items())
        for number in range(rounds):
            for name, command in order if number % 2 else reversed(order):
                costs[name].append(cost(command))
                print(f"  {file.name}: {name} {costs[name][-1]}", file=sys.stderr)
    return costs


def read(file: Path) -> dict[str, Any]:
    raw = file.read_bytes()
    trace: dict[str, Any] = json.loads(
        gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    )
    return trace


def repeat(file: Path, min_events: int, target: Path) -> None:
    """Write a trace of at least `min_events` events: those of `file`, repeated at later
    and later times."""
    trace = read(file)
    events = trace.pop("traceEvents")
    with target.open("w") as out:
        out.write(json.dumps(trace)[:-1] + ', "traceEvents": [\n  ')
        for number in range(-(-min_events // len(events))):
            out.write(",\n  " * (number > 0))
            out.write(",\n  ".join(map(json.dumps, later(events, number))))
        out.write("\n]}\n")


def later(events: list[dict[str, Any]], number: int) -> Iterator[dict[str, Any]]:
    steps = [
        event for event in events if str(event.get("name")).startswith("ProfilerStep#")
    ]
    length = max(step["ts"] + step["dur"] for step in steps) - min(
        step["ts"] for step in steps
    )
    for event in events:
        shifted = {**event, "ts": event["ts"] + number * length}
        if event in steps:
            shifted["name"] = (
                f"ProfilerStep#{int(event['name'].partition('#')[2]) + number * len(steps)}"
            )
        if "id" in event:
            shifted["id"] = event["id"] + number * 10_000_000
        if "args" in event:
            ids = {
                key: event["args"].get(key, -1)
                for key in ("correlation", "External id", "Sequence number")
            }
            shifted["args"] = event["args"] | {
                key: n + number * 10_000_000 for key, n in ids.items() if n >= 0
            }
        yield shifted


def send_count(file: Path, connection: Any) -> None:
    connection.send(len(read(file)["traceEvents"]))


def count_events(file: Path) -> int:
    """Count events in another process: memory of this one would count as memory of the
    processes that it starts."""
    receiver, sender = multiprocessing.Pipe()
    process = multiprocessing.Process(target=send_count, args=(file, sender))
    process.start()
    number: int = receiver.recv()
    process.join()
    return number


def machine(rivals: Rivals) -> str:
    versions = [
        f"{name} "
        + subprocess.run(
            [python, "-c", VERSION, distribution],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for name, (python, _, distribution) in rivals.items()
    ]
    return ", ".join([machine_line(), *versions])


def row(file: Path, costs: dict[str, list[tuple[float, float]]]) -> list[str]:
    ours = costs.pop("ebbtide")
    cells = [
        f"`{file.name}`",
        f"{count_events(file):,}",
        f"{file.stat().st_size / 2**20:.1f}",
        spread([seconds for seconds, _ in ours], 2),
        spread([size for _, size in ours], 0),
    ]
    for theirs in costs.values():
        for part, digits in ((0, 1), (1, 1)):
            pairs = zip(ours, theirs, strict=True)
            cells.append(spread([b[part] / a[part] for a, b in pairs], digits))
    return cells


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("files", type=Path, nargs="+", metavar="FILE")
    flags.add_argument(
        "--hta-python", required=True, help="Python of an environment with HTA"
    )
    flags.add_argument(
        "--tracelens-python", help="Python of an environment with TraceLens"
    )
    flags.add_argument(
        "--rounds", type=int, default=5, help="runs of each tool per file"
    )
    flags.add_argument(
        "--events", type=int, default=3_000_000, help="events of the repeated file"
    )
    args = flags.parse_args()
    rivals: Rivals = {"HTA": (args.hta_python, HTA, "HolisticTraceAnalysis")}
    if args.tracelens_python:
        rivals["TraceLens"] = args.tracelens_python, TRACELENS, "TraceLens"
    print(
        f"{time.strftime('%Y-%m-%d')}, {machine(rivals)}, {args.rounds} "
        "rounds: median (minimum to maximum)\n"
    )
    header = ["trace", "events", "MiB", "ebbtide, CPU s", "ebbtide, peak MiB"]
    for name in rivals:
        header += [f"{name} / ebbtide (CPU)", f"{name} / ebbtide (memory)"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "repeated.json"
        process = multiprocessing.Process(
            target=repeat, args=(args.files[0], args.events, large)
        )
        process.start()
        process.join()
        for file in [*args.files, large]:
            rows.append(row(file, compare(file, rivals, args.rounds)))
    table(header, rows)


if __name__ == "__main__":
    main()

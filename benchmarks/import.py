"""Measure the import of torch.profiler traces by ebbtide and by HolisticTraceAnalysis
(HTA).

    python benchmarks/import.py --hta-python PATH [--rounds 5] [--events 3000000] FILE...

PATH is the Python of an environment with HTA. For ebbtide the whole command is
measured, up to the trace on disk; for HTA only parsing, up to its table in memory,
which is less than an analysis of copies takes there. Each file is imported as it is;
the first one is also repeated, with continued steps, times and numbers, up to the given
number of events. Both run in turn in their own processes. The figures are wall time and
peak resident memory of the process, and ratios within each round. Prints Markdown.
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

from tables import machine_line, spread

HTA = """
import sys
from hta.common.trace import parse_trace_file
parse_trace_file(sys.argv[1])
"""
HTA_VERSION = (
    "from importlib.metadata import version; print(version('HolisticTraceAnalysis'))"
)


def commands(file: Path, hta_python: str, folder: Path) -> dict[str, list[str]]:
    trace = str(folder / "run.ebb")
    return {
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
        "HTA": [hta_python, "-c", HTA, str(file)],
    }


def cost(command: list[str]) -> tuple[float, float]:
    """Return the wall time in s and the peak resident memory in MiB of one run."""
    begin = time.perf_counter()
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
    return time.perf_counter() - begin, usage.ru_maxrss / 1024


def compare(
    file: Path, hta_python: str, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    costs: dict[str, list[tuple[float, float]]] = {"ebbtide": [], "HTA": []}
    with tempfile.TemporaryDirectory() as folder:
        order = list(commands(file, hta_python, Path(folder)).items())
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


def machine(hta_python: str) -> str:
    hta = subprocess.run(
        [hta_python, "-c", HTA_VERSION], capture_output=True, text=True, check=True
    ).stdout.strip()
    return f"{machine_line()}, HolisticTraceAnalysis {hta}"


def row(file: Path, costs: dict[str, list[tuple[float, float]]]) -> str:
    ours, theirs = costs["ebbtide"], costs["HTA"]
    cells = [
        f"`{file.name}`",
        f"{count_events(file):,}",
        f"{file.stat().st_size / 2**20:.1f}",
        spread([seconds for seconds, _ in ours], 2),
        spread([other[0] / own[0] for own, other in zip(ours, theirs, strict=True)], 1),
        spread([size for _, size in ours], 0),
        spread([other[1] / own[1] for own, other in zip(ours, theirs, strict=True)], 1),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("files", type=Path, nargs="+", metavar="FILE")
    flags.add_argument(
        "--hta-python", required=True, help="Python of an environment with HTA"
    )
    flags.add_argument(
        "--rounds", type=int, default=5, help="runs of each tool per file"
    )
    flags.add_argument(
        "--events", type=int, default=3_000_000, help="events of the repeated file"
    )
    args = flags.parse_args()
    print(
        f"{time.strftime('%Y-%m-%d')}, {machine(args.hta_python)}, {args.rounds} "
        "rounds: median (minimum to maximum)\n"
    )
    print(
        "| trace | events | MiB | ebbtide, s | HTA / ebbtide (time) | ebbtide, peak "
        "MiB | HTA / ebbtide (memory) |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "repeated.json"
        process = multiprocessing.Process(
            target=repeat, args=(args.files[0], args.events, large)
        )
        process.start()
        process.join()
        for file in [*args.files, large]:
            print(row(file, compare(file, args.hta_python, args.rounds)), flush=True)


if __name__ == "__main__":
    main()

"""Time of a replay: planning and simulating, by policy and number of subgroups; the
default table; whole processes.

    python benchmarks/replay.py [--rounds 5] [--subgroups 100 1000 10000 100000] [--limit 60] [--policy P]...

The job of examples/workload-13b.json, divided into more and more subgroups, on a preset
machine. Times exclude the start of this process; whole commands are timed separately. A
policy that took longer than the limit (s) is not run on more subgroups. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tables import machine_line

from ebbtide.interleave.model.workload import Workload, load_workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.replay import replay
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.catalog import preset

MACHINE = "h100-80gb-sxm-published"
POLICIES = ("zero-offload", "interleaved:2", "adaptive")
JOB = load_workload(Path(__file__).parents[1] / "examples" / "workload-13b.json")
# Subgroups of the timed default table.
TABLE_SUBGROUPS = 1000


def job_of(subgroups: int) -> Workload:
    return replace(JOB, subgroup_params=math.ceil(JOB.params / subgroups))


def seconds(work: Callable[[], object], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return times


def one_policy(policy: str, subgroups: int, rounds: int) -> list[float]:
    machine = preset(MACHINE)

    def run() -> None:
        # A workload caches its subgroups, so each round gets a new one.
        job = job_of(subgroups)
        simulate(make_plan(policy, job, machine), job, machine)

    return seconds(run, rounds)


def spread(times: Sequence[float]) -> str:
    """Return median, least and most in milliseconds."""
    median, low, high = (
        1e3 * value for value in (statistics.median(times), min(times), max(times))
    )
    digits = 0 if median >= 100 else 1
    return f"{median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def policy_row(policy: str, sizes: Sequence[int], rounds: int, limit: float) -> str:
    cells: list[str] = []
    medians: list[tuple[int, float]] = []
    for size in sizes:
        if medians and medians[-1][1] > limit:
            cells.append(f"not run: {medians[-1][0]:,} took more than {limit:.0f} s")
            continue
        times = one_policy(policy, size, rounds)
        medians.append((size, statistics.median(times)))
        cells.append(spread(times))
        print(f"  {policy}, {size} subgroups: {times}", file=sys.stderr)
    return f"| `{policy}` | {' | '.join(cells)} | {growth(medians)} |"


def growth(medians: Sequence[tuple[int, float]]) -> str:
    """Return the exponent by which time grows with subgroups, between the two largest
    sizes that were run."""
    if len(medians) < 2:
        return "-"
    (small, before), (large, after) = medians[-2:]
    return f"{math.log(after / before) / math.log(large / small):.2f}"


def command_rows(rounds: int) -> list[str]:
    """Time whole processes, from start to end."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "workload.json"
        file.write_text(json.dumps(job_of(TABLE_SUBGROUPS).as_json()))
        command = [sys.executable, "-m", "ebbtide", "replay"]
        with_job = [*command, "--workload", str(file), "--machine", MACHINE, "--json"]
        one_policy_only = ["--policy", "pipelined"]
        commands = {
            "`python -c pass`": [sys.executable, "-c", "pass"],
            "`ebbtide replay --help`": [*command, "--help"],
            f"`ebbtide replay`, one policy, {TABLE_SUBGROUPS:,} subgroups": [
                *with_job,
                *one_policy_only,
            ],
            f"`ebbtide replay`, default table, {TABLE_SUBGROUPS:,} subgroups": with_job,
        }
        return [
            f"| {name}, whole process | {spread(process_seconds(argv, rounds))} |"
            for name, argv in commands.items()
        ]


def process_seconds(command: Sequence[str], rounds: int) -> list[float]:
    return seconds(
        lambda: subprocess.run(command, check=True, capture_output=True), rounds
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--subgroups", type=int, nargs="+", default=[100, 1000, 10_000, 100_000]
    )
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--policy", action="append", dest="policies")
    args = parser.parse_args()
    print(
        f"{time.strftime('%Y-%m-%d')}, {machine_line()}, {args.rounds} rounds: median "
        "(least to most) in ms\n"
    )
    sizes = sorted(args.subgroups)
    print(
        f"| plan and simulate | {' | '.join(f'{size:,} subgroups' for size in sizes)} "
        "| grows with exponent |"
    )
    print("|" + " --- |" * (len(sizes) + 2))
    for policy in args.policies or POLICIES:
        print(policy_row(policy, sizes, args.rounds, args.limit), flush=True)
    machine = preset(MACHINE)
    table = seconds(lambda: replay(job_of(TABLE_SUBGROUPS), machine), args.rounds)
    print("\n| | ms |\n| --- | --- |")
    print(
        f"| default table with its bounds, {TABLE_SUBGROUPS:,} subgroups, in process | "
        f"{spread(table)} |"
    )
    print("\n".join(command_rows(args.rounds)))


if __name__ == "__main__":
    main()

"""What a replay costs: planning and simulating, by policy and number of subgroups; the default table; starting.

    python benchmarks/replay.py [--rounds 5] [--subgroups 100 1000 10000 100000] [--limit 60] [--policy P]...

The job of examples/workload-13b.json, cut into more and more subgroups, on a machine that comes with ebbtide. Times are
of this process alone, without its start; what starting costs is measured by commands of their own. A policy that took
longer than the limit (s) is not run on more subgroups. Prints Markdown.
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
from ebbtide.interleave.replay.results import replay, workload_json
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.catalog import preset

MACHINE = "h100-80gb-sxm-published"
POLICIES = ("zero-offload", "interleaved:2", "adaptive")
JOB = load_workload(Path(__file__).parents[1] / "examples" / "workload-13b.json")
# The table is timed for so many.
TABLE = 1000


def job_of(subgroups: int) -> Workload:
    return replace(JOB, subgroup_params=math.ceil(JOB.params / subgroups))


def seconds(work: Callable[[], object], rounds: int) -> list[float]:
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return taken


def one_policy(policy: str, subgroups: int, rounds: int) -> list[float]:
    machine = preset(MACHINE)

    def run() -> None:
        # A workload keeps its subgroups once they are worked out.
        job = job_of(subgroups)
        simulate(make_plan(policy, job, machine), job, machine)

    return seconds(run, rounds)


def spread(taken: Sequence[float]) -> str:
    """Milliseconds."""
    median, low, high = (1e3 * value for value in (statistics.median(taken), min(taken), max(taken)))
    digits = 0 if median >= 100 else 1
    return f"{median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def policy_row(policy: str, sizes: Sequence[int], rounds: int, limit: float) -> str:
    cells: list[str] = []
    medians: list[tuple[int, float]] = []
    for size in sizes:
        if medians and medians[-1][1] > limit:
            cells.append(f"not run: {medians[-1][0]:,} took more than {limit:.0f} s")
            continue
        taken = one_policy(policy, size, rounds)
        medians.append((size, statistics.median(taken)))
        cells.append(spread(taken))
        print(f"  {policy}, {size} subgroups: {taken}", file=sys.stderr)
    return f"| `{policy}` | {' | '.join(cells)} | {growth(medians)} |"


def growth(medians: Sequence[tuple[int, float]]) -> str:
    """The exponent by which time grows with subgroups, between the two largest sizes that were run."""
    if len(medians) < 2:
        return "-"
    (small, before), (large, after) = medians[-2:]
    return f"{math.log(after / before) / math.log(large / small):.2f}"


def command_rows(rounds: int) -> list[str]:
    """Whole processes, from start to end."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "workload.json"
        file.write_text(json.dumps(workload_json(job_of(TABLE))))
        shown = [sys.executable, "-m", "ebbtide", "replay"]
        asked = [*shown, "--workload", str(file), "--machine", MACHINE, "--json"]
        one = ["--policy", "pipelined"]
        commands = {
            "`python -c pass`": [sys.executable, "-c", "pass"],
            "`ebbtide replay --help`": [*shown, "--help"],
            f"`ebbtide replay`, one policy, {TABLE:,} subgroups": [*asked, *one],
            f"`ebbtide replay`, default table, {TABLE:,} subgroups": asked,
        }
        return [f"| {name}, whole process | {spread(whole(command, rounds))} |" for name, command in commands.items()]


def whole(command: Sequence[str], rounds: int) -> list[float]:
    return seconds(lambda: subprocess.run(command, check=True, capture_output=True), rounds)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--subgroups", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    flags.add_argument("--limit", type=float, default=60.0)
    flags.add_argument("--policy", action="append", dest="policies")
    args = flags.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {machine_line()}, {args.rounds} rounds: median (least to most) in ms\n")
    sizes = sorted(args.subgroups)
    print(f"| plan and simulate | {' | '.join(f'{size:,} subgroups' for size in sizes)} | grows with exponent |")
    print("|" + " --- |" * (len(sizes) + 2))
    for policy in args.policies or POLICIES:
        print(policy_row(policy, sizes, args.rounds, args.limit), flush=True)
    box = preset(MACHINE)
    table = seconds(lambda: replay(job_of(TABLE), box), args.rounds)
    print("\n| | ms |\n| --- | --- |")
    print(f"| default table with its bounds, {TABLE:,} subgroups, in process | {spread(table)} |")
    print("\n".join(command_rows(args.rounds)))


if __name__ == "__main__":
    main()

"""The search for plans of `adaptive` on 200 fixed random jobs: mean iterations and CPU
times, of which two commits' are compared.

    python benchmarks/search.py BEFORE.json [--count 200] [--seed 0]
    python benchmarks/search.py AFTER.json --before BEFORE.json

Writes a line for each job, and prints Markdown: how much longer iterations are than
before, and the share of the CPU time. Free memory, clipping, overlap and sizes of
subgroups are drawn as in `adaptive.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from adaptive import random_machine, random_workload
from monotony import OVERLAPS
from tables import table

from ebbtide.interleave.model.operations import OVERLAPS as PHASES
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.bound import bound
from ebbtide.interleave.simulation.simulator import simulate_steps


class Job(NamedTuple):
    """A job, its mean iteration, compute, bound of plans of whole subgroups, and CPU
    time of the search, s."""

    number: int
    overlap: str
    subgroups: int
    rating_s: float
    compute_s: float
    bound_s: float
    cpu_s: float


def search(seed: int, number: int) -> Job:
    draw = np.random.default_rng([seed, number])
    machine = random_machine(draw)
    clipping = bool(draw.random() < 0.7)
    workload = random_workload(
        draw, clipping=clipping, uneven=bool(draw.random() < 0.5)
    )
    overlap = OVERLAPS[number % len(OVERLAPS)] if clipping else "none"
    start_s = time.process_time()
    plan = make_plan(f"adaptive,overlap={overlap}", workload, machine)
    cpu_s = time.process_time() - start_s
    return Job(
        number,
        overlap,
        len(workload.subgroups),
        simulate_steps(plan, workload, machine).rating_s,
        workload.compute_s,
        workload.compute_s + bound(workload, machine, PHASES[overlap]).exposed_whole_s,
        cpu_s,
    )


def exposed_over_bound(jobs: list[Job]) -> str:
    """Return median and 90th percentile of exposed time over the bound's, of jobs where
    that is over 1 ms."""
    ratios = [
        (job.rating_s - job.compute_s) / (job.bound_s - job.compute_s)
        for job in jobs
        if job.bound_s - job.compute_s > 1e-3
    ]
    if not ratios:
        return "-"
    return f"{np.median(ratios):.3f}, {np.percentile(ratios, 90):.3f}"


def row(overlap: str, jobs: list[Job], before: dict[int, Job]) -> list[str]:
    entries = [
        overlap,
        str(len(jobs)),
        exposed_over_bound(jobs),
        f"{sum(job.cpu_s for job in jobs):.0f}",
    ]
    pairs = [(job, before[job.number]) for job in jobs if job.number in before]
    if not pairs:
        return [*entries, "-", "-", "-"]
    losses = np.array([100 * (job.rating_s / old.rating_s - 1) for job, old in pairs])
    share = sum(job.cpu_s for job, _ in pairs) / sum(old.cpu_s for _, old in pairs)
    return [
        *entries,
        f"{losses.mean():+.3f} %",
        f"{losses.max():+.2f} %",
        f"{100 * share:.0f} %",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jobs = []
    with options.output.open("w") as lines:
        for number in range(options.count):
            jobs.append(search(options.seed, number))
            print(json.dumps(jobs[-1]._asdict()), file=lines, flush=True)
    before = {}
    if options.before:
        old = [
            Job(**json.loads(line)) for line in options.before.read_text().splitlines()
        ]
        before = {job.number: job for job in old}
    head = [
        "overlap",
        "jobs",
        "exposed/bound, median, p90",
        "CPU s",
        "longer, mean",
        "most",
        "CPU time",
    ]
    groups = {
        name: [job for job in jobs if job.overlap == name] for name in OVERLAPS
    } | {"all": jobs}
    table(head, [row(name, group, before) for name, group in groups.items() if group])


if __name__ == "__main__":
    main()

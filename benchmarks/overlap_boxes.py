"""Gains of updates beside the step over `adaptive`, simulated on four boxes, beside
those of an earlier estimate.

    python benchmarks/overlap_boxes.py

Two boxes are machines that were fitted to published runs, with 10 GB of free device
memory; two are given by their rates. Updates out of place run at the rate in place, and
clipping changes 5 % of the steps. The estimate let parameters be uploaded before it was
known whether their update is valid; the column "uploaded before" does so too, which no
plan may. Prints Markdown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tables import table

from ebbtide.interleave.model.operations import OVERLAPS
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.policies.search.best_plan import search_plan
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.interleave.simulation.bound import bound
from ebbtide.interleave.simulation.simulator import simulate_steps
from ebbtide.machines.catalog import preset
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import open_trace

TRACES = Path(__file__).resolve().parent.parent / "traces"
GB = 1e9


class EstimatedBox(NamedTuple):
    """A job on a machine.

    Attributes:
        title: The name, for people.
        workload: The job of one rank.
        machine: The rates of one rank.
        estimates: Gain over `adaptive` by overlap, of the estimate.
    """

    title: str
    workload: Workload
    machine: Machine
    estimates: dict[str, float]


def boxes() -> Iterator[EstimatedBox]:
    """Yield the boxes. A subgroup has 1e8 parameters."""
    published = (
        (
            "20B on 4 H100",
            "h100-20b-async",
            "h100-80gb-sxm-published",
            {"forward": 1.25, "backward": 1.38},
        ),
        (
            "13B on 4 A100",
            "a100-13b-async",
            "a100-40gb-published",
            {"forward": 1.23, "backward": 1.37},
        ),
    )
    for title, trace, machine, estimates in published:
        workload = replace(
            workload_of(open_trace(TRACES / f"{trace}.ebb")), gpu_free=((0.0, 10 * GB),)
        )
        yield EstimatedBox(
            title,
            workload,
            replace(preset(machine), cpu_out_of_place_share=1.0),
            estimates,
        )
    desktop = Machine(
        name="desktop",
        gpu_memory_bytes=24 * GB,
        h2d_bytes_per_s=22.5 * GB,
        d2h_bytes_per_s=22.5 * GB,
        duplex_bytes_per_s=42 * GB,
        h2d_pageable_bytes_per_s=5 * GB,
        d2h_pageable_bytes_per_s=5 * GB,
        host_memory_bytes_per_s=70 * GB,
        cpu_update_params_per_s=2.1e9,
        cpu_cast_params_per_s=5e9,
        gpu_update_params_per_s=30e9,
        step_overhead_s=0.0,
        cpu_out_of_place_share=1.0,
    )
    job = Workload(
        name="7B",
        params=7 * 10**9,
        subgroup_params=10**8,
        forward_s=1.5,
        backward_s=4.6,
        other_s=0.05,
        gpu_free=((0.0, 5 * GB),),
    )
    yield EstimatedBox(
        "7B on a desktop", job, desktop, {"forward": 1.20, "backward": 1.40}
    )
    superchip = replace(
        desktop,
        name="GH200-like",
        gpu_memory_bytes=96 * GB,
        h2d_bytes_per_s=380 * GB,
        d2h_bytes_per_s=300 * GB,
        duplex_bytes_per_s=None,
        host_memory_bytes_per_s=400 * GB,
        cpu_update_params_per_s=12e9,
        gpu_update_params_per_s=120e9,
    )
    job = replace(
        job,
        name="25B",
        params=25 * 10**9,
        forward_s=0.92,
        backward_s=2.76,
        gpu_free=((0.0, 20 * GB),),
    )
    yield EstimatedBox(
        "25B on a GH200-like box", job, superchip, {"forward": 1.21, "backward": 1.38}
    )


def with_early_uploads(plan: Plan) -> Plan:
    """Return a plan that uploads parameters when they are updated, whether the update
    is valid or not."""
    clip = next((index for index, op in enumerate(plan.ops) if op.kind == "clip"), -1)

    def early(index: int) -> bool:
        return (
            plan.ops[index].kind == "upload"
            and plan.ops[index].subgroup in plan.speculated
        )

    points = {op.subgroup: op.start for op in plan.ops if op.is_speculative}
    ops = [
        op._replace(
            start=points[op.subgroup],
            after=tuple(before for before in op.after if before != clip),
        )
        if early(index)
        else op
        for index, op in enumerate(plan.ops)
    ]
    return replace(plan, ops=tuple(ops))


def rows_of(box: EstimatedBox) -> Iterator[list[str]]:
    """Yield a row of the table for each overlap."""
    plain_s = 0.0
    for name, overlap in OVERLAPS.items():
        # Plans of earlier rows would be taken from it.
        search_plan.cache_clear()
        begin = time.perf_counter()
        plan = make_plan(f"adaptive,overlap={name}", box.workload, box.machine)
        planning_s = time.perf_counter() - begin
        steps = simulate_steps(plan, box.workload, box.machine)
        mean_s = steps.mean("iteration_s")
        plain_s = plain_s or mean_s
        least_s = bound(box.workload, box.machine, overlap).iteration_s
        estimate = box.estimates.get(name)
        uploaded_before = "-"
        if plan.speculated:
            early_s = simulate_steps(
                with_early_uploads(plan), box.workload, box.machine
            ).mean("iteration_s")
            uploaded_before = f"{plain_s / early_s:.2f}x"
        yield [
            box.title,
            f"`{name}`",
            f"{mean_s:.3f}",
            f"{least_s:.3f}",
            f"{mean_s - box.workload.compute_s:.3f}",
            f"{plain_s / mean_s:.2f}x",
            "-" if estimate is None else f"{estimate:.2f}x",
            "-"
            if estimate is None
            else f"{100 * (plain_s / mean_s / estimate - 1):+.0f} %",
            uploaded_before,
            f"{len(plan.speculated)} of {plan.subgroups}",
            f"{planning_s:.1f}",
        ]


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    head = (
        "box | overlap | iteration, s | bound, s | exposed, s | gain | estimate | "
        "difference | uploaded before"
    )
    rows = [row for box in boxes() for row in rows_of(box)]
    table([*head.split(" | "), "speculated subgroups", "planning, s"], rows)


if __name__ == "__main__":
    main()

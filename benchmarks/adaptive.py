"""Distance of `adaptive` from the bound, on random machines and workloads: its exposed
time over the bound with whole subgroups, its iteration over the bound.

    python benchmarks/adaptive.py [--count 300] [--seed 0] [--worst 0]

Rates, sizes, phases and free memory are drawn from wide ranges around machines with one
GPU of 80 GB a rank. Exposed times below 1 ms count as 1 ms. Prints Markdown; --worst
adds the cases that are farthest off.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import FreeMemorySteps, Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.bound import bound
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine

OTHERS = (
    "pipelined",
    "twin-flow:0.5",
    "twin-flow:0.8",
    "interleaved:2",
    "interleaved:3",
    "interleaved:4",
)
Draw = Callable[[float, float], float]


@dataclass(frozen=True)
class Case:
    """A random machine and workload.

    Attributes:
        number: Number of the case.
        exposed: Exposed time of `adaptive` over its bound.
        iteration: Iteration of `adaptive` over its bound.
        others: Iteration of the best other plan over that of `adaptive`.
        schedule: Schedule of `adaptive`.
        machine: The machine.
    """

    number: int
    exposed: float
    iteration: float
    others: float
    schedule: Schedule
    machine: Machine


def random_machine(draw: np.random.Generator) -> Machine:
    log_uniform = _log_uniform(draw)
    link = log_uniform(10e9, 60e9)
    return Machine(
        name="random",
        gpu_memory_bytes=80e9,
        host_memory_bytes=1e12,
        h2d_bytes_per_s=link * log_uniform(0.8, 1.2),
        d2h_bytes_per_s=link * log_uniform(0.8, 1.2),
        duplex_bytes_per_s=link * draw.uniform(1.2, 2) if draw.random() < 0.5 else None,
        h2d_pageable_bytes_per_s=log_uniform(3e9, 12e9),
        d2h_pageable_bytes_per_s=log_uniform(2e9, 10e9),
        host_memory_bytes_per_s=log_uniform(25e9, 200e9),
        cpu_update_params_per_s=log_uniform(0.3e9, 5e9),
        cpu_cast_params_per_s=log_uniform(2e9, 20e9),
        gpu_update_params_per_s=log_uniform(5e9, 80e9),
        step_overhead_s=float(draw.choice([0, 0.02, 0.07])),
    )


def random_workload(
    draw: np.random.Generator, clipping: bool = True, uneven: bool = False
) -> Workload:
    """Draw a workload. uneven: subgroups are whole tensors, so they differ by up to a
    third."""
    log_uniform = _log_uniform(draw)
    count, params = round(log_uniform(8, 200)), log_uniform(0.3e9, 10e9)
    shares = draw.uniform(0.75, 1.0, count) if uneven else np.ones(count)
    sizes = tuple(int(size) for size in params * shares / shares.sum())
    forward = log_uniform(0.1, 2)
    backward, other = forward * draw.uniform(2, 4), float(draw.choice([0, 0.05]))
    top = params * 14 * log_uniform(0.05, 1.2)
    # Activations fill the memory in the forward and are freed in the backward.
    falls = ((0.0, 1.0), (0.1, 0.7), (0.5, 0.4), (1.0, 0.2))
    rises = ((0.5, 0.5), (0.8, 0.8), (1.0, 1.0))
    free: FreeMemorySteps = ((0.0, top),)
    if draw.random() < 0.6:
        free = (
            *(
                (other * (position > 0) + forward * position, top * share)
                for position, share in falls
            ),
            *(
                (other + forward + backward * position, top * share)
                for position, share in rises
            ),
        )
    return Workload(
        name="random",
        params=sum(sizes),
        subgroup_params=max(sizes),
        sizes=sizes,
        forward_s=forward,
        backward_s=backward,
        other_s=other,
        gpu_free=free,
        h2d_busy_share=float(draw.choice([0, 0.2])),
        clipping=clipping,
    )


def _log_uniform(draw: np.random.Generator) -> Draw:
    """Return a function that draws uniformly in the logarithm."""
    return lambda low, high: float(np.exp(draw.uniform(np.log(low), np.log(high))))


def case(seed: int, number: int, clipping: bool, uneven: bool) -> Case:
    draw = np.random.default_rng([seed, number])
    machine = random_machine(draw)
    workload = random_workload(draw, clipping, uneven)
    schedule = simulate(make_plan("adaptive", workload, machine), workload, machine)
    limits = bound(workload, machine)
    others = (
        simulate(make_plan(policy, workload, machine), workload, machine)
        for policy in OTHERS
    )
    return Case(
        number,
        max(schedule.exposed_s, 1e-3) / max(limits.exposed_whole_s, 1e-3),
        schedule.iteration_s / limits.iteration_s,
        min(other.iteration_s for other in others if other.fits_device(None))
        / schedule.iteration_s,
        schedule,
        replace(machine, name=f"seed {seed}, case {number}"),
    )


def row(name: str, ratios: Iterable[float]) -> str:
    values = np.array(list(ratios))
    quantiles = (f"{np.percentile(values, share):.3f}" for share in (50, 75, 90, 100))
    within = (f"{100 * np.mean(values <= 1 + share):.0f} %" for share in (0.05, 0.10))
    return f"| {name} | {' | '.join([*quantiles, *within])} |"


def worst_row(worst: Case) -> str:
    workload, plan = worst.schedule.workload, worst.schedule.plan
    clipping = "on" if workload.clipping else "off"
    description = (
        f"{len(workload.subgroups)} subgroups, clipping {clipping}, {plan.remark}"
    )
    return (
        f"| {worst.number} | {worst.exposed:.3f} | {worst.iteration:.3f} | "
        f"{worst.others:.2f} | {description} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--worst",
        type=int,
        default=0,
        help="print so many of the cases farthest from the bound (default: 0)",
    )
    options = parser.parse_args()
    kinds = {
        "gradients clipped, even subgroups": (True, False),
        "gradients clipped, uneven subgroups": (True, True),
        "no clipping, even subgroups": (False, False),
    }
    print(f"{options.count} random machines and workloads each, seed {options.seed}.\n")
    print(
        "| over | median | p75 | p90 | max | within 5 % | within 10 % |\n|"
        + " --- |" * 7
    )
    farthest = {}
    for name, (clipping, uneven) in kinds.items():
        cases = [
            case(options.seed, number, clipping, uneven)
            for number in range(options.count)
        ]
        print(
            row(
                f"{name}: exposed, its bound with whole subgroups",
                (c.exposed for c in cases),
            )
        )
        print(row(f"{name}: iteration, its bound", (c.iteration for c in cases)))
        print(
            row(
                f"{name}: iteration, that of the best other policy",
                (1 / c.others for c in cases),
            )
        )
        farthest[name] = sorted(cases, key=lambda c: c.exposed, reverse=True)[
            : options.worst
        ]
    for name, cases in farthest.items():
        if cases:
            print(
                f"\nFarthest, {name}:\n\n| case | exposed | iteration | others | |\n| "
                "--- | --- | --- | --- | --- |"
            )
            print("\n".join(worst_row(worst) for worst in cases))


if __name__ == "__main__":
    main()

"""Whether a slower machine ever gets a better plan of `adaptive`: random machines, and
the same with one rate lower.

    python benchmarks/monotony.py [--first 0] [--count 500] [--seed 0]

Prints Markdown, see docs/validation.md. A pair counts as a violation where the slower
machine's iteration is more than 0.5 % shorter. It is the search's where the slower
machine's plan is faster than the own one on the faster machine too: the search missed
it. Otherwise it is the model's: on the faster machine that plan takes longer, or does
not fit.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from adaptive import random_machine, random_workload
from tables import table

from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate_steps

RATES = (
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "duplex_bytes_per_s",
    "host_memory_bytes_per_s",
    "cpu_update_params_per_s",
    "gpu_update_params_per_s",
)
OVERLAPS = ("none", "forward", "backward", "both")
TOLERANCE = 0.005


class Pair(NamedTuple):
    """A machine and a slower one. Times are iterations over that of the faster
    machine's plan."""

    number: int
    overlap: str
    rate: str
    slower: float
    # The slower machine's plan on the faster machine; infinite if it does not fit.
    slower_plan_on_faster: float

    @property
    def is_of_search(self) -> bool:
        return self.slower_plan_on_faster < 1


def pair(seed: int, number: int) -> Pair:
    draw = np.random.default_rng([seed, number])
    machine = random_machine(draw)
    workload = random_workload(
        draw, clipping=bool(draw.random() < 0.7), uneven=bool(draw.random() < 0.5)
    )
    overlap = (
        OVERLAPS[int(draw.integers(len(OVERLAPS)))] if workload.clipping else "none"
    )
    rate = str(draw.choice([key for key in RATES if getattr(machine, key) is not None]))
    slower = replace(
        machine, **{rate: getattr(machine, rate) * draw.uniform(0.3, 0.95)}
    )
    own, other = (
        make_plan(f"adaptive,overlap={overlap}", workload, one)
        for one in (machine, slower)
    )
    own_s, other_s = (
        simulate_steps(plan, workload, one).iteration_s
        for plan, one in ((own, machine), (other, slower))
    )
    if rate == "cpu_update_params_per_s":
        # A plan may use fewer threads.
        other = replace(
            other,
            cpu_share=other.cpu_share * getattr(slower, rate) / getattr(machine, rate),
        )
    exceeds_device, exceeds_host, moved_s = simulate_steps(
        other, workload, machine
    ).cost(machine)
    moved = float("inf") if exceeds_device or exceeds_host else moved_s / own_s
    return Pair(number, overlap, rate, other_s / own_s, moved)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first pair (default: 0)"
    )
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.count)
    violations = [
        one
        for number in numbers
        if (one := pair(options.seed, number)).slower < 1 - TOLERANCE
    ]
    first = f"{options.count} pairs from {options.first}, seed {options.seed}"
    of_search = sum(one.is_of_search for one in violations)
    print(
        f"{first}: {len(violations)} slower machines have a better plan, {of_search} "
        "of them by the search.\n"
    )
    rows = [
        [
            str(one.number),
            one.overlap,
            one.rate,
            f"{100 * (1 - one.slower):.1f} %",
            f"{100 * (one.slower_plan_on_faster - 1):+.1f} %",
            "search" if one.is_of_search else "model",
        ]
        for one in violations
    ]
    table(
        [
            "pair",
            "overlap",
            "lower rate",
            "shorter by",
            "its plan on the faster machine",
            "cause",
        ],
        rows,
    )


if __name__ == "__main__":
    main()

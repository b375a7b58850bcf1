"""Whether a slower machine ever gets a better plan of `adaptive`: random machines, and the same with one rate lower.

    python benchmarks/monotony.py [--first 0] [--count 500] [--seed 0]

Prints Markdown, see docs/validation.md. A pair counts as a violation where the slower machine's iteration is more than
0.5 % shorter.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

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


def pair(seed: int, number: int) -> tuple[str, str, float]:
    """Return the overlap and the rate of a pair, and the slower machine's iteration over that of the faster one."""
    draw = np.random.default_rng([seed, number])
    machine = random_machine(draw)
    workload = random_workload(draw, clipping=bool(draw.random() < 0.7), uneven=bool(draw.random() < 0.5))
    overlap = OVERLAPS[int(draw.integers(len(OVERLAPS)))] if workload.clipping else "none"
    rate = str(draw.choice([key for key in RATES if getattr(machine, key) is not None]))
    slower = replace(machine, **{rate: getattr(machine, rate) * draw.uniform(0.3, 0.95)})
    policy = f"adaptive,overlap={overlap}"
    times = [simulate_steps(make_plan(policy, workload, m), workload, m).iteration_s for m in (machine, slower)]
    return overlap, rate, times[1] / times[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first pair (default: 0)")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.count)
    pairs = [(number, *pair(options.seed, number)) for number in numbers]
    violations = [entry for entry in pairs if entry[-1] < 1 - TOLERANCE]
    first = f"{options.count} pairs from {options.first}, seed {options.seed}"
    print(f"{first}: {len(violations)} slower machines have a better plan.\n")
    rows = [[str(number), overlap, rate, f"{100 * (1 - ratio):.1f} %"] for number, overlap, rate, ratio in violations]
    table(["pair", "overlap", "lower rate", "shorter by"], rows)


if __name__ == "__main__":
    main()

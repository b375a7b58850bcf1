"""Compare the search for the choice of each layer with all choices, and measure how
long it takes.

    PYTHONPATH=. python benchmarks/layer_choices.py choices [--all] | time

`choices` prints for random jobs of three to five layers, by their number: jobs that
fit, those whose iteration is at most 5 % longer than with the best choice, and the
largest excess. All choices are those of weights and activations of each layer, each
with one and two slots; see `_best_cost` for those that are known not to be the best.
The search may compare all choices of a small job, which `--all` lets it do. Takes a
quarter of an hour. `time` prints the CPU seconds of plans for 100 layers and 8 chunks,
by what the device has free, and for 24 layers.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from ebbtide.features.layers import layer_choice
from ebbtide.interleave.model.workload import Workload, workload_from
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate_steps
from ebbtide.machines.catalog import preset
from tests.features.layers.test_policy import compare_with_all_choices

JOBS = {3: 140, 4: 50, 5: 10}
CLOSE = 0.05
# Layers, chunks, and bytes of free device memory.
TIMED = (
    *((100, 8, free) for free in (40e9, 60e9, 100e9, 200e9, 400e9)),
    (24, 1, 20e9),
    (24, 1, 60e9),
)


def compare_choices() -> None:
    """Print how near the search comes to the best choices."""
    for layers, count in JOBS.items():
        losses = compare_with_all_choices(count, 100 + layers, layers)
        close = sum(loss <= CLOSE for loss in losses)
        print(
            f"{layers} layers: {len(losses)} jobs, {close} within 5 %, at most "
            f"{100 * max(losses):.1f} %",
            flush=True,
        )


def uniform(layers: int, chunks: int, free: float) -> Workload:
    """Return a workload of layers that are alike, of 220 M parameters and 4 GB of
    activations."""
    layer = {
        "params": 2.2e8,
        "forward_s": 0.027,
        "backward_s": 0.054,
        "activation_bytes": 4e9,
        "recompute_s": 0.027,
    }
    sums = {
        "params": 2.2e8 * layers + 1e9,
        "forward_s": 0.028 * layers,
        "backward_s": 0.057 * layers,
    }
    return workload_from(
        {**sums, "gpu_free_bytes": free, "chunks": chunks, "layers": [layer] * layers},
        "uniform",
    )


def measure_time() -> None:
    """Print the CPU seconds of plans, and their iterations."""
    machine = replace(preset("h100-80gb"), host_memory_bytes=1e12)
    for layers, chunks, free in TIMED:
        workload = uniform(layers, chunks, free)
        start_s = time.process_time()
        plan = make_plan("adaptive,weights=auto,activations=auto", workload, machine)
        taken_s = time.process_time() - start_s
        iteration_s = simulate_steps(plan, workload, machine).iteration_s
        print(
            f"{layers} layers x {chunks}, {free / 1e9:.0f} GB: {taken_s:.1f} s for "
            f"{iteration_s:.3f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["choices", "time"])
    parser.add_argument(
        "--all",
        action="store_true",
        help="let the search compare all choices where they are few",
    )
    args = parser.parse_args()
    if not args.all:
        layer_choice._EXACT_CHOICES = 0
    (compare_choices if args.part == "choices" else measure_time)()


if __name__ == "__main__":
    main()

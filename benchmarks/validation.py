"""How right the simulator is against measurement: published training runs, some fitted, the others predicted.

    python benchmarks/validation.py

The runs are those of the authors of Deep Optimizer States (Middleware '24) in `traces/`. Prints Markdown, see
docs/validation.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from gains import gains, speed_up
from published import Job, jobs, of
from tables import machine_line, percent, table

GB = 1e9


def mean_and_largest(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"mean {100 * sum(sizes) / len(sizes):.1f} %, largest {100 * max(sizes):.1f} %"


def predictions(job: Job) -> None:
    box = job.fit(job.fitted).machine
    rows = []
    errors: dict[str, list[float]] = {"update": [], "iteration": [], "update left out": [], "iteration left out": []}
    for name, run in job.runs.items():
        without = job.fit(other for other in job.runs if other != name).machine
        cells = []
        for kind, machine in (("", box), (" left out", without)):
            found = of(run.sample, machine)
            if kind or name not in job.fitted:
                errors[f"update{kind}"].append(found.update_s / run.sample.update_s - 1)
                errors[f"iteration{kind}"].append(found.iteration_s / run.iteration_s - 1)
            cells += [f"{found.update_s:.3f}", percent(found.update_s, run.sample.update_s)]
            cells += [f"{found.iteration_s:.3f}", percent(found.iteration_s, run.iteration_s)]
        fitted = "yes" if name in job.fitted else "no"
        measured = [f"{run.sample.update_s:.3f}", f"{run.iteration_s:.3f}"]
        rows.append([f"`{name}`", fitted, *measured, *cells[:4], cells[5], cells[7]])
    head = "run | fitted | update, s | iteration, s | update, simulated | error | iteration, simulated | error"
    table([*head.split(" | "), "update, left out: error", "iteration, left out: error"], rows)
    for kind, what in (("", "Runs that were not fitted"), (" left out", "Each run by a fit on all others")):
        update, iteration = errors[f"update{kind}"], errors[f"iteration{kind}"]
        print(f"{what}: update {mean_and_largest(update)}; iteration {mean_and_largest(iteration)}.\n")


def rates(job: Job) -> None:
    found = job.fit(job.runs)
    rows = []
    for key, factor in found.uncertainty.items():
        told = "no" if key in found.unidentified else "yes"
        rows.append([f"`{key}`", f"{getattr(found.machine, key):.3g}", f"{factor:.2f}", told])
    table(["rate", "value", "within a factor of", "told by the runs"], rows)


def blocking(job: Job) -> None:
    machine = job.fit(job.runs).machine
    rows = []
    for name, run in job.blocking.items():
        others = [other for other in job.blocking if other != name]
        box = job.with_blocking(machine, others or [name])
        found = of(job.blocking_sample(name), box)
        measured = run.sample.backward_s
        assert measured is not None
        rows.append(
            [
                f"`{run.sample.policy}`",
                f"{(box.d2h_pageable_bytes_per_s or 0.0) / GB:.2f}" + ("" if others else " (from this run)"),
                f"{measured:.3f}",
                f"{found.backward_s:.3f}",
                percent(found.backward_s, measured),
                f"{run.sample.update_s:.3f}",
                f"{found.update_s:.3f}",
                percent(found.update_s, run.sample.update_s),
            ]
        )
    head = "run | d2h pageable, GB/s, from the others | backward, s | simulated | error | update, s | simulated | error"
    table(head.split(" | "), rows)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.parse_args()
    h100, a100 = jobs()
    then = h100.counted_as_then()
    print(f"{time.strftime('%Y-%m-%d')}, computed on {machine_line()}.\n")
    for title, show, of_jobs in (
        ("Predicted and measured", predictions, (h100, then, a100)),
        ("What the runs tell of the machine", rates, (h100, a100)),
        ("Blocking gradients", blocking, (h100, a100)),
        ("The published speed-up, taken apart", speed_up, (h100,)),
        ("`adaptive` beside `interleaved:2`", gains, (h100, a100)),
    ):
        print(f"### {title}\n")
        for job in of_jobs:
            print(f"{job.title}:\n")
            show(job)


if __name__ == "__main__":
    main()

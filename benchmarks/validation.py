"""Accuracy of the simulator against measurements: published training runs, some fitted,
the others predicted.

    python benchmarks/validation.py

The runs are those of the authors of Deep Optimizer States (Middleware '24) in
`traces/`. Prints Markdown, see docs/validation.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from gains import gains, speed_up
from published import BLOCKING, TRACES, PublishedJob, jobs, simulated_sample
from tables import machine_line, percent, table

from ebbtide.features.calibrate.fitting.from_traces import fit
from ebbtide.features.calibrate.fitting.samples import FitSample, sample_of
from ebbtide.profiler.trace import open_trace

GB = 1e9


def mean_and_largest(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return (
        f"mean {100 * sum(sizes) / len(sizes):.1f} %, largest {100 * max(sizes):.1f} %"
    )


def predictions(job: PublishedJob) -> None:
    fitted_machine = job.fit(job.fitted).machine
    rows = []
    errors: dict[str, list[float]] = {
        "update": [],
        "iteration": [],
        "update left out": [],
        "iteration left out": [],
    }
    for name, run in job.runs.items():
        without_run = job.fit(other for other in job.runs if other != name).machine
        cells = []
        for suffix, machine in (("", fitted_machine), (" left out", without_run)):
            schedule = simulated_sample(run.sample, machine)
            if suffix or name not in job.fitted:
                errors[f"update{suffix}"].append(
                    schedule.update_s / run.sample.update_s - 1
                )
                errors[f"iteration{suffix}"].append(
                    schedule.iteration_s / run.iteration_s - 1
                )
            cells += [
                f"{schedule.update_s:.3f}",
                percent(schedule.update_s, run.sample.update_s),
            ]
            cells += [
                f"{schedule.iteration_s:.3f}",
                percent(schedule.iteration_s, run.iteration_s),
            ]
        fitted = "yes" if name in job.fitted else "no"
        measured = [f"{run.sample.update_s:.3f}", f"{run.iteration_s:.3f}"]
        rows.append([f"`{name}`", fitted, *measured, *cells[:4], cells[5], cells[7]])
    head = (
        "run | fitted | update, s | iteration, s | update, simulated | error | "
        "iteration, simulated | error"
    )
    table(
        [*head.split(" | "), "update, left out: error", "iteration, left out: error"],
        rows,
    )
    for suffix, title in (
        ("", "Runs that were not fitted"),
        (" left out", "Each run by a fit on all others"),
    ):
        update, iteration = errors[f"update{suffix}"], errors[f"iteration{suffix}"]
        print(
            f"{title}: update {mean_and_largest(update)}; iteration "
            f"{mean_and_largest(iteration)}.\n"
        )


def rates(job: PublishedJob) -> None:
    result = job.fit(job.runs)
    rows = []
    for key, factor in result.uncertainty.items():
        determined = "no" if key in result.unidentified else "yes"
        rows.append(
            [
                f"`{key}`",
                f"{getattr(result.machine, key):.3g}",
                f"{factor:.2f}",
                determined,
            ]
        )
    table(["rate", "value", "within a factor of", "determined by the runs"], rows)


def blocking(job: PublishedJob) -> None:
    asynchronous = job.fit(job.runs).machine
    rows = []
    for name, run in job.blocking.items():
        others = [other for other in job.blocking if other != name]
        machine = job.with_blocking(asynchronous, others or [name])
        schedule = simulated_sample(job.blocking_sample(name), machine)
        measured = run.sample.backward_s
        assert measured is not None
        rows.append(
            [
                f"`{run.sample.policy}`",
                f"{(machine.d2h_pageable_bytes_per_s or 0.0) / GB:.2f}"
                + ("" if others else " (from this run)"),
                f"{measured:.3f}",
                f"{schedule.backward_s:.3f}",
                percent(schedule.backward_s, measured),
                f"{run.sample.update_s:.3f}",
                f"{schedule.update_s:.3f}",
                percent(schedule.update_s, run.sample.update_s),
            ]
        )
    head = (
        "run | d2h pageable, GB/s, from the others | backward, s | simulated | error | "
        "update, s | simulated | error"
    )
    table(head.split(" | "), rows)


def ranks_on_a_host() -> None:
    """Print how runs with one and two ranks on a host predict others, and four
    ranks."""
    traces = [
        open_trace(path)
        for pattern in ("a100-ranks*", "a100-13b*")
        for path in sorted(TRACES.glob(pattern))
    ]
    samples = {
        trace.name: sample_of(trace) for trace in traces if BLOCKING not in trace.name
    }
    shared = [name for name in samples if name.startswith("a100-ranks")]
    one_rank = [name for name in shared if samples[name].ranks == 1]
    fits = {
        "fitted to one rank": one_rank,
        "fitted to one rank and `a100-ranks2-async`": [*one_rank, "a100-ranks2-async"],
        "fitted to one rank and `a100-ranks2-interleaved-6`": [
            *one_rank,
            "a100-ranks2-interleaved-6",
        ],
        "fitted to all runs of one and two": shared,
    }
    machines = [
        fit([samples[name] for name in names]).machine for names in fits.values()
    ]
    rows = []
    for name in shared:
        sample = samples[name]
        cells = [
            percent(sample.simulate(machine).update_s, sample.update_s)
            + (" (fitted)" if name in names else "")
            for names, machine in zip(fits.values(), machines, strict=True)
        ]
        rows.append([f"`{name}`", str(sample.ranks), f"{sample.update_s:.3f}", *cells])
    table(["run", "ranks", "update, s", *fits], rows)
    rows = []
    for policy in ("async", "interleaved-2", "interleaved-6"):
        four = samples[f"a100-13b-{policy}"]
        measured = [
            samples.get(f"{group}-{policy}")
            for group in ("a100-ranks1", "a100-ranks2", "a100-13b")
        ]
        rows.append(
            [
                policy,
                *(
                    "-" if sample is None else total_rate(sample, sample.update_s)
                    for sample in measured
                ),
                *(
                    total_rate(four, four.simulate(machine).update_s)
                    for machine in machines[1:]
                ),
            ]
        )
    head = [
        "",
        "1 rank",
        "2 ranks",
        "4 ranks, bound",
        *(f"4 ranks, unbound: {text}" for text in list(fits)[1:]),
    ]
    table(head, rows)


def total_rate(sample: FitSample, update_s: float) -> str:
    """Return how many parameters all ranks of a host update together, in Gparam/s."""
    return f"{(sample.ranks or 1) * sample.workload.params / update_s / GB:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    h100, a100 = jobs()
    current = h100.with_current_rounding()
    print(f"{time.strftime('%Y-%m-%d')}, computed on {machine_line()}.\n")
    for title, show, shown_jobs in (
        ("Predicted and measured", predictions, (h100, current, a100)),
        ("Rates that the runs determine", rates, (h100, a100)),
        ("Blocking gradients", blocking, (h100, a100)),
        ("The published speed-up, taken apart", speed_up, (h100,)),
        ("`adaptive` compared with `interleaved:2`", gains, (h100, a100)),
    ):
        print(f"### {title}\n")
        for job in shown_jobs:
            print(f"{job.title}:\n")
            show(job)
    print("### Ranks that share a host\n")
    ranks_on_a_host()


if __name__ == "__main__":
    main()

"""Accuracy of `ebbtide plan` against the published training runs of `traces/`: ranges,
and the order of policies.

    python benchmarks/plan_published.py

Rates are fitted to all runs of a job but the predicted one. Forward and backward are
those of another run, or of the run itself, of which then only the update is predicted.
Prints Markdown, see docs/validation.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from published import BLOCKING, TRACES
from tables import machine_line, percent, table

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.features.advise.job.sources import BatchSettings, job_of_trace
from ebbtide.features.advise.machine_plan import (
    MachinePlan,
    PlanRequest,
    plan_for_machine,
)
from ebbtide.features.calibrate.fitting.from_traces import MachineFit, fit
from ebbtide.features.calibrate.fitting.samples import FitSample, sample_of
from ebbtide.machines.catalog import preset
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import Trace, open_trace

# Iterations that differ by less than this share have no order.
TIE = 0.05
# A range is good if it is at most this wide to either side.
MAX_RANGE = 0.2


@dataclass(frozen=True)
class Run:
    """A published run."""

    trace: Trace
    sample: FitSample
    iteration_s: float

    @property
    def name(self) -> str:
        """Name of the trace."""
        return self.trace.name


@dataclass(frozen=True)
class Prediction:
    """The plan of a run, predicted from others."""

    run: Run
    plan: MachinePlan

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Low, likely and high iteration."""
        if self.plan.iteration is None:
            return math.nan, math.nan, math.nan
        likely, low, high = (value / 1e3 for value in self.plan.iteration)
        return low, likely, high

    @property
    def holds(self) -> bool:
        """Whether the range holds the measured iteration and is at most 20 % wide to
        either side."""
        low, likely, high = self.seconds
        narrow = low >= likely / (1 + MAX_RANGE) and high <= likely * (1 + MAX_RANGE)
        return narrow and low <= self.run.iteration_s <= high


def runs(prefix: str) -> list[Run]:
    """Return the runs whose names have a prefix."""
    traces = [open_trace(path) for path in sorted(TRACES.glob(f"{prefix}*.ebb"))]
    return [
        Run(trace, sample_of(trace), (summarize(trace).iteration_ms or 0.0) / 1e3)
        for trace in traces
    ]


def predictions(prefix: str, base: Machine, own_times: bool) -> Iterator[Prediction]:
    """Predict each run of a job with rates fitted to its others.

    Args:
        prefix: The prefix of the names of its traces.
        base: The machine whose sizes and GPU count, without its fitted rates.
        own_times: Whether forward and backward are those of the run itself; else they
            are those of another run.
    """
    every = runs(prefix)
    asynchronous = {run.name: run for run in every if not run.name.endswith(BLOCKING)}
    for run in every:
        others = [other for other in every if other is not run]
        result = fit([other.sample for other in others])
        machine = replace(
            result.machine,
            name=base.name,
            gpu_memory_bytes=base.gpu_memory_bytes,
            host_memory_bytes=base.host_memory_bytes,
            gpu=base.gpu,
            extra={"fit": _about(result, others)},
        )
        # The recorded backward of a blocking run waited for copies: its compute is that
        # of the asynchronous run.
        own = asynchronous[run.name.replace(BLOCKING, "-async")]
        reference = own if own_times else _reference(run, list(asynchronous.values()))
        job = job_of_trace(reference.trace, BatchSettings())
        yield Prediction(
            run,
            plan_for_machine(job, machine, PlanRequest(policies=(run.sample.policy,))),
        )


def _reference(run: Run, asynchronous: list[Run]) -> Run:
    """Return another run with as many ranks: if possible the one that offloads
    everything, without interleaving."""
    others = [
        other
        for other in asynchronous
        if other.name != run.name and other.sample.ranks == run.sample.ranks
    ]
    return next(
        (other for other in others if other.sample.policy.name == "zero-offload"),
        others[0],
    )


def _about(result: MachineFit, fitted: list[Run]) -> dict[str, Any]:
    """Return the object `fit` of a machine file."""
    return {
        "policies": {run.name: run.sample.policy.text for run in fitted},
        "residuals": result.residuals,
        "uncertainty": result.uncertainty,
    }


def wrong_order(rows: list[Prediction]) -> list[tuple[str, str]]:
    """Return the pairs of runs, measured as different, that are predicted in the other
    order."""
    wrong = []
    for first, second in combinations(rows, 2):
        measured, predicted = (
            first.run.iteration_s / second.run.iteration_s,
            first.seconds[1] / second.seconds[1],
        )
        differ = not 1 / (1 + TIE) <= measured <= 1 + TIE
        if differ and (measured > 1) != (predicted > 1):
            wrong.append((first.run.name, second.run.name))
    return wrong


def show(title: str, rows: list[Prediction]) -> None:
    print(f"{title}:\n")
    cells = []
    for row in sorted(rows, key=lambda row: row.run.iteration_s):
        low, likely, high = row.seconds
        cells.append(
            [
                f"`{row.run.name}`",
                f"{row.run.iteration_s:.2f}",
                f"{likely:.2f}",
                percent(likely, row.run.iteration_s),
                f"{low:.2f} to {high:.2f}",
                "yes" if low <= row.run.iteration_s <= high else "no",
                f"{100 * (high / likely - 1):+.0f} %",
            ]
        )
    table(
        [
            "run",
            "measured, s",
            "predicted, s",
            "error",
            "range, s",
            "holds it",
            "widest side",
        ],
        cells,
    )
    wrong = wrong_order(rows)
    holding = sum(row.holds for row in rows)
    print(
        f"Ranges of at most +-20 % that hold the measured iteration: {holding} of "
        f"{len(rows)}."
    )
    print(
        "Pairs in the wrong order: "
        f"{', '.join(f'{a} and {b}' for a, b in wrong) or 'none'}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    print(f"Computed on {machine_line()}.\n")
    for own_times, source in (
        (False, "another run"),
        (True, "the run itself, without its update"),
    ):
        print(f"### Forward and backward of {source}\n")
        everything: list[Prediction] = []
        for prefix, title, name in (
            ("h100-20b", "20B on 4 H100 80 GB", "h100-80gb-sxm-published"),
            ("a100-13b", "13B on 4 A100 40 GB", "a100-40gb-published"),
            (
                "a100-ranks",
                "13B on one and two A100 40 GB, not bound to cores",
                "a100-40gb-published",
            ),
        ):
            rows = list(predictions(prefix, preset(name), own_times))
            everything += rows
            show(title, rows)
        holding = sum(row.holds for row in everything)
        print(
            f"All: {holding} of {len(everything)} "
            f"({100 * holding / len(everything):.0f} %).\n"
        )


if __name__ == "__main__":
    main()

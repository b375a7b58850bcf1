"""The published training runs of `traces/`, as samples that a machine can be fitted
to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.features.calibrate.fitting.from_traces import MachineFit, fit
from ebbtide.features.calibrate.fitting.samples import FitSample, sample_of
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import Policy, make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import open_trace

TRACES = Path(__file__).parents[1] / "traces"
BLOCKING = "-blocking"


@dataclass(frozen=True)
class PublishedRun:
    """A published run: its sample for a fit, and its measured iteration in seconds."""

    sample: FitSample
    iteration_s: float


@dataclass(frozen=True)
class PublishedJob:
    """Runs of one job on one machine, by the name of their trace.

    Attributes:
        title: The job and its machine in words.
        runs: Runs with asynchronous gradient copies.
        blocking: Runs with blocking copies, by the name of the run that is otherwise
            the same.
        fitted: Runs from which the others are predicted.
        static: The run that offloads everything and does not interleave.
        free_known: Whether the memory of the device was recorded, and not only the
            allocator's lines of a log.
    """

    title: str
    runs: dict[str, PublishedRun]
    blocking: dict[str, PublishedRun]
    fitted: tuple[str, ...]
    static: str
    free_known: bool

    def fit(self, names: Iterable[str]) -> MachineFit:
        """Fit a machine to some of the runs."""
        return fit([self.runs[name].sample for name in names])

    def machine(self, names: Iterable[str], blocking: Iterable[str]) -> Machine:
        """Fit a machine to some of the runs, and the rate of blocking copies to some of
        the blocking runs."""
        return self.with_blocking(self.fit(names).machine, blocking)

    def interleaved(self) -> str:
        """Return the run that offloads everything and interleaves every second
        subgroup."""
        return self.static.replace("-async", "-interleaved-2")

    def blocking_sample(self, name: str) -> FitSample:
        """Return a blocking run with the compute of its asynchronous run, since the
        waiting was not recorded."""
        return replace(
            self.blocking[name].sample, workload=self.runs[name].sample.workload
        )

    def with_blocking(self, machine: Machine, names: Iterable[str]) -> Machine:
        """Fit the rate of blocking gradient copies, which asynchronous runs do not
        determine, to these runs."""
        measured = replace(machine, d2h_pageable_bytes_per_s=None)
        return fit([self.blocking_sample(name) for name in names], measured).machine

    def with_current_rounding(self) -> PublishedJob:
        """Return the job with resident subgroups chosen as a current DeepSpeed does,
        not as the one that ran (0.13)."""

        def changed(run: PublishedRun) -> PublishedRun:
            workload = replace(run.sample.workload, framework=None)
            return replace(run, sample=replace(run.sample, workload=workload))

        return replace(
            self,
            title=f"{self.title}, resident subgroups chosen as by a current DeepSpeed",
            runs={name: changed(run) for name, run in self.runs.items()},
            blocking={name: changed(run) for name, run in self.blocking.items()},
        )


def simulated(policy: Policy | str, workload: Workload, machine: Machine) -> Schedule:
    return simulate(make_plan(policy, workload, machine), workload, machine)


def simulated_sample(sample: FitSample, machine: Machine) -> Schedule:
    return simulated(sample.policy, sample.workload, machine)


def jobs() -> tuple[PublishedJob, PublishedJob]:
    """Return the job on H100 and the one on A100."""
    h100 = _job(
        "h100-20b",
        "20B on 4 H100 80 GB",
        ("h100-20b-ratio0.5-async", "h100-20b-async", "h100-20b-interleaved-2"),
        free_known=True,
    )
    a100 = _job(
        "a100-13b",
        "13B on 4 A100 40 GB",
        ("a100-13b-async", "a100-13b-interleaved-2", "a100-13b-interleaved-10"),
        free_known=False,
    )
    return h100, a100


def _job(
    prefix: str, title: str, fitted: tuple[str, ...], free_known: bool
) -> PublishedJob:
    asynchronous: dict[str, PublishedRun] = {}
    blocking: dict[str, PublishedRun] = {}
    for path in sorted(TRACES.glob(f"{prefix}*.ebb")):
        trace = open_trace(path)
        iteration_ms = summarize(trace).iteration_ms
        assert iteration_ms is not None
        run = PublishedRun(sample_of(trace), iteration_ms / 1e3)
        if trace.name.endswith(BLOCKING):
            # By the name of the run that is the same but for its asynchronous copies.
            blocking[trace.name.replace(BLOCKING, "-async")] = run
        else:
            asynchronous[trace.name] = run
    return PublishedJob(
        title, asynchronous, blocking, fitted, f"{prefix}-async", free_known
    )

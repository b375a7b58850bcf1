"""The published training runs of `traces/`, as samples that a machine can be fitted to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.interleave.calibrate.fitting.fit import Fit, Sample, fit, sample_of
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import open_trace

TRACES = Path(__file__).parents[1] / "traces"
BLOCKING = "-blocking"


@dataclass(frozen=True)
class Run:
    """A published run: what it tells a fit, and its measured iteration, s."""

    sample: Sample
    iteration_s: float


@dataclass(frozen=True)
class Job:
    """Runs of one job on one machine, by the name of their trace.

    runs: those with asynchronous gradient copies. blocking: those with blocking copies, by the name of the run that
    differs in nothing else. fitted: the runs that the others are predicted from. static: the run that offloads
    everything and interleaves nothing. free_known: whether the memory of the device was recorded, and not the
    allocator's lines of a log alone.
    """

    title: str
    runs: dict[str, Run]
    blocking: dict[str, Run]
    fitted: tuple[str, ...]
    static: str
    free_known: bool

    def fit(self, names: Iterable[str]) -> Fit:
        return fit([self.runs[name].sample for name in names])

    def machine(self, names: Iterable[str], blocking: Iterable[str]) -> Machine:
        """Fitted on these runs, and on these with blocking copies as to what the others do not tell."""
        return self.with_blocking(self.fit(names).machine, blocking)

    def interleaved(self) -> str:
        """The run that offloads everything, every second subgroup interleaved."""
        return self.static.replace("-async", "-interleaved-2")

    def blocking_sample(self, name: str) -> Sample:
        """With the compute of the run whose copies are asynchronous: what of a blocking backward is waiting is not
        recorded."""
        return replace(self.blocking[name].sample, workload=self.runs[name].sample.workload)

    def with_blocking(self, machine: Machine, names: Iterable[str]) -> Machine:
        """The machine with the rate of blocking gradient copies, which asynchronous runs do not tell, from these."""
        known = replace(machine, d2h_pageable_bytes_per_s=None)
        return fit([self.blocking_sample(name) for name in names], known).machine

    def counted_as_then(self) -> Job:
        """With residents as the DeepSpeed of these runs (0.13) chose them: of N subgroups the first int(R N) are
        on the CPU. Today's rounds to the other side."""
        title = f"{self.title}, residents counted as by DeepSpeed 0.13"
        return replace(
            self,
            title=title,
            runs={name: replace(run, sample=_then(run.sample)) for name, run in self.runs.items()},
            blocking={name: replace(run, sample=_then(run.sample)) for name, run in self.blocking.items()},
        )


def ran(policy: str, workload: Workload, machine: Machine) -> Schedule:
    return simulate(make_plan(policy, workload, machine), workload, machine)


def of(sample: Sample, machine: Machine) -> Schedule:
    return ran(sample.policy, sample.workload, machine)


def _then(sample: Sample) -> Sample:
    """The same subgroups from the other end, and the share that leaves so many of them resident."""
    sizes = sample.workload.subgroups
    found = re.search(r"(?<=[:@])0\.\d+", sample.policy)
    policy = sample.policy
    if found:
        on_cpu = int(float(found[0]) * len(sizes))
        policy = policy.replace(found[0], f"{(on_cpu - 0.5) / len(sizes):.4f}")
    return replace(sample, policy=policy, workload=replace(sample.workload, sizes=sizes[::-1]))


def jobs() -> tuple[Job, Job]:
    """The job on H100 and the one on A100."""
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


def _job(prefix: str, title: str, fitted: tuple[str, ...], free_known: bool) -> Job:
    asynchronous: dict[str, Run] = {}
    blocking: dict[str, Run] = {}
    for path in sorted(TRACES.glob(f"{prefix}*.ebb")):
        trace = open_trace(path)
        iteration_ms = summarize(trace).iteration_ms
        assert iteration_ms is not None
        run = Run(sample_of(trace), iteration_ms / 1e3)
        if trace.name.endswith(BLOCKING):
            # By the name of the run that differs only in its asynchronous copies.
            blocking[trace.name.replace(BLOCKING, "-async")] = run
        else:
            asynchronous[trace.name] = run
    return Job(title, asynchronous, blocking, fitted, f"{prefix}-async", free_known)

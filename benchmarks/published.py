"""Published training runs, as what a fit can be made of."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ebbtide.analysis.summary import summarize
from ebbtide.interleave.fit import Fit, Sample, fit, sample_of
from ebbtide.interleave.machine import Machine
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.schedule import Schedule
from ebbtide.interleave.simulate import simulate
from ebbtide.interleave.workload import Workload
from ebbtide.profiler.importers.load import Hardware, import_trace

FOLDER = Path(__file__).parents[2] / "shared" / "published" / "deep-optimizer-states"


@dataclass(frozen=True)
class Run:
    """A published run: what it tells a fit, and its measured iteration, s."""

    sample: Sample
    iteration_s: float


@dataclass(frozen=True)
class Job:
    """Runs of one job on one machine, by offloaded share and stride, `ratio1.0-gap2`; those with blocking gradient
    copies apart. fitted: what the others are predicted from. static: the run that offloads everything, without
    strides. free_known: whether the memory of the device was recorded, not the allocator's lines of a log alone."""

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
        return self.static.replace("gap0", "gap2")

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


def jobs(folder: Path, where: Path) -> tuple[Job, Job]:
    """The job on H100 and the one on A100. folder: of the published files; where: for their traces."""
    h100 = _job(
        folder / "h100-20B",
        where,
        "20B on 4 H100 80 GB",
        Hardware(link=(5, 16)),
        ("ratio0.5-gap0", "ratio1.0-gap0", "ratio1.0-gap2"),
    )
    a100 = _job(
        folder / "a100-13B",
        where,
        "13B on 4 A100 40 GB",
        Hardware(capacity_bytes=40 * 2**30, link=(4, 16)),
        ("ratio1-gap0", "ratio1-gap2", "ratio1-gap10"),
    )
    return h100, a100


def _job(folder: Path, where: Path, title: str, hardware: Hardware, fitted: tuple[str, ...]) -> Job:
    found: dict[str, dict[str, Run]] = {"0": {}, "1": {}}
    monitored = []
    for log in sorted(folder.glob("*.log")):
        monitor = log.with_name(f"{log.stem}-monitor.csv")
        monitored.append(monitor.exists())
        sources = [log, monitor] if monitor.exists() else [log]
        ratio, asynchronous, gap = re.findall(r"ratio([\d.]+)-.*flush_async(\d)-opt_gaps(\d+)", log.name)[0]
        name = f"ratio{ratio}-gap{gap}"
        trace = import_trace(sources, where / f"{log.stem}.ebb", hardware=hardware)
        iteration_ms = summarize(trace).iteration_ms
        assert iteration_ms is not None
        found[asynchronous][name] = Run(replace(sample_of(trace), name=name), iteration_ms / 1e3)
    static = next(name for name in fitted if re.fullmatch(r"ratio1(\.0)?-gap0", name))
    return Job(title, found["1"], found["0"], fitted, static, all(monitored))

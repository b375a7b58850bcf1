"""Realistic jobs without problems, to which tests add one problem at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ebbtide.analysis.findings import Finding, Findings, Rule, Unknown, find
from ebbtide.analysis.metrics.advice import Advice, IterationGain
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import Trace, TraceBuilder

MS = 10**6
GIB = 2**30
MIB = 2**20
CAPACITY = 80 * GIB
PEAK = 50e9
PARAMS = 10**9


class Job:
    """A job with equal iterations on some ranks.

    ms: lengths of `other` and the phases. slower: additional ms of a phase, by rank and
    phase. stalls: additional ms of `other`, by iteration.
    """

    def __init__(
        self,
        ranks: int = 2,
        iterations: int = 8,
        slower: dict[tuple[int, str], float] | None = None,
        stalls: dict[int, float] | None = None,
        **ms: float,
    ) -> None:
        self.builder = TraceBuilder("recorded")
        self.ms = {
            "other": 5.0,
            "forward": 100.0,
            "backward": 200.0,
            "update": 100.0,
            **ms,
        }
        self.ranks = range(ranks)
        self.begins: dict[tuple[int, str], list[int]] = {}
        start = 0
        for iteration in range(iterations):
            ends = []
            for number in self.ranks:
                rank = self.builder.rank(
                    number, world_size=ranks, first_iteration_start_ns=0, host="node"
                )
                now = start
                for phase in ("other", *PHASES):
                    self.begins.setdefault((number, phase), []).append(now)
                    stall = (
                        (stalls or {}).get(iteration, 0.0) if phase == "other" else 0.0
                    )
                    length = round(
                        (
                            self.ms[phase]
                            + (slower or {}).get((number, phase), 0.0)
                            + stall
                        )
                        * MS
                    )
                    if phase != "other":
                        rank.phase(phase, now, now + length, iteration)
                    now += length
                ends.append(now)
            # All ranks begin the next iteration together.
            start = max(ends, default=0)

    def copy(
        self,
        direction: str,
        phase: str,
        after: float,
        length: float,
        size: int | None,
        kind: str | None = "pinned",
        ranks: Iterable[int] | None = None,
    ) -> Job:
        """Add a copy to each iteration: `after` ms after the phase begins, `length` ms
        long."""
        for number in self.ranks if ranks is None else ranks:
            for begin in self.begins[number, phase]:
                start = begin + round(after * MS)
                memory = {"host_memory": kind} if kind is not None else {}
                device = f"cuda:{number}"
                end = start + round(length * MS)
                self.builder.rank(number).transfer(
                    direction, start, end, size, device, **memory
                )
        return self

    def kernels(
        self,
        phase: str,
        starts: Sequence[float],
        length: float,
        launched_before: float | None = 1.0,
        kind: str = "compute",
        ranks: Iterable[int] | None = None,
    ) -> Job:
        """Add kernels to each iteration, all ms: `starts` after the phase begins, each
        launched so long before."""
        for number in self.ranks if ranks is None else ranks:
            begins = np.array(self.begins[number, phase])[:, None]
            begun = (begins + np.round(np.array(starts) * MS).astype(np.int64)).ravel()
            launches = (
                None if launched_before is None else begun - round(launched_before * MS)
            )
            columns = {
                "device": f"cuda:{number}",
                "kind": kind,
                "name": kind,
                "launch_ns": launches,
            }
            self.builder.rank(number).extend(
                "kernels", start_ns=begun, end_ns=begun + round(length * MS), **columns
            )
        return self

    def sample(self, phase: str, h2d: float, d2h: float) -> Job:
        """Add a counter's sample for a phase of each iteration; h2d, d2h: shares of the
        link's peak."""
        for number in self.ranks:
            for begin in self.begins[number, phase]:
                window = round(self.ms[phase] * MS)
                rates = {"h2d_bytes_per_s": h2d * PEAK, "d2h_bytes_per_s": d2h * PEAK}
                self.builder.rank(number).link(
                    begin + window, window, "gpm", f"cuda:{number}", **rates
                )
        return self

    def memory(
        self,
        pool: str,
        sizes: dict[str, float],
        device: str = "cuda",
        rank: int | None = None,
    ) -> Job:
        """Add samples of a pool: GiB from the beginning of each phase on."""
        for number in self.ranks if rank is None else [rank]:
            name = f"cuda:{number}" if device == "cuda" else device
            for phase, size in sizes.items():
                for begin in self.begins[number, phase]:
                    self.builder.rank(number).memory(
                        begin, round(size * GIB), pool, name
                    )
        return self

    def meta(self, **entries: Any) -> Job:
        """Set metadata of all ranks."""
        for number in self.ranks:
            self.builder.rank(number, **entries)
        return self

    @property
    def trace(self) -> Trace:
        return self.builder.build()

    @property
    def results(self) -> Findings:
        return find(self.trace)

    def result(self, rule: Rule) -> Finding | Unknown | None:
        """Return the result of one rule."""
        return rule(JobMetrics(self.trace))

    def finding(self, rule: Rule) -> Finding:
        result = self.result(rule)
        assert isinstance(result, Finding), result
        return result


class SimulatedSetting(NamedTuple):
    """An adviser that recommends a static split; None: nothing gains."""

    setting: Advice | None

    @property
    def can_simulate(self) -> bool:
        return True

    def split_advice(self) -> Advice | None:
        return self.setting

    def activations_advice(self) -> Advice | None:
        return None


NO_OFFLOAD = SimulatedSetting(
    Advice(
        "deepspeed",
        {"offload_optimizer": {"device": "none"}},
        "do not offload at all",
        IterationGain(340.0, 340.0, 400.0),
        ends_offload=True,
    )
)


def devices(job: Job, peak: float | None = PEAK) -> Job:
    """Give each rank a GPU of its own."""
    for number in job.ranks:
        link = {"generation": 5, "width": 16, "peak_bytes_per_s": peak}
        device = {
            "device": f"cuda:{number}",
            "kind": "cuda",
            "capacity_bytes": CAPACITY,
            "link": link,
        }
        node = number % 2
        numa = {
            "cpu_nodes": [node],
            "memory_bytes": {str(node): 10 * GIB, str(1 - node): GIB // 2},
        }
        job.builder.rank(number, devices=[{**device, "numa_node": node}], numa=numa)
    job.builder.meta["host"] = {
        "name": "node",
        "cpu": {"device": "cpu", "kind": "cpu", "cores": 64},
        "numa_nodes": [{"node": 0, "cpus": "0-31"}, {"node": 1, "cpus": "32-63"}],
    }
    return job.meta(threads={"torch": 32, "omp": "32"})


def on_gpu(
    ranks: int = 1,
    slower: dict[tuple[int, str], float] | None = None,
    used: float = 72,
    **ms: Any,
) -> Job:
    """Make a job with state on the GPU, step counts on the CPU as in torch, pinned
    batches, and the loss read back."""
    job = devices(Job(ranks, slower=slower, **ms))
    job.meta(
        optimizers=[
            {"class": "AdamW", "params": PARAMS, "state_devices": ["cpu", "cuda"]}
        ]
    )
    add_memory(job, used)
    job.copy("h2d", "other", 1, 1, 40_000_000).copy(
        "d2h", "update", job.ms["update"] - 1, 0.01, 4, "pageable"
    )
    return job


def offloaded(
    ranks: int = 1,
    peak: float | None = PEAK,
    ratio: Any = None,
    used: float = 79.5,
    **ms: float,
) -> Job:
    """Make a DeepSpeed job without problems whose optimizer is on the CPU."""
    job = devices(Job(ranks, **ms), peak)
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}}
    if ratio is not None:
        offload["ratio"] = ratio
    job.builder.meta["deepspeed"] = {"config": config, "activation_checkpointing": None}
    job.meta(optimizers=[{"class": "DeepSpeedCPUAdam", "params": PARAMS}])
    return add_memory(job, used)


def split_by_stub(
    ratio: float | None, version: str | None = None, used: float = 79.5, **ms: float
) -> Job:
    """Make a job of the framework that the fixture `stub_framework` installs, with a
    share of the state on the CPU."""
    job = offloaded(used=used, **ms)
    del job.builder.meta["deepspeed"]
    job.builder.meta["stub"] = {"ratio": ratio, "version": version}
    return job


def add_memory(job: Job, used: float) -> Job:
    """Add memory as torch counts it: activations grow in the forward and shrink in the
    backward, their blocks stay reserved."""
    reserved = used - 1
    job.memory("device", {"other": used}).memory("reserved", {"other": reserved})
    full, empty = reserved - 0.5, reserved - 3
    job.memory("allocated", {"forward": full, "backward": full - 1, "update": empty})
    job.memory("rss", {"other": 10}, "cpu").memory("swap", {"other": 0}, "cpu")
    return job


def async_copies(job: Job) -> Job:
    """Add copies of gradients to pinned memory in the backward, and of state in both
    directions in the update."""
    job.copy("d2h", "backward", 10, 40, 2_000_000_000)
    update = job.ms["update"]
    for direction in ("h2d", "d2h"):
        job.copy(
            direction, "update", 1, update - 2, round(0.8 * PEAK * (update - 2) / 1e3)
        )
    return job


def on_cpu(ranks: int = 1, torch: int = 16, cores: int = 16, **ms: Any) -> Job:
    """Make a job without a GPU."""
    job = Job(ranks, **ms)
    cpu = {"device": "cpu", "kind": "cpu", "capacity_bytes": CAPACITY, "cores": cores}
    job.builder.meta["host"] = {"name": "node", "cpu": cpu}
    job.meta(devices=[cpu], threads={"torch": torch, "omp": None})
    job.meta(
        optimizers=[{"class": "AdamW", "params": PARAMS, "state_devices": ["cpu"]}]
    )
    for pool, size in (("heap", 8), ("rss", 10), ("swap", 0)):
        job.memory(pool, {"other": size}, "cpu")
    return job

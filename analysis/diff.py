"""Compares two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from ebbtide.analysis.metrics.iterations import slowest_times, steady_iterations
from ebbtide.analysis.metrics.prediction import is_predicted
from ebbtide.analysis.metrics.summary import summarize, whole_trace
from ebbtide.analysis.timeseries.two_samples import DifferenceInterval, beyond_spread, difference_interval
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.metadata import RankInfo


@dataclass(frozen=True)
class Change:
    """A figure of both runs, None where it is not known."""

    name: str  # The phase, `iteration` or the memory pool; `of` in JSON.
    a: float | None  # The figure of the first run.
    b: float | None  # The figure of the second run.

    @property
    def difference(self) -> float | None:
        """b - a; None where one is not known."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def ratio(self) -> float | None:
        """b / a; None where one is not known or a is 0."""
        return None if self.a is None or self.b is None or self.a == 0 else self.b / self.a

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `ebbtide diff --json`."""
        return {"of": self.name, "a": self.a, "b": self.b, "difference": self.difference, "ratio": self.ratio}


@dataclass(frozen=True)
class TimeChange(Change):
    """Median milliseconds of both runs."""

    beyond_spread: bool | None  # Whether the medians differ by more than their spread; see `beyond_spread`.
    # The least and the largest difference b - a that the iterations allow; see `difference_interval`.
    interval: DifferenceInterval | None

    @property
    def is_distinguishable(self) -> bool | None:
        """Whether the difference can be told apart from noise: the medians differ by more than their spread, and the
        interval does not contain 0. None with fewer than three iterations in one of the runs."""
        if self.beyond_spread is None or self.interval is None:
            return None
        return self.beyond_spread and not self.interval.low <= 0 <= self.interval.high

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `ebbtide diff --json`."""
        interval = None if self.interval is None else asdict(self.interval)
        return {
            **super().as_json(),
            "beyond_spread": self.beyond_spread,
            "distinguishable": self.is_distinguishable,
            "difference_interval": interval,
        }


@dataclass(frozen=True)
class SettingChange:
    """A setting that differs between the metadata of both runs."""

    setting: str  # Its path in the metadata; `what` in JSON.
    a: Any  # Its value in the first run; None if not recorded.
    b: Any  # Its value in the second run; None if not recorded.

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `ebbtide diff --json`."""
        return {"what": self.setting, "a": self.a, "b": self.b}


@dataclass(frozen=True)
class Diff:
    """Comparison of two runs."""

    a: str  # Path of the first trace.
    b: str  # Path of the second trace.
    counted: tuple[int, int]  # Number of steady iterations of each, which medians are over.
    median_ms: list[TimeChange]  # Times of the iteration and its phases.
    peak_bytes: list[Change]  # Peak of each memory pool.
    min_free_bytes: list[Change]  # Least free memory in each phase.
    h2d_bytes: list[Change]  # Bytes moved to the device in each phase.
    d2h_bytes: list[Change]  # Bytes moved to the host in each phase.
    setting_changes: list[SettingChange]  # Settings that differ; `facts` in JSON.
    totals: list[Change]  # Figures of the whole traces, which need no iterations.
    predicted: tuple[bool, bool]  # Whether a dry run made each.

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide diff --json` prints."""
        figures = ("median_ms", "peak_bytes", "min_free_bytes", "h2d_bytes", "d2h_bytes")
        return {
            "a": self.a,
            "b": self.b,
            "counted_iterations": {"a": self.counted[0], "b": self.counted[1]},
            **{name: [change.as_json() for change in getattr(self, name)] for name in figures},
            "facts": [change.as_json() for change in self.setting_changes],
            "totals": [change.as_json() for change in self.totals],
            **({"predicted": {"a": self.predicted[0], "b": self.predicted[1]}} if any(self.predicted) else {}),
        }


def compare(a: Trace, b: Trace) -> Diff:
    """Compare two runs by the figures of their summaries: medians over the steady iterations, times of the slowest
    rank, peaks of the rank with the largest."""
    first, second = summarize(a), summarize(b)
    phases = list(zip(first.phases, second.phases, strict=True))
    medians = {"iteration": (first.iteration_ms, second.iteration_ms)}
    medians |= {x.phase: (x.median_ms, y.median_ms) for x, y in phases}
    times = slowest_times(a).frame, slowest_times(b).frame
    samples = {phase: (times[0][phase].dropna(), times[1][phase].dropna()) for phase in medians}
    totals = asdict(whole_trace(a)), asdict(whole_trace(b))
    pools = first.memory.pools, second.memory.pools
    return Diff(
        a=str(a.path),
        b=str(b.path),
        counted=(len(steady_iterations(a).numbers), len(steady_iterations(b).numbers)),
        median_ms=[
            TimeChange(phase, *ms, beyond_spread(*samples[phase]), difference_interval(*samples[phase]))
            for phase, ms in medians.items()
        ],
        peak_bytes=[Change(pool, pools[0].get(pool), pools[1].get(pool)) for pool in sorted({**pools[0], **pools[1]})],
        min_free_bytes=[Change(x.phase, x.min_free_bytes, y.min_free_bytes) for x, y in phases],
        h2d_bytes=[Change(x.phase, x.h2d_bytes, y.h2d_bytes) for x, y in phases],
        d2h_bytes=[Change(x.phase, x.d2h_bytes, y.d2h_bytes) for x, y in phases],
        setting_changes=list(_changes(_settings(a), _settings(b))),
        totals=[Change(name, totals[0][name], totals[1][name]) for name in totals[0]],
        predicted=(is_predicted(a), is_predicted(b)),
    )


def _settings(trace: Trace) -> dict[str, Any]:
    """Return the settings of the job, the host and the first rank, by their path in the metadata."""
    meta = trace.meta
    entry = meta.ranks[0] if meta.ranks else RankInfo(rank=0)
    settings: dict[str, Any] = {key: getattr(meta, key) for key in ("source", "warmup_iterations")}
    settings |= {"command": list(meta.command) or None, "ranks": len(meta.ranks), "devices": len(entry.devices)}
    settings |= {key: getattr(entry, key) for key in ("world_size", "python", "torch", "cuda", "transfers_recorded")}
    settings |= _with_prefix("threads", entry.threads)
    settings |= _with_prefix("device", entry.main_device, ("device", "kind", "name", "capacity_bytes"))
    settings |= _with_prefix("link", entry.main_device.link)
    settings |= _with_prefix("model", entry.model)
    for number, optimizer in enumerate(entry.optimizers, start=1):
        settings |= _with_prefix("optimizer" if number == 1 else f"optimizer {number}", optimizer)
    if meta.deepspeed is not None:
        keys = ("version", "stage", "policy", "subgroup_params", "subgroup_devices")
        settings |= _with_prefix("deepspeed", meta.deepspeed, keys) | _with_prefix(
            "deepspeed", _flat(meta.deepspeed.config)
        )
    settings |= _with_prefix("host", meta.host, ("name", "kernel")) | _with_prefix(
        "host.cpu", meta.host.cpu, ("name", "cores")
    )
    for gpu in meta.host.gpus[:1]:
        settings |= _with_prefix("host.gpu", gpu, ("name", "driver", "link_source"))
    return settings | _with_prefix("options", meta.options)


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the entries of nested sections, by the path to each."""
    entries: dict[str, Any] = {}
    for key, value in config.items() if isinstance(config, Mapping) else ():
        entries |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return entries


def _with_prefix(name: str, section: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
    """Return `name.key` for some keys of a section of the metadata, or (None) for all."""
    section = msgspec.to_builtins(section)
    return {f"{name}.{key}": section.get(key) for key in (section if keys is None else keys)}


def _changes(a: dict[str, Any], b: dict[str, Any]) -> Iterator[SettingChange]:
    for setting in {**a, **b}:
        if a.get(setting) != b.get(setting):
            yield SettingChange(setting, a.get(setting), b.get(setting))

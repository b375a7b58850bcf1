"""What changed between two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.devices import first_device
from ebbtide.analysis.metrics.iterations import counted, slowest_times
from ebbtide.analysis.metrics.summary import summarize
from ebbtide.profiler.trace import Trace

_LEAST_ITERATIONS = 3
_STANDARD_ERRORS = 3.0


@dataclass(frozen=True)
class Change:
    """A figure of both runs. of: the phase, `iteration` or the memory pool. difference: b - a. ratio: b / a. None where
    one is not known; no ratio to 0."""

    of: str
    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def ratio(self) -> float | None:
        return None if self.a is None or self.b is None or self.a == 0 else self.b / self.a

    def as_json(self) -> dict[str, Any]:
        return {"of": self.of, "a": self.a, "b": self.b, "difference": self.difference, "ratio": self.ratio}


@dataclass(frozen=True)
class TimeChange(Change):
    """Median milliseconds. beyond_spread: see `beyond_spread`."""

    beyond_spread: bool | None

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "beyond_spread": self.beyond_spread}


@dataclass(frozen=True)
class Fact:
    """Something that is not the same in the metas; None where one does not tell."""

    what: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Diff:
    """Two runs side by side. counted: the iterations of each that medians are over."""

    a: str
    b: str
    counted: tuple[int, int]
    median_ms: list[TimeChange]
    peak_bytes: list[Change]
    min_free_bytes: list[Change]
    h2d_bytes: list[Change]
    d2h_bytes: list[Change]
    facts: list[Fact]

    def as_json(self) -> dict[str, Any]:
        """The object that `ebbtide diff --json` prints."""
        figures = ("median_ms", "peak_bytes", "min_free_bytes", "h2d_bytes", "d2h_bytes")
        return {
            "a": self.a,
            "b": self.b,
            "counted_iterations": {"a": self.counted[0], "b": self.counted[1]},
            **{name: [change.as_json() for change in getattr(self, name)] for name in figures},
            "facts": [asdict(fact) for fact in self.facts],
        }


def compare(a: Trace, b: Trace) -> Diff:
    """Compare two runs by the figures of their summaries: medians over the counted iterations, the slowest rank's
    times, the largest rank's peaks."""
    one, other = summarize(a), summarize(b)
    phases = list(zip(one.phases, other.phases, strict=True))
    medians = {"iteration": (one.iteration_ms, other.iteration_ms)}
    medians |= {x.phase: (x.median_ms, y.median_ms) for x, y in phases}
    times = slowest_times(a), slowest_times(b)
    beyond = {phase: beyond_spread(times[0][phase].dropna(), times[1][phase].dropna()) for phase in medians}
    pools = one.memory.pools, other.memory.pools
    return Diff(
        a=str(a.path),
        b=str(b.path),
        counted=(len(counted(a)[0]), len(counted(b)[0])),
        median_ms=[TimeChange(phase, *ms, beyond[phase]) for phase, ms in medians.items()],
        peak_bytes=[Change(pool, pools[0].get(pool), pools[1].get(pool)) for pool in sorted({**pools[0], **pools[1]})],
        min_free_bytes=[Change(x.phase, x.min_free_bytes, y.min_free_bytes) for x, y in phases],
        h2d_bytes=[Change(x.phase, x.h2d_bytes, y.h2d_bytes) for x, y in phases],
        d2h_bytes=[Change(x.phase, x.d2h_bytes, y.d2h_bytes) for x, y in phases],
        facts=list(_differing(_facts(a), _facts(b))),
    )


def beyond_spread(a: pd.Series[float], b: pd.Series[float]) -> bool | None:
    """Whether the medians of two samples lie further apart than the spread of each explains: more than three standard
    errors of their difference. None, for it cannot be told, with fewer than three values in one.

    The standard error of a median is taken as 1.25 IQR / (1.35 sqrt(n)): McGill, Tukey and Larsen, "Variations of Box
    Plots", The American Statistician 32 (1978), who draw notches by it. It holds for normal values and nearly so for
    others, and an odd iteration does not sway it. Quartiles lie at p (n + 1) (Weibull), which for few values makes them
    wide: of samples of 3 to 200 values from one distribution, normal, log-normal or with a tenth of outliers, less than
    1 % differ by this rule. Iterations that resemble the ones before them (correlation 0.5) make that 5 %.
    """
    if min(len(a), len(b)) < _LEAST_ITERATIONS:
        return None
    return bool(abs(b.median() - a.median()) > _STANDARD_ERRORS * np.hypot(_standard_error(a), _standard_error(b)))


def _standard_error(values: pd.Series[float]) -> float:
    low, high = np.percentile(values, [25, 75], method="weibull")
    return float(1.25 * (high - low) / (1.35 * np.sqrt(len(values))))


def _facts(trace: Trace) -> dict[str, Any]:
    """What the meta tells of the run: of the job, the host and the first rank."""
    meta = trace.meta
    entry: dict[str, Any] = meta["ranks"][0] if meta["ranks"] else {}
    device = first_device(trace, entry["rank"]) if entry else {}
    facts = {key: meta.get(key) for key in ("command", "source", "warmup_iterations")}
    facts |= {"ranks": len(meta["ranks"]), "devices": len(entry.get("devices") or [])}
    facts |= {key: entry.get(key) for key in ("world_size", "python", "torch", "cuda", "transfers_recorded")}
    facts |= _under("threads", entry.get("threads"))
    facts |= _under("device", device, ("device", "kind", "name", "capacity_bytes"))
    facts |= _under("link", device.get("link"))
    facts |= _under("model", entry.get("model"))
    for number, optimizer in enumerate(_list(entry.get("optimizers")), start=1):
        facts |= _under("optimizer" if number == 1 else f"optimizer {number}", optimizer)
    deepspeed = meta.get("deepspeed")
    facts |= _under("deepspeed", deepspeed, ("version", "stage", "policy", "subgroup_params", "subgroup_devices"))
    facts |= _under("deepspeed", _flat(deepspeed.get("config")) if isinstance(deepspeed, Mapping) else None)
    host = meta.get("host") or {}
    facts |= _under("host", host, ("name", "kernel")) | _under("host.cpu", host.get("cpu"), ("name", "cores"))
    for gpu in _list(host.get("gpus"))[:1]:
        facts |= _under("host.gpu", gpu, ("name", "driver", "link_source"))
    return facts | _under("options", meta.get("options"))


def _list(facts: Any) -> list[Any]:
    return facts if isinstance(facts, list) else []


def _flat(config: Any, before: str = "") -> dict[str, Any]:
    """The entries of sections within sections, by the path to each."""
    found: dict[str, Any] = {}
    for key, value in config.items() if isinstance(config, Mapping) else ():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return found


def _under(name: str, facts: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
    """`name.key` for each key, or these keys, of what a meta may have there."""
    if not isinstance(facts, Mapping):
        return {}
    return {f"{name}.{key}": facts.get(key) for key in (facts if keys is None else keys)}


def _differing(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Fact]:
    for what in {**a, **b}:
        if a.get(what) != b.get(what):
            yield Fact(what, a.get(what), b.get(what))

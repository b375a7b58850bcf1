"""Input and results of a calibration, and the timing of a call that is repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ebbtide.analysis.tables.table import Column, Table, View, rate, size, text
from ebbtide.interleave.calibrate.ranks import Ranks
from ebbtide.machines.gpu_compute import GpuCompute
from ebbtide.machines.machine import Machine
from ebbtide.machines.storage import StoragePath
from ebbtide.units import bytes_text, ms_text, rate_text

_MIN_RUNS = 3
# The rates that ranks on a host share.
_SHARED_RATES = ("cpu_update_params_per_s", "host_memory_bytes_per_s")


@dataclass(frozen=True)
class Timing:
    """The duration of a repeated call.

    Attributes:
        seconds: Median of one run.
        spread: Distance from the 10th to the 90th percentile, divided by the median.
    """

    seconds: float
    runs: int
    spread: float

    @classmethod
    def from_runs(cls, seconds: list[float]) -> Timing:
        """Summarize the durations of all runs in seconds."""
        short, middle, long = map(float, np.percentile(seconds, [10, 50, 90]))
        return cls(middle, len(seconds), (long - short) / middle)


def measure_time(run: Callable[[], object], window_s: float, ranks: Ranks) -> Timing:
    """Call `run` once unmeasured, wait for the other ranks, then call it for `window_s` seconds, at least three times.

    `run` must return only when its work has ended.
    """
    return measure_times([run], window_s, ranks)[0]


def measure_times(runs: Sequence[Callable[[], object]], window_s: float, ranks: Ranks) -> list[Timing]:
    """Measure several calls as `measure_time` does one, taking turns, so that what slows one down slows down all."""
    for run in runs:
        run()
    ranks.wait()
    durations: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + window_s
    while len(durations[0]) < _MIN_RUNS or time.perf_counter() < end:
        for run, own in zip(runs, durations, strict=True):
            begin = time.perf_counter()
            run()
            own.append(time.perf_counter() - begin)
    return [Timing.from_runs(own) for own in durations]


@dataclass(frozen=True)
class Setup:
    """Input of all measurements of one rank.

    Attributes:
        working_set: Bytes of host memory to measure over.
        window_s: Duration of each measurement in seconds.
        device: Number of this rank's CUDA device; None without a GPU.
    """

    ranks: Ranks
    threads: int
    cores: int
    working_set: int
    window_s: float
    device: int | None


@dataclass
class Record:
    """Results of a calibration.

    Attributes:
        alone: The same rates of one rank while the others on its host are idle; empty where not measured.
        gpu: Arithmetic and memory of the GPU; None where there is none.
    """

    rates: dict[str, float] = field(default_factory=dict)
    alone: dict[str, float] = field(default_factory=dict)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    storage: list[StoragePath] = field(default_factory=list)
    gpu: GpuCompute | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def rate(self, key: str, value: float, how: str, timing: Timing | None = None) -> None:
        """Record a rate and how it was measured."""
        self.rates[key] = value
        self.describe(key, how, timing)

    def describe(self, key: str, how: str, timing: Timing | None = None) -> None:
        """Record how a value of the machine file was measured."""
        runs = {"runs": timing.runs, "spread": round(timing.spread, 4)} if timing is not None else {}
        self.measured[key] = {"how": how, **runs}

    def host_traffic(self, bytes_per_s: float, how: str, timing: Timing | None = None) -> None:
        """Record measured traffic of host memory. The highest one of all measurements is taken as its bandwidth."""
        key = "host_memory_bytes_per_s"
        if bytes_per_s > self.rates.get(key, 0.0):
            self.rate(key, bytes_per_s, how, timing)


def _params_rate_text(params_per_s: float | None) -> str:
    return "-" if params_per_s is None else f"{params_per_s / 1e9:.3g} G parameters/s"


def _seconds_text(seconds: float | None) -> str:
    return ms_text(None if seconds is None else seconds * 1e3)


def _share_text(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} % of the rate in place"


def _ratio_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f} % of the rate with fp32 masters"


# Key in a machine file -> (label, function that formats the value).
_RATES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "gpu_memory_bytes": ("GPU memory", bytes_text),
    "host_memory_bytes": ("host memory", bytes_text),
    "host_memory_bytes_per_s": ("host memory, read and written", rate_text),
    "h2d_bytes_per_s": ("h2d, pinned", rate_text),
    "d2h_bytes_per_s": ("d2h, pinned", rate_text),
    "duplex_bytes_per_s": ("both directions together", rate_text),
    "h2d_pageable_bytes_per_s": ("h2d, pageable", rate_text),
    "d2h_pageable_bytes_per_s": ("d2h, pageable", rate_text),
    "cpu_update_params_per_s": ("update on the CPU", _params_rate_text),
    "cpu_out_of_place_share": ("update on the CPU, out of place", _share_text),
    "cpu_remainder_ratio": ("update on the CPU, masters as remainders", _ratio_text),
    "cpu_cast_params_per_s": ("cast on the CPU", _params_rate_text),
    "cpu_norm_params_per_s": ("norm of gradients on the CPU", _params_rate_text),
    "gpu_update_params_per_s": ("update on the GPU", _params_rate_text),
    "gpu_cast_params_per_s": ("cast on the GPU", _params_rate_text),
    "step_overhead_s": ("overhead of a step", _seconds_text),
    "operation_s": ("overhead of an operation", _seconds_text),
}


def machine_view(machine: Machine) -> View:
    """Return all rates with their source, and for a fitted machine how well it explains the traces."""
    ranks = f" while {machine.box.ranks} update on its host" if machine.box is not None else ""
    columns: list[Column] = [
        text("", lambda key: _RATES[key][0]),
        text("rate", lambda key: _RATES[key][1](getattr(machine, key))),
        text("source", lambda key: "not known" if getattr(machine, key) is None else _source(machine, key)),
    ]
    yield Table("rates", f"{machine.name}, rates of one rank{ranks}", columns, list(_RATES))
    if (box := machine.box) is not None:
        columns = [
            text("", lambda key: _RATES[key][0]),
            text(f"total of {box.ranks} ranks", lambda key: _RATES[key][1](getattr(box, key))),
            text("one rank, the others idle", lambda key: _RATES[key][1](getattr(box, f"one_rank_{key}"))),
        ]
        yield Table("box", f"{machine.name}, the box", columns, _SHARED_RATES)
    if (gpu := machine.gpu) is not None:
        rows = [(f"products in {kind}", f"{flops / 1e12:.4g} TFLOP/s") for kind, flops in gpu.flops_per_s.items()]
        if gpu.memory_bytes_per_s is not None:
            rows.append(("device memory, read and written", f"{gpu.memory_bytes_per_s / 1e12:.4g} TB/s"))
        capability = f", compute capability {gpu.compute_capability}" if gpu.compute_capability else ""
        title = f"{machine.name}, the GPU: {gpu.name or 'not known'}{capability}"
        yield Table("gpu", title, (text("", lambda row: row[0]), text("rate", lambda row: row[1])), rows)
    columns = [
        text("folder", lambda entry: entry[1].path or f"path {entry[0]}"),
        rate("read", lambda entry: entry[1].read_bytes_per_s),
        rate("written", lambda entry: entry[1].write_bytes_per_s),
        rate("both together", lambda entry: entry[1].duplex_bytes_per_s),
        size("free", lambda entry: entry[1].bytes),
    ]
    yield Table("storage", f"{machine.name}, storage", columns, list(enumerate(machine.storage)))
    fit = machine.extra.get("fit") or {"residuals": {}}
    columns = [
        text("trace", lambda name: name),
        text("ranks on the host", lambda name: str(fit["ranks"][name] or "not known")),
        text("policy", lambda name: fit["policies"][name]),
        text("update, fitted vs. measured", lambda name: f"{100 * fit['residuals'][name]:+.1f} %"),
    ]
    yield Table("fit", "Errors of the fit", columns, list(fit["residuals"]), max_rows=None)


def _source(machine: Machine, key: str) -> str:
    fit = machine.extra.get("fit")
    if fit is None:
        return f"measured: {machine.extra['measured'][key]['how']}"
    if key not in fit["uncertainty"]:
        return "recorded in the traces"
    factor = f"x{fit['uncertainty'][key]:.2f}"
    if key in fit["unidentified"]:
        return f"prior, {factor}: not determined by these traces"
    return f"fitted, {factor}"

"""Measures utilization, power, clocks and temperature of the GPUs in each phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from ebbtide.analysis.dataframes import TabularResult
from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import main_device
from ebbtide.analysis.metrics.iterations import (
    PhaseArrays,
    intervals,
    steady_iterations,
)
from ebbtide.analysis.timeseries.step_functions import Floats, Ints, overlapping
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.columns import Bools, Columns

# A longer time between two samples than this many of the median is a gap.
_MAX_GAP = 5
# The interval of a single sample.
_SINGLE_NS = 1_000_000_000
# No driver gives larger values: they are impossible, and their sums would not be
# finite.
_MAX_VALUE = 1e20
# Bits of `throttle_reasons` for a limit that was reached. An idle GPU, or clocks that
# the user has set, are not limits.
LIMITS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_LIMIT_BITS = sum(LIMITS)
# Column of the table `gpu` and unit of each quantity, in the order of output.
QUANTITIES = {
    "utilization": ("utilization_percent", "%"),
    "memory_utilization": ("memory_utilization_percent", "%"),
    "power": ("power_w", "W"),
    "sm_clock": ("sm_clock_mhz", "MHz"),
    "memory_clock": ("memory_clock_mhz", "MHz"),
    "temperature": ("temperature_celsius", "°C"),
    "throttled": ("throttle_reasons", "%"),
}


@dataclass(frozen=True)
class GpuFigure:
    """A quantity of the GPUs in one phase, over the steady iterations."""

    # `utilization`, `memory_utilization`, `power`, `sm_clock`, `memory_clock`,
    # `temperature`, or `throttled`: 100 while a power or thermal limit lowers the
    # clocks, else 0; its mean is a share of time.
    quantity: str
    unit: str  # Unit of the values.
    # The phase, or `other`; None for the whole of a trace without iterations.
    phase: str | None
    min: float  # Smallest value.
    mean: float  # Mean over time.
    max: float  # Largest value.

    @property
    def label(self) -> str:
        """The quantity as text."""
        return self.quantity.replace("sm_", "SM ").replace("_", " ")


@dataclass(frozen=True, repr=False)
class GpuState(TabularResult, table="figures"):
    """Figures of every recorded quantity and phase, over all ranks; empty where nothing
    was recorded."""

    figures: list[GpuFigure]

    def as_json(self) -> dict[str, Any]:
        """Return the object with the key `gpu`.

        `ebbtide summary --json` prints it as well.
        """
        return {"gpu": [asdict(figure) for figure in self.figures]}


def gpu_state(trace: Trace, ranks: Sequence[int] | None = None) -> GpuState:
    """Measure the state of the first device of some ranks, or of all if None.

    Each sample holds until the next one. The last one, and one before a gap, hold for
    the median interval. Phases are on the device's clock where it was recorded; a phase
    that is shorter than the window of NVML's values (up to 1 s) shows its neighbours as
    well.
    """
    recorded = [
        rank
        for rank in (trace.ranks if ranks is None else ranks)
        if len(trace.columns(rank, "gpu"))
    ]
    figures: list[GpuFigure] = []
    if not recorded:
        return GpuState(figures)
    totals = [rank_gpu_totals(trace, rank) for rank in recorded]
    for quantity, (_, unit) in QUANTITIES.items():
        for phase in ("", *ITERATION_PARTS):
            of_ranks = [
                total[quantity, phase] for total in totals if (quantity, phase) in total
            ]
            if of_ranks:
                low, high = (
                    min(total.low for total in of_ranks),
                    max(total.high for total in of_ranks),
                )
                mean = sum(total.weighted for total in of_ranks) / sum(
                    total.length_ns for total in of_ranks
                )
                # The mean of equal values may differ from them by rounding.
                figures.append(
                    GpuFigure(
                        quantity,
                        unit,
                        phase or None,
                        low,
                        min(max(mean, low), high),
                        high,
                    )
                )
    return GpuState(figures)


class GpuTotals(NamedTuple):
    """The smallest value of a quantity in one phase of a rank, the largest, the sum
    weighted by ns, and the ns."""

    low: float
    high: float
    weighted: float
    length_ns: float


@once_per_trace
def rank_gpu_totals(trace: Trace, rank: int) -> dict[tuple[str, str], GpuTotals]:
    """Return the totals of a rank's GPU by quantity and phase over the steady
    iterations, as far as recorded.

    Without iterations, the totals are of the whole time, with an empty text for the
    phase."""
    rows, phases = trace.columns(rank, "gpu"), intervals(trace, rank).times_with_other
    on_device = rows.equal("device", main_device(trace, rank))
    phases = phases.only(np.isin(phases.iterations, steady_iterations(trace).numbers))
    if not steady_iterations(trace).numbers:
        times = rows.ints("t_ns")
        last = _held_until(np.unique(times))[-1:]
        phases = PhaseArrays(
            np.zeros(1, np.int64), np.array([""], object), times[:1], last
        )
    totals = {}
    for quantity in QUANTITIES if on_device.any() else ():
        times, values = _samples(rows, on_device, quantity)
        # Each phase with each of the samples that hold during it.
        held_until = _held_until(times)
        phase, sample = overlapping(phases.starts, phases.ends, (times, held_until))
        lengths = np.minimum(held_until[sample], phases.ends[phase]) - np.maximum(
            times[sample], phases.starts[phase]
        )
        for name in ("", *ITERATION_PARTS):
            own = (phases.phases[phase] == name) & (lengths > 0)
            if own.any():
                figures, length = values[sample[own]], lengths[own].astype(np.float64)
                totals[quantity, name] = GpuTotals(
                    float(figures.min()),
                    float(figures.max()),
                    float((figures * length).sum()),
                    float(length.sum()),
                )
    return totals


def _held_until(times: Ints) -> Ints:
    """Return until when each sample holds, ns."""
    steps = np.diff(times)
    usual = int(np.median(steps[steps > 0])) if steps.any() else _SINGLE_NS
    steps = np.append(np.where(steps > _MAX_GAP * usual, usual, steps), usual)
    held_until: Ints = times + steps[: len(times)]
    return held_until


def _samples(rows: Columns, on_device: Bools, quantity: str) -> tuple[Ints, Floats]:
    """Return (times in ns, values) of a quantity in rows of the table `gpu`.

    The rows are of one device.
    """
    values = rows.floats(QUANTITIES[quantity][0])
    recorded = on_device & (np.abs(values) < _MAX_VALUE)
    times, values = rows.ints("t_ns")[recorded], values[recorded]
    if quantity == "throttled":
        values = 100.0 * (values.astype(np.int64) & _LIMIT_BITS != 0)
    return times, values

"""Replays passes over tiles: their time under other tile sizes and slots, from measured
rates, and its lower bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from ebbtide.interleave.model.plan import Plan, Resource
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from examples.streaming.tile_plan import (
    LayoutError,
    TileLayout,
    fit_layout,
    pass_plan,
    pass_workload,
)

# Larger than the traffic of any link: copies and computations are assumed not to share
# host memory.
_UNLIMITED = 1e14


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a pass.

    Attributes:
        layout: Tiles, slots and residents.
        pass_s: Simulated seconds.
        bound_s: Seconds that no plan with these residents can go below (see `bound_s`).
    """

    layout: TileLayout
    pass_s: float
    bound_s: float


def measure_rates(schedules: Sequence[Schedule]) -> Machine:
    """Return the rates of recorded passes; a row is a parameter of the simulator.

    The overhead of an operation is the mean time from the end of all that it waits for
    to its start. Its length has overhead, too, which is known only if the passes have
    tiles of several sizes: then a line is fitted to the lengths.
    """
    amounts: dict[Resource, list[float]] = {"h2d": [], "d2h": [], "gpu": []}
    seconds: dict[Resource, list[float]] = {resource: [] for resource in amounts}
    gaps = []
    for schedule in schedules:
        last_end = dict.fromkeys(amounts, 0.0)
        whole_tile = max(op.params for op in schedule.plan.ops)
        for op, start, end in schedule.items():
            ready = max(
                [last_end[op.resource], *(schedule.ends[index] for index in op.after)]
            )
            last_end[op.resource] = end
            gaps.append(max(0.0, start - ready))
            amount = op.params if op.resource == "gpu" else op.nbytes
            if amount and op.params == whole_tile:
                amounts[op.resource].append(amount)
                seconds[op.resource].append(end - start)
    lines = {
        resource: _fit_line(amounts[resource], seconds[resource])
        for resource in amounts
        if amounts[resource]
    }
    overheads = [
        overhead_s
        for resource, (_, overhead_s) in lines.items()
        for _ in amounts[resource]
    ]
    rates = {resource: rate for resource, (rate, _) in lines.items()}
    return Machine(
        name="rates of recorded passes",
        h2d_bytes_per_s=rates.get("h2d", _UNLIMITED),
        d2h_bytes_per_s=rates.get("d2h", _UNLIMITED),
        gpu_update_params_per_s=rates["gpu"],
        host_memory_bytes_per_s=_UNLIMITED,
        operation_s=mean(gaps) + mean(overheads),
    )


def _fit_line(
    amounts: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float]:
    """Return the rate, and the overhead of an operation in s, by least squares; without
    overhead for equal amounts."""
    if min(amounts) < max(amounts):
        slope, overhead_s = np.polyfit(amounts, seconds, 1)
        if slope > 0.0 and overhead_s > 0.0:
            return float(1.0 / slope), float(overhead_s)
    return sum(amounts) / sum(seconds), 0.0


def predict_pass(
    layout: TileLayout, fetch_factor: bool, flush_factor: bool, machine: Machine
) -> Prediction:
    """Simulate the plan of a pass."""
    plan = pass_plan(layout, fetch_factor, flush_factor)
    pass_s = simulate(plan, pass_workload(layout), machine).update_s
    return Prediction(layout, pass_s, bound_s(plan, machine))


def bound_s(plan: Plan, machine: Machine) -> float:
    """Return the seconds that a pass takes at least: those of the busiest resource
    without any overhead.

    max(bytes (1 - resident share) / link rate, rows / rows per second), with the busier
    direction of the link.
    """

    def moved_bytes(direction: str) -> float:
        return sum(op.nbytes for op in plan.ops if op.resource == direction)

    rows = sum(op.params for op in plan.ops if op.kind == "update")
    return max(
        moved_bytes("h2d") / (machine.h2d_bytes_per_s or _UNLIMITED),
        moved_bytes("d2h") / (machine.d2h_bytes_per_s or _UNLIMITED),
        rows / (machine.gpu_update_params_per_s or _UNLIMITED),
    )


def replay(
    layout: TileLayout,
    free_bytes: float | None,
    tile_rows: Iterable[int],
    slots: Iterable[int],
    fetch_factor: bool,
    flush_factor: bool,
    machine: Machine,
) -> list[Prediction]:
    """Predict a pass for each combination that fits the memory.

    Args:
        layout: The matrix, by a layout of it.
        free_bytes: Device memory for tiles; None: only the slots, no tile is resident.
        tile_rows: Rows of a tile.
        slots: Numbers of slots.
        fetch_factor: Whether the pass reads the factor.
        flush_factor: Whether it writes the factor back.
        machine: The rates.
    """
    counts = tuple(slots)
    predictions = []
    for rows in tile_rows:
        for count in counts:
            try:
                other = fit_layout(
                    layout.rows,
                    layout.columns,
                    layout.factor_columns,
                    rows,
                    count,
                    free_bytes,
                )
            except LayoutError:
                continue
            predictions.append(predict_pass(other, fetch_factor, flush_factor, machine))
    return predictions

"""Finds the best policy in each scenario of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ebbtide.interleave.experiments.sweep.task import Row

BASELINE = "zero-offload"


@dataclass(frozen=True)
class BestPolicy:
    """The fastest combination of a workload, a machine and a scenario, over policies and subgroup sizes.

    Attributes:
        workload: Name of the workload.
        machine: Name of the machine.
        scale_params: Factor of the scenario.
        free_bytes: Free memory of the scenario; None for that of the workload.
        host_free_bytes: Free host memory of the scenario; None for that of the workload.
        row: Row of the combination; None if no combination fits.
        speed_up: Speed-up over the baseline with the same subgroups; None if that is not in the sweep.
    """

    workload: str
    machine: str
    scale_params: float
    free_bytes: float | None
    host_free_bytes: float | None
    row: Row | None
    speed_up: float | None

    @property
    def above_bound(self) -> float | None:
        """Time of the iteration above the lower bound with the policy's overlap, as a share of the bound."""
        if self.row is None or not self.row["bound_overlap_iteration_ms"]:
            return None
        return float(self.row["iteration_ms"] / self.row["bound_overlap_iteration_ms"] - 1)

    def as_json(self) -> dict[str, object]:
        names = (
            "policy",
            "params",
            "largest_subgroup_params",
            "least_free_bytes",
            "iteration_ms",
            "exposed_ms",
            "fits",
            "exact",
            "peak_device_bytes",
            "host_bytes",
            "storage_read_bytes",
            "storage_written_bytes",
        )
        return {
            "workload": self.workload,
            "machine": self.machine,
            "scale_params": self.scale_params,
            "free_bytes": self.free_bytes,
            "host_free_bytes": self.host_free_bytes,
            **{name: self.row[name] if self.row else None for name in names},
            "speed_up": self.speed_up,
            "above_bound_share": self.above_bound,
        }


class _Group(NamedTuple):
    workload: str
    machine: str
    scale_params: float
    free_bytes: float | None
    host_free_bytes: float | None


def find_best(rows: Sequence[Row]) -> list[BestPolicy]:
    """Return the best combination of each workload, machine, size, and free memory of device and host, in order.

    Combinations that are exact come before those that are not, and those that fit before those for which that is not
    known; those that do not fit are left out.
    """
    groups: dict[_Group, list[Row]] = {}
    for row in rows:
        group = _Group(*(row[name] for name in _Group._fields))
        groups.setdefault(group, []).append(row)
    return [_best(group, group_rows) for group, group_rows in groups.items()]


def _best(group: _Group, rows: Sequence[Row]) -> BestPolicy:
    replayed = [row for row in rows if row["error"] is None]
    best = min(
        (row for row in replayed if row["fits"] is not False),
        key=lambda row: (not row["exact"], row["fits"] is None, row["iteration_ms"]),
        default=None,
    )
    baseline_ms = [
        row["iteration_ms"]
        for row in replayed
        if best and row["policy"] == BASELINE and row["subgroup_params"] == best["subgroup_params"]
    ]
    speed_up = baseline_ms[0] / best["iteration_ms"] if best and baseline_ms and best["iteration_ms"] else None
    return BestPolicy(*group, best, speed_up)

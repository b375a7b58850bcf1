"""Which policy is best in each scenario of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.interleave.experiments.sweep.task import Row

BASELINE = "zero-offload"


@dataclass(frozen=True)
class Best:
    """The quickest of a workload's combinations on a machine in a scenario, over policies and subgroup sizes.

    row: None where none fits. speed_up: over the baseline with the same subgroups, None where that is not in the sweep.
    above_bound: of the iteration, as a share of the bound.
    """

    workload: str
    machine: str
    scale_params: float
    free_bytes: float | None
    row: Row | None
    speed_up: float | None

    @property
    def above_bound(self) -> float | None:
        if self.row is None or not self.row["bound_iteration_ms"]:
            return None
        return float(self.row["iteration_ms"] / self.row["bound_iteration_ms"] - 1)

    def as_json(self) -> dict[str, object]:
        names = (
            "policy",
            "params",
            "largest_subgroup_params",
            "least_free_bytes",
            "iteration_ms",
            "exposed_ms",
            "fits",
        )
        return {
            "workload": self.workload,
            "machine": self.machine,
            "scale_params": self.scale_params,
            "free_bytes": self.free_bytes,
            **{name: self.row[name] if self.row else None for name in names},
            "speed_up": self.speed_up,
            "above_bound_share": self.above_bound,
        }


def best_of(rows: Sequence[Row]) -> list[Best]:
    """The best of each workload, machine, size and free memory, in the order of the rows. Those that fit come before
    those of which it is not known; those that do not fit are none."""
    groups: dict[tuple[str, str, float, float | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["workload"], row["machine"], row["scale_params"], row["free_bytes"]), []).append(row)
    return [_best(place, group) for place, group in groups.items()]


def _best(place: tuple[str, str, float, float | None], group: Sequence[Row]) -> Best:
    replayed = [row for row in group if row["error"] is None]
    found = min(
        (row for row in replayed if row["fits"] is not False),
        key=lambda row: (row["fits"] is None, row["iteration_ms"]),
        default=None,
    )
    base = [
        row["iteration_ms"]
        for row in replayed
        if found and row["policy"] == BASELINE and row["subgroup_params"] == found["subgroup_params"]
    ]
    speed_up = base[0] / found["iteration_ms"] if found and base and found["iteration_ms"] else None
    return Best(*place, found, speed_up)

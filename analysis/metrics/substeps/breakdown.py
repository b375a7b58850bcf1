"""What the sub-steps of an update did: their time, their bytes, the copies that ran meanwhile, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from ebbtide.analysis.dataframes import to_frame
from ebbtide.analysis.metrics.devices import main_pool
from ebbtide.analysis.metrics.iterations import counted
from ebbtide.analysis.metrics.substeps.aggregate import Measured, ResourceUse, SubStep
from ebbtide.analysis.metrics.substeps.operations import follow_each_other, op_pieces
from ebbtide.errors import TraceError
from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class SubSteps:
    """pool: the one that peaks are of. tiles: whether the sub-steps of an update follow each other and make it up
    (DeepSpeed's own step); those of a schedule run beside each other, and their times do not add up. subgroups: the
    same figures by subgroup, of the sub-steps that have one."""

    pool: str | None
    tiles: bool
    steps: list[SubStep]
    subgroups: list[SubStep]
    resources: list[ResourceUse]

    def as_json(self) -> dict[str, Any]:
        """The object that `ebbtide steps --json` prints."""
        return asdict(self)

    def to_pandas(self) -> pd.DataFrame:
        """A row per sub-step, with the fields of `SubStep` as columns (of `h2d` and `d2h`: h2d_FIELD, d2h_FIELD)."""
        return to_frame(self.steps, SubStep)


def sub_steps(trace: Trace, ranks: Sequence[int] | None = None, by_subgroup: bool = True) -> SubSteps:
    """The sub-steps of every rank, or of some. Raises TraceError where the trace has none in its counted iterations."""
    numbers = counted(trace)[0]
    pool = main_pool(trace)
    tiles, steps, subgroups, resources = True, [], [], []
    for rank in trace.ranks if ranks is None else ranks:
        rows, phases = op_pieces(trace, rank, numbers)
        if rows.empty:
            continue
        whole = follow_each_other(rows)
        tiles &= whole
        measured = Measured(trace, rank, pool, phases)
        steps += measured.steps(rows, ["phase", "name", "resource", "within"], whole)
        resources += measured.resources(rows)
        if by_subgroup:
            keys = ["phase", "subgroup", "name", "resource", "within"]
            subgroups += measured.steps(rows[rows["subgroup"] >= 0], keys, whole)
    if not steps:
        raise TraceError(
            f"{trace.path} has no sub-steps of an update: record a DeepSpeed job with `ebbtide profile`, or simulate "
            "one with `ebbtide replay --save`"
        )
    return SubSteps(pool, tiles, steps, subgroups, resources)

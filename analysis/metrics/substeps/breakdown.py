"""Measures the sub-steps of an update: time, bytes, concurrent copies, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from ebbtide.analysis.dataframes import TabularResult, to_frame
from ebbtide.analysis.metrics.devices import peak_pool
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.storage import StorageUse, storage_use
from ebbtide.analysis.metrics.substeps.aggregate import ResourceUse, SubStep, SubstepAggregator
from ebbtide.analysis.metrics.substeps.operations import run_in_sequence, split_by_phase
from ebbtide.profiler.trace import Trace


@dataclass(frozen=True, repr=False)
class SubSteps(TabularResult):
    """The sub-steps of every rank.

    Attributes:
        pool: The pool of `SubStep.peak_bytes`.
        tiles: Whether the sub-steps of an update follow each other and fill it (DeepSpeed's own step). The operations
            of a schedule run at the same time: their times do not add up. None if no sub-steps were recorded.
        steps: Sub-steps of each phase.
        subgroups: The same figures by subgroup, of the sub-steps that have one.
        resources: Time in which each resource worked.
        storage: Bytes and waits of storage, per direction; empty where none was used.
    """

    pool: str | None
    tiles: bool | None
    steps: list[SubStep]
    subgroups: list[SubStep]
    resources: list[ResourceUse]
    storage: list[StorageUse]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide summary --by substep --json` prints."""
        return asdict(self)

    def to_pandas(self) -> pd.DataFrame:
        """Return a row per sub-step, with the fields of `SubStep` as columns.

        Fields of `h2d` and `d2h` become h2d_FIELD and d2h_FIELD.
        """
        return to_frame(self.steps, SubStep)


def sub_steps(trace: Trace, ranks: Sequence[int] | None = None, by_subgroup: bool = True) -> SubSteps:
    """Measure the sub-steps of all ranks (None) or some; none where the steady iterations have no sub-steps."""
    numbers = steady_iterations(trace).numbers
    pool = peak_pool(trace)
    tiles, steps, subgroups, resources = True, [], [], []
    for rank in trace.ranks if ranks is None else ranks:
        if not len(trace.columns(rank, "ops")):
            continue
        rows, phases = split_by_phase(trace, rank, numbers)
        if rows.empty:
            continue
        in_sequence = run_in_sequence(rows)
        tiles &= in_sequence
        aggregator = SubstepAggregator(trace, rank, pool, phases)
        steps += aggregator.steps(rows, ["phase", "name", "resource", "within"], in_sequence)
        resources += aggregator.resources(rows)
        if by_subgroup:
            keys = ["phase", "subgroup", "name", "resource", "within"]
            subgroups += aggregator.steps(rows[rows["subgroup"] >= 0], keys, in_sequence)
    return SubSteps(pool, tiles if steps else None, steps, subgroups, resources, storage_use(trace, ranks))

"""Numbers the micro-steps of iterations, and explains why a trace has no iterations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ebbtide.phases import BACKWARD, FORWARD, UPDATE

if TYPE_CHECKING:
    import pandas as pd


def micro_steps(phases: pd.DataFrame) -> pd.Series[int]:
    """Number the micro-steps of each iteration.

    A forward that follows a backward begins the next one. A pipeline schedule runs
    several forwards before the first backward: there a backward belongs to the
    micro-step of its forward. Its micro-batches are known (`micro_batch`), or one
    module runs forward as often as there are backwards: these then follow the order of
    the forwards.

    Args:
        phases: Table of iteration and phase, in order of time. Optional: micro_batch,
            the number of the micro-batch that a schedule ran (0: not known), and
            source, the number of the module that ran forward.
    """
    iteration = phases["iteration"].fillna(-1)
    forward = phases["phase"].eq(FORWARD)
    previous = phases["phase"].shift().where(iteration.eq(iteration.shift()))
    numbers = (
        (forward & previous.isin([BACKWARD, UPDATE]))
        .groupby(iteration)
        .cumsum()
        .astype("int64")
    )
    if "micro_batch" in phases and phases["micro_batch"].any():
        batches = (
            phases["micro_batch"].where(phases["micro_batch"] > 0).groupby(iteration)
        )
        # A loss that is a module belongs to the forward before it, an update to the
        # last backward.
        numbers = (
            batches.ffill()
            .fillna(batches.bfill())
            .groupby(iteration)
            .rank("dense")
            .sub(1)
            .fillna(numbers)
        )
    if "source" in phases:
        passes = phases[forward | phases["phase"].eq(BACKWARD)]
        # Most jobs have no iteration in which a forward follows a forward of the same
        # micro-step.
        ahead = passes["phase"].eq(FORWARD).mul(2).sub(1).groupby(iteration).cumsum()
        candidates = iteration[ahead.index[ahead > 1]].unique()
        for _, rows in passes[iteration.isin(candidates)[passes.index]].groupby(
            iteration
        ):
            if _is_pipeline(rows):
                numbers[rows.index] = rows.groupby("phase").cumcount()
                last = rows.index[-1]
                numbers[(phases.index > last) & iteration.eq(iteration[last])] = (
                    numbers[last]
                )
    return numbers.astype("int64")


def _is_pipeline(rows: pd.DataFrame) -> bool:
    """Return whether forwards of one module run ahead of as many backwards, in traces
    without known micro-batches."""
    forward = rows["phase"].eq(FORWARD)
    if (
        forward.sum() * 2 != len(rows)
        or rows["micro_batch"].any()
        or rows["source"][forward].nunique() != 1
    ):
        return False
    ahead = forward.astype(int).where(forward, -1).cumsum()
    return bool(rows["source"].max() > 0 and ahead.max() > 1 and ahead.min() >= 0)


def explain_no_iterations(phases: Iterable[str], stopped: Iterable[str | None]) -> str:
    """Return the warning about a trace without a finished iteration, by the phases that
    the trace has and by why the recordings of its ranks stopped."""
    seen = set(phases)
    if not seen and not {"cut off", "exec"}.isdisjoint(stopped):
        return (
            "no iteration was saved: the job's process was killed, left by os._exit or "
            "ran another program (exec), and its last second was lost"
        )
    if BACKWARD in seen:
        return "no training iteration ended while it was recorded"
    where = (
        "modules ran forward with gradients, but nothing ran backward"
        if FORWARD in seen
        else "nothing ran backward"
    )
    return (
        f"no training iteration was seen: {where}; phases that cannot be detected (a "
        "step compiled as one function) "
        'can be marked with Tracer(...).phase("forward"), "backward" and "update"'
    )

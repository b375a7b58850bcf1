"""Derives the phases and iterations of a process from its NVTX ranges."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from ebbtide.profiler.importers.kineto.intervals import outermost
from ebbtide.profiler.importers.kineto.marks import MarkKind, Marks
from ebbtide.profiler.importers.kineto.phases import FoundPhases, find_phases
from ebbtide.profiler.importers.nsys.range_names import RangeMeaning, RangeNames

_NUMBER = re.compile(r"[0-9]{1,15}")
_MARK_KINDS = {
    RangeMeaning.FORWARD: MarkKind.FORWARD,
    RangeMeaning.BACKWARD: MarkKind.BACKWARD,
    RangeMeaning.UPDATE: MarkKind.UPDATE,
}


def phases_of(ranges: pd.DataFrame, texts: list[str], names: RangeNames) -> FoundPhases:
    """Derive phases from ranges. Of ranges inside each other, the outermost that names a phase counts.

    Args:
        ranges: RANGE_COLUMNS of one process.
        texts: Texts of the column `name`.
        names: Meanings of names.

    Returns:
        Phases, and the marks of iterations, on the clock of the ranges.
    """
    used = np.unique(ranges["name"]).tolist()
    meanings = pd.Series({number: names.meaning(texts[number]) for number in used}, dtype=object)
    # Numbers in names count iterations: "step 12" and "step 13" are ranges of one name.
    kinds = {number: _NUMBER.sub("#", texts[number]) for number in used}
    ranges = ranges.assign(meaning=ranges["name"].map(meanings), kind=ranges["name"].map(kinds))
    ranges = ranges[ranges["meaning"] != RangeMeaning.OTHER]
    inner = ranges[ranges["meaning"].isin((RangeMeaning.FORWARD, RangeMeaning.BACKWARD))]
    surrounding = _with_starts_inside(ranges, inner)
    stated = ranges["name"].map({number: not names.may_surround(texts[number]) for number in used}).astype(bool)
    open_meaning = ranges["meaning"].isin((RangeMeaning.UPDATE, RangeMeaning.ITERATION)) & ~stated
    around = ranges["kind"].isin(ranges.loc[surrounding, "kind"])
    ranges.loc[open_meaning & around, "meaning"] = RangeMeaning.ITERATION
    ranges.loc[open_meaning & ~around & (ranges["meaning"] == RangeMeaning.ITERATION), "meaning"] = RangeMeaning.OTHER
    return find_phases(_marks(ranges, texts), [])


def _with_starts_inside(ranges: pd.DataFrame, inner: pd.DataFrame) -> pd.Series[bool]:
    """Return which ranges have others that begin inside them and end with them at the latest."""
    starts = np.sort(inner["start"].to_numpy(np.int64))
    first = np.searchsorted(starts, ranges["start"], side="left")
    inside = np.searchsorted(starts, ranges["end"], side="left") > first
    return pd.Series(inside, ranges.index)


def _marks(ranges: pd.DataFrame, texts: list[str]) -> Marks:
    marks = Marks()
    for meaning in (RangeMeaning.FORWARD, RangeMeaning.BACKWARD):
        rows = ranges[ranges["meaning"] == meaning]
        marks.words.add(rows["start"], rows["end"], np.full(len(rows), int(_MARK_KINDS[meaning])))
    updates = ranges[ranges["meaning"] == RangeMeaning.UPDATE]
    marks.updates.add(updates["start"], updates["end"], pd.factorize(updates["kind"])[0])
    iterations = _iterations(ranges[ranges["meaning"] == RangeMeaning.ITERATION], updates)
    marks.steps.add(iterations["start"], iterations["end"], _numbers([texts[name] for name in iterations["name"]]))
    return marks


def _iterations(candidates: pd.DataFrame, updates: pd.DataFrame) -> pd.DataFrame:
    """Return the ranges that mark iterations: those of the name with the most ranges.

    Where there are updates, most ranges of the name must have one inside: others mark micro-steps.
    """
    has_update = _with_starts_inside(candidates, updates)
    groups = candidates.assign(updated=has_update).groupby("kind", sort=False)["updated"]
    counts = groups.agg(["size", "sum"])
    if len(updates):
        counts = counts[2 * counts["sum"] > counts["size"]]
    if counts.empty:
        return candidates.iloc[:0]
    return outermost(candidates[candidates["kind"] == counts["size"].idxmax()])


def _numbers(names: list[str]) -> list[int]:
    """Return the last number in each name, or, where these do not ascend, the position."""
    last = [int(numbers[-1]) if (numbers := _NUMBER.findall(name)) else -1 for name in names]
    ascending = all(before < after for before, after in zip([-1, *last], last, strict=False))
    return last if ascending else [*range(len(names))]

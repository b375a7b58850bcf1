"""Derives the phases and iterations of a process from its NVTX ranges."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

import numpy as np
import pandas as pd

from ebbtide.features.importers.kineto.phases import (
    FoundPhases,
    MarkKind,
    Marks,
    find_phases,
    outermost,
)
from ebbtide.phases import BACKWARD, FORWARD, OTHER, UPDATE

# "forward_step", "DistributedDataParallel.forward", "ForwardPass", "step12" and "##
# backward ##" have the words forward, step; distributed, data, parallel, forward;
# forward, pass; step, 12; backward.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# Ranges of libraries, by the name of their domain or function.
_LIBRARY = re.compile(
    r"(nccl|rccl|cudnn|cublas|cufft|cusparse|cusolver|cccl|thrust|cub|nvshmem|tsl)",
    re.IGNORECASE,
)
_FORWARD, _BACKWARD = {"forward", "fwd"}, {"backward", "bwd"}
_OPTIMIZER, _UPDATE = {"optimizer", "optim"}, {"step", "update"}
_ITERATION = {"iteration", "iter", "batch", "minibatch"}
# "train_step" and "ProfilerStep#12" are iterations, "optimizer_step" and "step" are
# updates.
_WHOLE_STEP = {
    "train",
    "training",
    "trainer",
    "profiler",
    "global",
    "pretrain",
    "finetune",
}
_NUMBERED_STEP = re.compile(r"step[\s#:=_-]*[0-9]", re.IGNORECASE)
# Evaluation belongs to no phase, and neither do hooks around a phase, or what is done
# beside an update.
_OTHER = {
    "eval", "evaluate", "evaluation", "validate", "validation", "val", "test",
    "testing", "predict", "inference",
    "pre", "post", "hook", "prefetch", "scheduler", "lr", "epoch", "metrics",
    "logging", "progress",
}  # fmt: skip
_GRADIENTS = {"grad", "grads", "gradients"}
_NUMBER = re.compile(r"[0-9]{1,15}")


class RangeMeaning(Enum):
    """Meaning of a range for the phases: the values of `ebbtide import --phase
    NAME=MEANING`."""

    FORWARD = FORWARD
    BACKWARD = BACKWARD
    UPDATE = UPDATE
    ITERATION = "iteration"
    OTHER = OTHER


class RangeNames:
    """Determines the meaning of ranges by name.

    Names `stated` by the user come first, with `*` for any text.
    """

    def __init__(self, stated: Mapping[str, str]) -> None:
        patterns = [
            re.compile(".*".join(map(re.escape, name.split("*")))) for name in stated
        ]
        self._stated = [
            *zip(stated, patterns, map(RangeMeaning, stated.values()), strict=True)
        ]
        self.unused = set(stated)

    def meaning(self, name: str) -> RangeMeaning:
        """Return the meaning of a range. Where forward or backward run inside it,
        `may_surround` may correct it."""
        own_name = name.rpartition(":")[2]
        for stated, pattern, meaning in self._stated:
            if pattern.fullmatch(name) or pattern.fullmatch(own_name):
                self.unused.discard(stated)
                return meaning
        return _meaning(name)

    def may_surround(self, name: str) -> bool:
        """Return whether a range is an iteration if forward or backward run inside it.

        Examples are `step` and `train_step`.
        """
        if any(pattern.fullmatch(name) for _, pattern, _ in self._stated):
            return False
        return not _words(name) & _OPTIMIZER


def _words(name: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(name)}


def _meaning(name: str) -> RangeMeaning:
    words = _words(name)
    if (
        _LIBRARY.match(name)
        or words & _OTHER
        or ("zero" in words and words & _GRADIENTS)
    ):
        return RangeMeaning.OTHER
    forward, backward = bool(words & _FORWARD), bool(words & _BACKWARD)
    if forward and backward:
        return RangeMeaning.OTHER
    if forward or backward:
        return RangeMeaning.FORWARD if forward else RangeMeaning.BACKWARD
    if words & _OPTIMIZER:
        return RangeMeaning.UPDATE
    if words & _ITERATION or (
        "step" in words and (words & _WHOLE_STEP or _NUMBERED_STEP.search(name))
    ):
        return RangeMeaning.ITERATION
    return RangeMeaning.UPDATE if words & _UPDATE else RangeMeaning.OTHER


_MARK_KINDS = {
    RangeMeaning.FORWARD: MarkKind.FORWARD,
    RangeMeaning.BACKWARD: MarkKind.BACKWARD,
    RangeMeaning.UPDATE: MarkKind.UPDATE,
}


def phases_of(
    ranges: pd.DataFrame, texts: list[str], names: RangeNames, notes: list[str]
) -> FoundPhases:
    """Derive phases and iterations from ranges.

    A phase is the outermost range that names one; `texts` are for the column `name`.
    `notes` receives a line on ranges that never ended.
    """
    used = np.unique(ranges["name"]).tolist()
    meanings = pd.Series(
        {number: names.meaning(texts[number]) for number in used}, dtype=object
    )
    # Numbers in names count iterations: "step 12" and "step 13" are ranges of one name.
    kinds = {number: _NUMBER.sub("#", texts[number]) for number in used}
    ranges = ranges.assign(
        meaning=ranges["name"].map(meanings), kind=ranges["name"].map(kinds)
    )
    ranges = _popped(ranges[ranges["meaning"] != RangeMeaning.OTHER], notes)
    inner = ranges[
        ranges["meaning"].isin((RangeMeaning.FORWARD, RangeMeaning.BACKWARD))
    ]
    surrounding = _with_starts_inside(ranges, inner)
    stated = (
        ranges["name"]
        .map({number: not names.may_surround(texts[number]) for number in used})
        .astype(bool)
    )
    open_meaning = (
        ranges["meaning"].isin((RangeMeaning.UPDATE, RangeMeaning.ITERATION)) & ~stated
    )
    around = ranges["kind"].isin(ranges.loc[surrounding, "kind"])
    ranges.loc[open_meaning & around, "meaning"] = RangeMeaning.ITERATION
    ranges.loc[
        open_meaning & ~around & (ranges["meaning"] == RangeMeaning.ITERATION),
        "meaning",
    ] = RangeMeaning.OTHER
    return find_phases(_marks(ranges, texts), [])


def _popped(ranges: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Let ranges that were never popped, which all end with the recording, end where
    the next one of their name begins."""
    rows = ranges.sort_values("start", kind="stable")
    same = [rows["thread"], rows["kind"], rows["end"]]
    following = rows.groupby(same)["start"].shift(-1)
    unpopped = following.notna() & (following > rows["start"])
    if not unpopped.any():
        return ranges
    # The last one, which ended with the recording, too, is as long as the others.
    lengths = (following - rows["start"]).where(unpopped)
    lengths = lengths.fillna(lengths.groupby(same).transform("median"))
    ends = (rows["start"] + lengths).fillna(rows["end"]).astype(np.int64)
    notes.append(
        "NVTX ranges that were never popped end where the next one of their name "
        f"begins: {int(unpopped.sum()):,}"
    )
    return rows.assign(end=ends).sort_index()


def _with_starts_inside(ranges: pd.DataFrame, inner: pd.DataFrame) -> pd.Series[bool]:
    """Return which ranges have others that begin inside them.

    The others end with them at the latest.
    """
    starts = np.sort(inner["start"].to_numpy(np.int64))
    first = np.searchsorted(starts, ranges["start"], side="left")
    inside = np.searchsorted(starts, ranges["end"], side="left") > first
    return pd.Series(inside, ranges.index)


def _marks(ranges: pd.DataFrame, texts: list[str]) -> Marks:
    marks = Marks()
    for meaning in (RangeMeaning.FORWARD, RangeMeaning.BACKWARD):
        rows = ranges[ranges["meaning"] == meaning]
        marks.words.add(
            rows["start"], rows["end"], np.full(len(rows), int(_MARK_KINDS[meaning]))
        )
    updates = ranges[ranges["meaning"] == RangeMeaning.UPDATE]
    marks.updates.add(
        updates["start"], updates["end"], pd.factorize(updates["kind"])[0]
    )
    iterations = _iterations(
        ranges[ranges["meaning"] == RangeMeaning.ITERATION], updates
    )
    marks.steps.add(
        iterations["start"],
        iterations["end"],
        _numbers([texts[name] for name in iterations["name"]]),
    )
    return marks


def _iterations(candidates: pd.DataFrame, updates: pd.DataFrame) -> pd.DataFrame:
    """Return the ranges that mark iterations, which have the name with the most ranges.

    Where there are updates, most ranges of the name must have one inside: others mark
    micro-steps."""
    has_update = _with_starts_inside(candidates, updates)
    groups = candidates.assign(updated=has_update).groupby("kind", sort=False)[
        "updated"
    ]
    counts = groups.agg(["size", "sum"])
    if len(updates):
        counts = counts[2 * counts["sum"] > counts["size"]]
    if counts.empty:
        return candidates.iloc[:0]
    return outermost(candidates[candidates["kind"] == counts["size"].idxmax()])


def _numbers(names: list[str]) -> list[int]:
    """Return the last number in each name; -1 for a name without one."""
    return [
        int(numbers[-1]) if (numbers := _NUMBER.findall(name)) else -1 for name in names
    ]

"""Meaning of the names of NVTX ranges."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

from ebbtide.phases import BACKWARD, FORWARD, OTHER, UPDATE


class RangeMeaning(Enum):
    """Meaning of a range for the phases. The values are those of `ebbtide import --phase NAME=MEANING`."""

    FORWARD = FORWARD
    BACKWARD = BACKWARD
    UPDATE = UPDATE
    ITERATION = "iteration"
    OTHER = OTHER


# "forward_step", "DistributedDataParallel.forward", "ForwardPass", "step12" and "## backward ##" have the words
# forward, step; distributed, data, parallel, forward; forward, pass; step, 12; backward.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# Ranges of libraries, by the name of their domain or function.
_LIBRARY = re.compile(r"(nccl|rccl|cudnn|cublas|cufft|cusparse|cusolver|cccl|thrust|cub|nvshmem|tsl)", re.IGNORECASE)
_FORWARD, _BACKWARD = {"forward", "fwd"}, {"backward", "bwd"}
_OPTIMIZER, _UPDATE = {"optimizer", "optim"}, {"step", "update"}
_ITERATION = {"iteration", "iter", "batch", "minibatch"}
# "train_step" and "ProfilerStep#12" are iterations, "optimizer_step" and "step" are updates.
_WHOLE_STEP = {"train", "training", "trainer", "profiler", "global", "pretrain", "finetune"}
_NUMBERED_STEP = re.compile(r"step[\s#:=_-]*[0-9]", re.IGNORECASE)
# Evaluation belongs to no phase, and neither do hooks around a phase, or what is done beside an update.
_OTHER = {
    "eval", "evaluate", "evaluation", "validate", "validation", "val", "test", "testing", "predict", "inference",
    "pre", "post", "hook", "prefetch", "scheduler", "lr", "epoch", "metrics", "logging", "progress",
}  # fmt: skip
_GRADIENTS = {"grad", "grads", "gradients"}


class RangeNames:
    """Determines the meaning of ranges by their names.

    Args:
        stated: Meanings by name, as the user states them. `*` in a name stands for any text.
    """

    def __init__(self, stated: Mapping[str, str]) -> None:
        self._stated = [(name, _pattern(name), RangeMeaning(meaning)) for name, meaning in stated.items()]
        self.unused = set(stated)

    def meaning(self, name: str) -> RangeMeaning:
        """Return the meaning of a range. Where forward or backward run inside it, `may_surround` may correct it."""
        own_name = name.rpartition(":")[2]
        for stated, pattern, meaning in self._stated:
            if pattern.fullmatch(name) or pattern.fullmatch(own_name):
                self.unused.discard(stated)
                return meaning
        return _meaning(name)

    def may_surround(self, name: str) -> bool:
        """Return whether a range is a whole iteration if forward or backward run inside it: `step`, `train_step`."""
        if any(pattern.fullmatch(name) for _, pattern, _ in self._stated):
            return False
        return not _words(name) & _OPTIMIZER


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, name.split("*"))))


def _words(name: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(name)}


def _meaning(name: str) -> RangeMeaning:
    words = _words(name)
    if _LIBRARY.match(name) or words & _OTHER or ("zero" in words and words & _GRADIENTS):
        return RangeMeaning.OTHER
    forward, backward = bool(words & _FORWARD), bool(words & _BACKWARD)
    if forward and backward:
        return RangeMeaning.OTHER
    if forward or backward:
        return RangeMeaning.FORWARD if forward else RangeMeaning.BACKWARD
    if words & _OPTIMIZER:
        return RangeMeaning.UPDATE
    if words & _ITERATION or ("step" in words and (words & _WHOLE_STEP or _NUMBERED_STEP.search(name))):
        return RangeMeaning.ITERATION
    return RangeMeaning.UPDATE if words & _UPDATE else RangeMeaning.OTHER

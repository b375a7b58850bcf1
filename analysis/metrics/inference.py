"""Steps of inference: forwards, prefill and decode of servers, by names that tell."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from ebbtide.phases import FORWARD
from ebbtide.profiler.trace import Trace

# vLLM: execute_context_2(512)_generation_14(14), the requests and tokens of each;
# SGLang: forward_extend, forward_decode.
_BATCH = re.compile(r"execute_context_(\d+)\(")
_WORDS = {
    "prefill": re.compile(r"prefill|forward_extend", re.IGNORECASE),
    "decode": re.compile(r"decode(?!r)", re.IGNORECASE),
}


class InferenceSteps(NamedTuple):
    """Steps of one kind over a whole trace."""

    kind: str  # `forward`, `prefill` or `decode`.
    runs: int
    median_ms: float


def inference_steps(trace: Trace, rank: int) -> list[InferenceSteps]:
    """Return the forwards of a rank without iterations, and its steps of a server."""
    phases = trace.columns(rank, "phases")
    own = phases.equal("phase", FORWARD)
    lengths = {FORWARD: (phases.ints("end_ns") - phases.ints("start_ns"))[own]}
    rows = trace.columns(rank, "annotations")
    codes, names = rows.codes("name")
    by_kind: defaultdict[str, list[int]] = defaultdict(list)
    for code, name in enumerate(names):
        if (kind := _kind(name)) is not None:
            by_kind[kind].append(code)
    for kind, own_codes in sorted(by_kind.items(), reverse=True):
        of_kind = np.isin(codes, own_codes)
        lengths[kind] = (rows.ints("end_ns") - rows.ints("start_ns"))[of_kind]
    return [
        InferenceSteps(kind, len(values), float(np.median(values)) / 1e6)
        for kind, values in lengths.items()
        if len(values)
    ]


def _kind(name: str) -> str | None:
    """Return the kind of a step by its name; a batch with both is a prefill."""
    if batch := _BATCH.search(name):
        return "prefill" if int(batch[1]) else "decode"
    kinds = [kind for kind, words in _WORDS.items() if words.search(name)]
    return kinds[0] if len(kinds) == 1 else None

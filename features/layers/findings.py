"""A rule on frozen weights that go to the host though the host has them."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.findings.needs import GPU, ITERATIONS, MIN_SHARE
from ebbtide.analysis.findings.rule import Need, rule
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.link import SteadyCopies
from ebbtide.analysis.metrics.link_throughput import copied_iterations
from ebbtide.analysis.timeseries.step_functions import union_length
from ebbtide.phases import BACKWARD, FORWARD, OTHER
from ebbtide.units import bytes_text, ms_text

# Smaller copies are no weights of blocks.
_LEAST_BYTES = 1 << 20
# As many of the bytes that go down come up again, in copies of the same sizes.
_SAME_SHARE = 0.9
_PARTS = (OTHER, FORWARD, BACKWARD)


def _trained_share(metrics: JobMetrics) -> float:
    model = metrics.entry.model
    return (model.trainable_params or 0) / max(model.total_params or 0, 1)


FROZEN = Need(
    "a model whose weights are frozen for the most part",
    lambda metrics: 0 < _trained_share(metrics) < 0.5,
)


class _Down(NamedTuple):
    """Copies to the host that come up again in the same part of an iteration."""

    copies: int
    nbytes: float
    ms: float


@rule("frozen-weights-down", ITERATIONS, GPU, FROZEN)
def frozen_weights_down(metrics: JobMetrics) -> Finding | None:
    """Find copies to the host which come up again in the same part of an iteration: of
    activations, those of a forward come up in the backward."""
    rank = metrics.trace.ranks[0]
    rows = metrics.steady_copies
    rows = rows.only((rows.ranks == rank) & (rows.copies.bytes >= _LEAST_BYTES))
    iterations = max(len(copied_iterations(metrics.trace, rank)), 1)
    parts = [_down_again(rows.only(rows.phases == part)) for part in _PARTS]
    count = round(sum(part.copies for part in parts) / iterations)
    nbytes = sum(part.nbytes for part in parts) / iterations
    saved_ms = sum(part.ms for part in parts) / iterations
    iteration_ms = metrics.iteration_ms or 0.0
    if not count or saved_ms < MIN_SHARE * iteration_ms:
        return None
    evidence = [
        f"{count:,} copies an iteration, {bytes_text(nbytes)} in {ms_text(saved_ms)} "
        f"of {ms_text(iteration_ms)}, go to the host and come up again in the same "
        "phase",
        f"{100 * _trained_share(metrics):.2g} % of the parameters are trained",
    ]
    free = metrics.always_free_bytes or 0
    fewer = ""
    if free >= _LEAST_BYTES:
        evidence.append(f"{bytes_text(free)} of the device are always free")
        fewer = f"; swap fewer blocks, by the {bytes_text(free)} that are always free"
    return frozen_weights_down.finding(
        "Frozen weights are copied to the host unchanged",
        clamp_gain(saved_ms),
        evidence,
        "keep the host's copy and drop the device's: copies up only (musubi-tuner: "
        f"--block_swap_h2d_only) save the copies down{fewer}",
    )


def _down_again(rows: SteadyCopies) -> _Down:
    """Return the copies down of a part; none where other sizes come up."""
    copies = rows.copies
    is_down = copies.directions == "d2h"
    down, up = copies.only(is_down), copies.only(~is_down)
    same = Counter(down.bytes.tolist()) & Counter(up.bytes.tolist())
    total = float(np.sum(down.bytes))
    if not total or sum(size * n for size, n in same.items()) < _SAME_SHARE * total:
        return _Down(0, 0.0, 0.0)
    return _Down(len(down.starts), total, union_length(down.starts, down.ends) / 1e6)

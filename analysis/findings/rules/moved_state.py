"""A rule on copies around the optimizer's step."""

from typing import NamedTuple

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.findings.needs import GPU, ITERATIONS
from ebbtide.analysis.findings.rule import rule
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.link_throughput import copied_iterations
from ebbtide.analysis.metrics.recorded_free_memory import is_ebbtides
from ebbtide.phases import OTHER, UPDATE
from ebbtide.units import bytes_text, ms_text

# As much of an iteration as `between-phases` calls much.
_MIN_SHARE = 0.15
# State that moves has this many times its recorded bytes in each direction, at least
# and at most.
_LEAST, _MOST = 0.8, 1.25
# A copy of a counter has at most so many bytes, and an iteration so many of them.
_COUNTER_BYTES, _MIN_COUNTERS = 64, 32


class _Moves(NamedTuple):
    """Copies in a part of the iteration, of the rank that copies longest."""

    ms: float
    up_bytes: float
    down_bytes: float

    def are_state(self, state_bytes: float) -> bool:
        """Whether as much as the state moves in each direction."""
        low, high = _LEAST * state_bytes, _MOST * state_bytes
        return all(low <= size <= high for size in (self.up_bytes, self.down_bytes))


@rule("copies-around-step", ITERATIONS, GPU)
def copies_around_step(metrics: JobMetrics) -> Finding | None:
    """Compare the time of copies outside phases, and of state that moves in the update,
    with the iteration."""
    if metrics.setup is not None or any(map(is_ebbtides, metrics.entry.optimizers)):
        # These move state by a plan, and have rules of their own.
        return None
    state_bytes = float(sum(one.state_bytes or 0 for one in metrics.entry.optimizers))
    moves, update = _moves(metrics, OTHER), _moves(metrics, UPDATE)
    both = _Moves(*map(sum, zip(moves, update, strict=True)))
    is_state = bool(state_bytes) and both.are_state(state_bytes)
    moves = both if is_state else moves
    iteration_ms = metrics.iteration_ms or 0.0
    if moves.ms < _MIN_SHARE * iteration_ms:
        return None
    share = 100 * moves.ms / iteration_ms
    evidence = [
        f"copies run in {ms_text(moves.ms)} of {ms_text(iteration_ms)} "
        f"({share:.0f} %): {bytes_text(moves.up_bytes)} to the device, "
        f"{bytes_text(moves.down_bytes)} to the host",
        *_counters(metrics),
    ]
    title, advice = (
        "Copies fill the time outside forward, backward and update",
        _EARLIER,
    )
    if is_state:
        title = "State of the optimizer moves to the device and back around each step"
        advice = _advice(metrics, state_bytes)
    return copies_around_step.finding(title, clamp_gain(moves.ms), evidence, advice)


_EARLIER = (
    "start these copies while the GPU computes (pinned memory, non_blocking=True, a "
    "stream of their own): gradients as the backward makes them, parameters before "
    "their use"
)


def _advice(metrics: JobMetrics, state_bytes: float) -> str:
    free = metrics.always_free_bytes
    if free is not None and free >= state_bytes:
        return (
            f"keep the state on the device: its {bytes_text(state_bytes)} fit into the "
            f"{bytes_text(free)} that are always free; leave step counters on the host"
        )
    return (
        "update on the CPU, or copy the state in as the backward frees memory, from "
        "pinned memory; leave step counters on the host (`ebbtide replay --recommend` "
        "has the fastest plan)"
    )


def _moves(metrics: JobMetrics, phase: str) -> _Moves:
    """Return the copies in a phase; the time is that in which any runs."""
    ranks = [
        _Moves(
            metrics.copy_ms(up, down),
            up.bytes or 0.0,
            down.bytes or 0.0,
        )
        for up, down in metrics.both_directions(phase)
    ]
    return max(ranks, default=_Moves(0.0, 0.0, 0.0))


def _counters(metrics: JobMetrics) -> list[str]:
    """Return the evidence of counters that are copied one by one."""
    rank, rows = metrics.trace.ranks[0], metrics.steady_copies
    is_small = (rows.copies.bytes <= _COUNTER_BYTES) & (rows.ranks == rank)
    iterations = len(copied_iterations(metrics.trace, rank))
    count = round(int(is_small.sum()) / max(iterations, 1))
    if count < _MIN_COUNTERS:
        return []
    return [
        f"{count:,} copies an iteration have at most {_COUNTER_BYTES} B: step counters "
        "are read, or moved, one by one"
    ]

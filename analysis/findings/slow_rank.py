"""Finds ranks that the others wait for, and ranks or hosts that differ from the others."""

from __future__ import annotations

from typing import NamedTuple

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.metrics.iteration_stats import compare_iterations
from ebbtide.analysis.metrics.ranks.comparison import rank_differences
from ebbtide.analysis.metrics.ranks.differences import RankDifference, ranks_text
from ebbtide.analysis.metrics.ranks.rank_series import rank_series
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.phases import PHASES
from ebbtide.units import ms_text

# A rank that is slowest in at least this share of the iterations is not so by chance.
_MIN_SLOWEST_SHARE = 0.8
_MIN_SLOWER = 0.02
_MIN_ITERATIONS = 3
# More ranks are in the table of `ebbtide summary`.
_MAX_LINES = 8
_ADVICE = {
    "slow link": "check lanes and generation of the link (nvidia-smi -q), the switch it shares, and the kernel log",
    "slow clock": "check power limit, temperature and fans (nvidia-smi -q -d PERFORMANCE)",
    "less free memory": "look for other processes on that GPU, and for state or buffers that only this rank holds",
}
_ADVICE_ON_TIME = "look at that rank's clocks, temperature, link width, CPU binding and share of the work"
_ADVICE_ON_DELAY = "look at what that rank does before the phase: data loading, logging, host work"


class _SlowestRank(NamedTuple):
    """The rank that is slowest most often, what its phases take longer than those of the median other rank (ms), and
    the evidence."""

    rank: int
    longer_ms: float
    evidence: tuple[str, ...]


def check(metrics: TraceMetrics) -> Finding | None:
    """Compare the phase times of the rank that is slowest most often with those of the median other rank, and list the
    ranks and hosts of `rank_differences` with their causes."""
    slowest = _slowest_rank(metrics)
    differences = rank_differences(metrics.trace).differences
    if slowest is None and not differences:
        return None
    gains = [difference.extra_ms for difference in differences if difference.extra_ms]
    gains += [slowest.longer_ms] if slowest is not None else []
    evidence = [*(slowest.evidence if slowest is not None else ()), *map(_evidence, differences[:_MAX_LINES])]
    if len(differences) > _MAX_LINES:
        evidence.append(f"{len(differences) - _MAX_LINES} more: `ebbtide summary` lists them")
    advice = dict.fromkeys(_advice(difference.cause) for difference in differences)
    return Finding(
        "slow-rank",
        _title(slowest, differences),
        clamp_gain(max(gains)) if gains else None,
        tuple(evidence),
        "; ".join(advice) or _ADVICE_ON_TIME,
    )


def _slowest_rank(metrics: TraceMetrics) -> _SlowestRank | None:
    stats = compare_iterations(metrics.trace, [])
    if not stats.slowest_rank or stats.counted < _MIN_ITERATIONS:
        return None
    rank, count = max(stats.slowest_rank.items(), key=lambda item: item[1])
    columns = [f"{phase}_ms" for phase in PHASES]
    busy = {r: float(rank_series(metrics.trace, r)[columns].median().sum()) for r in stats.slowest_rank}
    others = sorted(ms for r, ms in busy.items() if r != rank)
    usual = others[len(others) // 2]
    longer = busy[rank] - usual
    if count < _MIN_SLOWEST_SHARE * stats.counted or not usual or longer < _MIN_SLOWER * usual:
        return None
    evidence = (
        f"rank {rank} is the slowest in {count} of {stats.counted} iterations",
        f"its phases take {ms_text(busy[rank])}, those of the median other rank {ms_text(usual)}",
    )
    return _SlowestRank(rank, longer, evidence)


def _title(slowest: _SlowestRank | None, differences: tuple[RankDifference, ...]) -> str:
    if slowest is not None and {rank for difference in differences for rank in difference.ranks} <= {slowest.rank}:
        return f"Rank {slowest.rank} is slower than the others"
    if len(differences) == 1:
        name = differences[0].name
        return f"{name[0].upper()}{name[1:]} differs from the others: {differences[0].cause}"
    ranks = [difference.ranks[0] for difference in differences if not difference.is_host]
    hosts = [difference.host for difference in differences if difference.is_host]
    parts = [f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}"] if hosts else []
    parts += [f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}"] if ranks else []
    return f"{' and '.join(parts).capitalize()} differ from the others"


def _evidence(difference: RankDifference) -> str:
    where = f" ({ranks_text(difference.ranks)})" if difference.is_host else ""
    where = f" on {difference.host}" if difference.host and not difference.is_host else where
    details = [*(deviation.text for deviation in difference.deviations), *difference.facts]
    return f"{difference.name}{where}: {difference.cause}: {'; '.join(details)}"


def _advice(cause: str) -> str:
    if cause.startswith("late "):
        return _ADVICE_ON_DELAY
    return _ADVICE.get(cause, _ADVICE_ON_TIME)

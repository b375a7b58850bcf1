"""Rule on GPUs whose clocks a power or thermal limit lowers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.findings.needs import GPU, ITERATIONS
from ebbtide.analysis.findings.rule import Need, rule
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.units import ms_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.gpu_state import GpuFigure

THROTTLE_REASONS = Need(
    "SM clocks and throttle reasons of the GPU in the iterations (`ebbtide profile` records them)",
    lambda metrics: {"sm_clock", "throttled"} <= {figure.quantity for figure in metrics.gpu().figures},
)
# Less than this share of the iteration, or clocks that fall by less than this share, are not reported: cards that work
# hard run at their power limit now and then.
_MIN_TIME_SHARE = 0.1
_MIN_CLOCK_LOSS = 0.05
_ADVICE_ON_POWER = "compare the power limit with the card's default (nvidia-smi -q -d POWER)"
_ADVICE_ON_HEAT = "check temperature, fans and airflow (nvidia-smi -q -d TEMPERATURE)"


@rule("throttled-clocks", GPU, ITERATIONS, THROTTLE_REASONS)
def throttled_clocks(metrics: JobMetrics) -> Finding | None:
    """Compare the time with lowered clocks with the iteration, of the rank that loses most.

    The time of each phase is lost by its throttled share, times what its mean clock is below the rank's highest one."""
    iteration = metrics.iteration_ms
    if iteration is None:
        return None
    losses = {rank: _loss(metrics, rank) for rank in metrics.trace.ranks}
    rank = max(losses, key=lambda number: losses[number])
    lost, throttled = losses[rank]
    if throttled < _MIN_TIME_SHARE * iteration or lost < _MIN_CLOCK_LOSS * throttled:
        return None
    reasons = _reasons(metrics, rank)
    evidence = [
        f"rank {rank}: a power or thermal limit lowers the clocks for {ms_text(throttled)} of {ms_text(iteration)} "
        f"({100 * throttled / iteration:.0f} %), by {100 * lost / throttled:.0f} % below the highest SM clock on "
        "average",
        *(f"{name}: {100 * share:.0f} % of the samples" for name, share in reasons.items()),
    ]
    has_heat = any("thermal" in name for name in reasons)
    has_power = any("power" in name for name in reasons)
    advice = [text for text, given in ((_ADVICE_ON_HEAT, has_heat), (_ADVICE_ON_POWER, has_power)) if given]
    return throttled_clocks.finding(
        "A power or thermal limit lowers the GPU's clocks",
        clamp_gain(lost),
        evidence,
        "; ".join(advice) or "ask for the reason: nvidia-smi -q -d PERFORMANCE",
    )


def _loss(metrics: JobMetrics, rank: int) -> tuple[float, float]:
    """Return (ms that an iteration loses by lowered clocks, ms in which they are lowered) of a rank."""
    by_quantity: dict[str, dict[str, GpuFigure]] = {}
    for figure in metrics.gpu([rank]).figures:
        by_quantity.setdefault(figure.quantity, {})[figure.phase] = figure
    clocks = by_quantity.get("sm_clock", {})
    highest = max((figure.max for figure in clocks.values()), default=0.0)
    lost = throttled = 0.0
    for phase, figure in by_quantity.get("throttled", {}).items():
        if phase in clocks and highest > 0:
            milliseconds = (metrics.phase_ms(phase) or 0.0) * figure.mean / 100
            throttled += milliseconds
            lost += milliseconds * (1 - clocks[phase].mean / highest)
    return lost, throttled


def _reasons(metrics: JobMetrics, rank: int) -> Mapping[str, float]:
    """Return the share of the steady iterations' samples in which each limit was reached, of those that were."""
    from ebbtide.analysis.metrics.gpu_state import LIMITS
    from ebbtide.analysis.metrics.iterations import intervals

    spans = intervals(metrics.trace, rank).spans
    spans = spans[spans["iteration"].isin(metrics.steady_iterations)]
    rows = metrics.trace.gpu(rank)
    own = rows["t_ns"].between(spans["start_ns"].min(), spans["end_ns"].max())
    own &= (rows["device"] == metrics.rank(rank).device.device) & rows["throttle_reasons"].notna()
    bits = rows.loc[own, "throttle_reasons"].astype("int64")
    shares = {name: float((bits & bit != 0).mean()) for bit, name in LIMITS.items()}
    return {name: share for name, share in shares.items() if share > 0}

"""Draws the iterations of each run by phase, and the state on the device."""

from __future__ import annotations

from matplotlib.figure import Figure

from ebbtide.features.run.comparison.comparison import (
    JobComparison,
    predicted_ms,
    total_bytes,
)
from ebbtide.features.run.comparison.job_runs import JobRun
from ebbtide.interleave.compare.picture import EMULATED, TITLE
from ebbtide.interleave.replay.pictures import policy_bars
from ebbtide.interleave.replay.replay import RESULT_BYTES
from ebbtide.phases import BACKWARD, FORWARD, OTHER, PHASES, UPDATE

_RUN_HEIGHT = 0.62


def draw_job_comparison(comparison: JobComparison) -> Figure:
    """Draw each run's medians by phase, measured and predicted."""
    bars = [
        bar
        for number, run in enumerate(comparison.runs)
        for bar in _bars(run, number * policy_bars.POLICY_STEP)
    ]
    height = 1.3 + _RUN_HEIGHT * len(comparison.runs)
    figure = policy_bars.figure_for(policy_bars.byte_kinds(bars), height)
    figure.set_label("ebbtide: policies on the job, measured and predicted")
    policy_bars.draw_medians(figure, bars)
    device = "a GPU" if comparison.emulated_link is None else EMULATED
    losses = "equal bit for bit" if comparison.status == 0 else "NOT EQUAL"
    command = " ".join(comparison.command)
    figure.suptitle(f"{command[:80]}\n{device}; losses {losses}", **TITLE)
    return figure


def _bars(run: JobRun, position: float) -> list[policy_bars.PolicyBar]:
    measured = policy_bars.PolicyBar(
        name=run.policy,
        phases_ms={part: run.times_ms.get(part, 0.0) for part in (OTHER, *PHASES)},
        bytes_by_kind=_bytes(run, ""),
        position=position,
        median_ms=run.times_ms.get("iteration"),
    )
    iteration, update = (predicted_ms(run, phase) for phase in ("iteration", UPDATE))
    if iteration is None or update is None:
        return [measured]
    predicted = policy_bars.PolicyBar(
        name="predicted",
        phases_ms=_predicted_phases(run, iteration, update),
        bytes_by_kind=_bytes(run, "predicted_"),
        is_faint=True,
        position=position + policy_bars.PAIR_STEP,
        median_ms=iteration,
    )
    return [measured, predicted]


def _predicted_phases(
    run: JobRun, iteration_ms: float, update_ms: float
) -> dict[str, float]:
    """Return the phases of a prediction, of which only the update is simulated.

    Forward and backward have their measured shares.
    """
    other_ms = run.times_ms.get(OTHER, 0.0)
    compute_ms = iteration_ms - other_ms - update_ms
    forward, backward = (run.times_ms.get(phase, 0.0) for phase in (FORWARD, BACKWARD))
    share = forward / (forward + backward) if forward + backward else 0.0
    return {
        OTHER: other_ms,
        FORWARD: share * compute_ms,
        BACKWARD: (1 - share) * compute_ms,
        UPDATE: update_ms,
    }


def _bytes(run: JobRun, prefix: str) -> dict[str, float]:
    keys = f"{prefix}device_bytes", f"{prefix}host_bytes"
    sizes = [total_bytes(run, key) or 0.0 for key in keys]
    return dict.fromkeys(RESULT_BYTES, 0.0) | dict(
        zip(RESULT_BYTES, sizes, strict=False)
    )

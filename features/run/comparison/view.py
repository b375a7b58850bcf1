"""The table of a comparison on the user's own job."""

from __future__ import annotations

from ebbtide.analysis.tables.table import Table, View, ms, text
from ebbtide.features.run.comparison.comparison import (
    JobComparison,
    exposed_ms,
    measured_ms,
    predicted_ms,
    total_bytes,
)
from ebbtide.features.run.comparison.job_runs import JobRun
from ebbtide.interleave.compare.tables import emulation_lines
from ebbtide.units import bytes_text

_NOTE = (
    "Predicted: phases by the simulation, and the measured time outside of them. "
    "Exposed: what updates add to forward and backward. On device: the most state and "
    "buffers there."
)


def job_comparison_view(comparison: JobComparison) -> View:
    """Return what is equal, and the times and bytes of each run."""
    yield from _verdict(comparison)
    yield _distance_line(comparison)
    yield from emulation_lines(comparison.emulated_link)
    if comparison.link_of is not None:
        yield (
            f"The link is that of {comparison.link_of}, slower by as much as this CPU "
            "computes slower than its GPU."
        )
    yield _table(comparison)
    for run in comparison.runs[1:]:
        yield from _remarks(run)
    if comparison.is_in_place:
        yield (
            "The folder is too large to copy: all runs had it in turn, so one may have "
            "read what another has written."
        )


def _verdict(comparison: JobComparison) -> View:
    policies = len(comparison.runs) - 1
    if comparison.reason:
        yield f"nothing was compared: {comparison.reason}"
    elif comparison.self_difference:
        yield (
            "the job differs from itself, so no policy is to blame: "
            f"{comparison.self_difference}"
        )
    elif comparison.difference:
        yield f"{comparison.difference}: this is a bug, please report it"
    elif policies > 1:
        yield (
            f"losses and parameters: equal bit for bit in {comparison.steps} steps "
            f"under {policies} policies"
        )


def _remarks(run: JobRun) -> View:
    for reason in run.failures:
        yield f"{run.name}: {reason}; it ran under zero-offload"
    for end in run.ends:
        if end["left"]:
            yield f"{run.name}, optimizer {end['optimizer']}: {end['left']}"


def _distance_line(comparison: JobComparison) -> str:
    own, kernels = comparison.to_bare, comparison.of_kernels
    line = (
        f"to the job as it is: losses {own.loss:.1e} (relative), parameters "
        f"{own.params:.1e}"
    )
    if kernels is None:
        return line
    return (
        f"{line}; between two kernels of torch: {kernels.loss:.1e} and "
        f"{kernels.params:.1e}"
    )


def _table(comparison: JobComparison) -> Table:
    columns = (
        text("policy", lambda run: run.policy),
        ms("iteration", lambda run: measured_ms(run, "iteration")),
        ms("predicted", lambda run: predicted_ms(run, "iteration")),
        text("ratio", _ratio_text),
        ms("exposed", exposed_ms),
        text("on device", lambda run: _bytes_text(run, "device_bytes")),
        text("up", lambda run: _bytes_text(run, "h2d_bytes")),
        text("down", lambda run: _bytes_text(run, "d2h_bytes")),
    )
    device = (
        "a GPU" if comparison.emulated_link is None else "an EMULATED device, not a GPU"
    )
    title = f"Iterations on {device} (medians)"
    return Table("runs", title, columns, comparison.runs, _NOTE, max_rows=None)


def _ratio_text(run: JobRun) -> str | None:
    measured, predicted = measured_ms(run, "iteration"), predicted_ms(run, "iteration")
    return f"{measured / predicted:.2f}" if measured and predicted else None


def _bytes_text(run: JobRun, key: str) -> str | None:
    size = total_bytes(run, key)
    return None if size is None else bytes_text(size)

"""The tables of a summary: phases, memory, copies, storage, state of the GPUs, and
figures of a whole trace."""

from collections.abc import Iterator, Sequence
from operator import itemgetter

from ebbtide.analysis.metrics.devices import capacity_name
from ebbtide.analysis.metrics.gpu_state import GpuFigure
from ebbtide.analysis.metrics.inference import inference_steps
from ebbtide.analysis.metrics.iteration_mean import mean_text
from ebbtide.analysis.metrics.missing import no_iterations
from ebbtide.analysis.metrics.storage_use import StorageUse
from ebbtide.analysis.metrics.summary import PhaseSummary, Summary, Totals
from ebbtide.analysis.tables.ranks import differences_table
from ebbtide.analysis.tables.table import (
    Gain,
    Table,
    View,
    always_free,
    free_note,
    ms,
    number,
    share,
    size,
    text,
)
from ebbtide.profiler.trace import Trace
from ebbtide.seams import load_all
from ebbtide.units import bytes_text, counted, ms_text, range_text

# Field of `Totals` -> its label, and whether it sums all ranks.
TOTALS = {
    "span_ms": ("from first to last record", False),
    "min_free_bytes": ("least free memory", False),
    "h2d_bytes": ("bytes to the device (h2d)", True),
    "d2h_bytes": ("bytes to the host (d2h)", True),
    "compute_ms": ("GPU: compute", True),
    "communication_ms": ("GPU: communication", True),
    "copy_ms": ("GPU: copies", True),
    "idle_ms": ("GPU: idle", True),
}
_NS_PER_MS = 1e6
_MAX_OPERATORS = 8
_NOTE = (
    "Smallest value, mean over time and largest value over the steady iterations (else "
    "the whole trace) and all ranks. "
    "Utilization is NVML's own mean over 1/6 to 1 s, so shorter phases also show their "
    "neighbours."
)


def phase_table(trace: Trace, summary: Summary) -> Table:
    """Return the table of an iteration and its phases."""
    whole = summary.iteration_range
    bounds = () if whole is None else (whole.low_ms, whole.high_ms)
    heading = "range (a guess)" if whole is not None and whole.is_guess else "range"
    total = PhaseSummary("iteration", 0, summary.iteration_ms, *(None,) * 6, *bounds)
    ranges = text(
        heading,
        lambda row: None if row.low_ms is None else range_text(row.low_ms, row.high_ms),
    )
    columns = (
        text("phase", "phase"),
        ms("time", "median_ms"),
        ranges if summary.is_predicted else ms("p95", "p95_ms"),
        share("share", "share"),
        size(f"peak {summary.memory.pool or 'memory'}", "peak_bytes"),
        size("free at peak", "min_free_bytes"),
        size("h2d", "h2d_bytes"),
        size("d2h", "d2h_bytes"),
    )
    counted = summary.iterations - summary.warmup_iterations
    scope = f"Medians over {counted} iterations" if counted > 1 else "One iteration"
    scope += (
        ", times of the slowest rank, bytes the median of ranks"
        if summary.ranks > 1
        else ""
    )
    note = (
        f"{free_note(trace)}{always_free(trace)}"
        if any(row.min_free_bytes for row in summary.phases)
        else None
    )
    return Table("phases", scope, columns, [total, *summary.phases], note)


def memory_table(trace: Trace, summary: Summary) -> Table:
    """Return the table of the peaks of all pools."""
    rows = [
        (capacity_name(trace), summary.memory.capacity_bytes),
        *summary.memory.pools.items(),
    ]
    rows = [row for row in rows if row[1] is not None]
    return Table(
        "memory",
        "Memory, whole trace",
        (text("pool", itemgetter(0)), size("peak", itemgetter(1))),
        rows,
    )


def copies_table(summary: Summary) -> Table:
    """Return the table of all copies by direction."""
    columns = (
        text("direction", itemgetter(0)),
        number("copies", lambda row: row[1].count),
        size("bytes", lambda row: row[1].bytes),
        ms("busy", lambda row: row[1].busy_ms),
    )
    rows = [row for row in summary.transfers.items() if row[1].count is not None]
    return Table("transfers", "Copies, whole trace", columns, rows)


def totals_table(trace: Trace, totals: Totals | None, ranks: int) -> Table:
    """Return the table of the figures of a whole trace that were recorded."""
    rows = []
    for name, (label, is_sum) in TOTALS.items():
        value = getattr(totals, name, None)
        if value is not None and totals is not None and totals.span_ms is not None:
            figure = ms_text(value) if name.endswith("_ms") else bytes_text(value)
            rows.append(
                (label + (", all ranks" if is_sum and ranks > 1 else ""), figure)
            )
    for rank in trace.ranks[:1]:
        rows += [
            (f"{step.kind} ({step.runs:,} times), median", ms_text(step.median_ms))
            for step in inference_steps(trace, rank)
        ]
    note = (
        free_note(trace)
        if totals is not None and totals.min_free_bytes is not None
        else None
    )
    return Table(
        "totals",
        "Whole trace",
        (text("figure", itemgetter(0)), text("value", itemgetter(1))),
        rows,
        note,
    )


def summary_view(trace: Trace, summary: Summary, verbose: bool = True) -> View:
    """Return time, memory and link use per phase.

    With `verbose`, it has also the state of the GPUs, pools, copies, and notes.
    """
    left_out = (
        f", the first {summary.warmup_iterations} left out as warm-up"
        if summary.warmup_iterations
        else ""
    )
    scope = (
        f"{counted(summary.iterations, 'iteration')}, ranks: {summary.ranks}{left_out}"
    )
    for lead in load_all("leads"):
        yield from lead(trace)
    if summary.iteration_ms is None:
        yield f"{trace.path}: {scope}"
    else:
        longest = summary.longest_phase
        share_text = (
            f", {100 * (longest.share or 0.0):.0f} % of it {longest.phase}"
            if longest is not None
            else ""
        )
        yield Gain(
            f"{trace.path}: {ms_text(summary.iteration_ms)} an iteration"
            f"{mean_text(summary.uneven)}{share_text}"
        )
        if summary.uneven is not None:
            yield f"  {summary.uneven.line}"
        yield f"  {scope}"
    for about_line in summary.about:
        yield f"  {about_line}"
    if summary.iterations > summary.warmup_iterations:
        yield phase_table(trace, summary)
        if summary.without_gradients_ms:
            yield (
                f"of other: {ms_text(summary.without_gradients_ms)} forwards without "
                "gradients"
            )
    else:
        yield f"figures are of the whole trace: {no_iterations(trace)}"
        yield totals_table(trace, summary.totals, summary.ranks)
    yield operators_table(trace)
    yield storage_table(summary.storage)
    yield differences_table(summary.rank_differences)
    notes = [f"note: {note}" for note in (*summary.remarks, *trace.notes)]
    details = {
        "state of the GPU": gpu_table(summary.gpu or ()),
        "pools of memory": memory_table(trace, summary),
        "copies": copies_table(summary),
    }
    if verbose:
        yield from details.values()
        yield from notes
        return
    yield from _peaks(trace, summary)
    hidden = [counted(len(notes), "note")] if notes else []
    hidden += [name for name, table in details.items() if table]
    if hidden:
        yield f"{', '.join(hidden)}: -v"


def _peaks(trace: Trace, summary: Summary) -> Iterator[str]:
    """Yield the peaks of all pools in a line."""
    capacity = summary.memory.capacity_bytes
    peaks = [
        f"{pool} {bytes_text(peak)}"
        for pool, peak in summary.memory.pools.items()
        if peak is not None
    ]
    if peaks:
        of_capacity = (
            f" ({capacity_name(trace)}: {bytes_text(capacity)})"
            if capacity is not None
            else ""
        )
        yield f"Peaks of the whole trace: {', '.join(peaks)}{of_capacity}"


def operators_table(trace: Trace) -> Table:
    """Return the operators of the CPU of the first rank, of a trace without kernels."""
    operators = trace.rank(trace.ranks[0]).operators if trace.ranks else ()
    columns = [
        text("operator", "name"),
        number("calls", "calls"),
        ms("self", lambda operator: operator.self_ns / _NS_PER_MS),
    ]
    title = "Operators of the CPU, whole trace: time without operators inside"
    return Table("operators", title, columns, operators, max_rows=_MAX_OPERATORS)


def storage_table(uses: Sequence[StorageUse]) -> Table:
    """Return the table of bytes and waits per rank and direction."""
    columns = (
        number("rank", "rank"),
        text("direction", "direction"),
        size("bytes", "bytes"),
        size("of gradients", "gradient_bytes"),
        number("requests", "requests"),
        ms("in flight", "in_flight_ms"),
        ms("waits", "wait_ms"),
        share("hidden", "hidden_share"),
    )
    note = (
        "Medians per iteration. Waits: until reads or writes have ended; hidden: the "
        "rest of the time in flight."
    )
    return Table("storage", "Storage", columns, uses, note)


def gpu_table(figures: Sequence[GpuFigure]) -> Table:
    """Return the table of the state of the GPUs, a row per quantity and phase."""
    columns = (
        text("quantity", lambda figure: f"{figure.label} ({figure.unit})"),
        text("phase", "phase"),
        number("smallest", "min"),
        number("mean", "mean"),
        number("largest", "max"),
    )
    scope = (
        "each phase" if any(figure.phase for figure in figures) else "the whole trace"
    )
    return Table("gpu", f"The GPU in {scope}", columns, figures, _NOTE)

"""The tables of iterations: how their times vary, and all of them."""

from operator import itemgetter

from ebbtide.analysis.metrics.iteration_stats import Iterations
from ebbtide.analysis.metrics.missing import no_iterations
from ebbtide.analysis.tables.table import Table, View, ms, number, text
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace

_SOURCE = "ebbtide summary --by iteration --json"
_MAX_OUTLIERS = 8


def spread_table(iterations: Iterations) -> Table:
    """Return the table of the spread of each phase over the iterations."""
    columns = (
        text("phase", "phase"),
        ms("median", "median_ms"),
        ms("spread", "spread_ms"),
        ms("min", "min_ms"),
        ms("max", "max_ms"),
        text("outliers", lambda spread: numbers_text(spread.outliers) or "none"),
    )
    note = (
        "Spread: scaled median absolute deviation. Outliers: iterations far from the "
        "median of their phase."
    )
    return Table(
        "spreads",
        "Time over the iterations",
        columns,
        iterations.spreads,
        note,
        _SOURCE,
    )


def iteration_table(iterations: Iterations, rank: int) -> Table:
    """Return the table of a rank's iterations, with outliers marked."""
    outliers = {
        spread.phase: spread.outliers
        for spread in iterations.spreads
        if spread.rank == rank
    }
    rows = [row for row in iterations.rows if row["rank"] == rank]
    columns = [number("iteration", lambda row: row["iteration"])]
    for phase in ("iteration", *ITERATION_PARTS):
        own, time = set(outliers.get(phase, [])), itemgetter(f"{phase}_ms")
        label = "total" if phase == "iteration" else phase
        columns.append(
            ms(label, time, is_outlier=lambda row, own=own: row["iteration"] in own)
        )
    if any(row["warmup"] for row in rows):
        columns.append(text("note", lambda row: "warm-up" if row["warmup"] else " "))
    listed = [
        f"{phase} {numbers_text(numbers)}"
        for phase, numbers in outliers.items()
        if numbers
    ]
    note = (
        "Outliers, far from the median of their phase: " + "; ".join(listed) + "."
        if listed
        else None
    )
    return Table("iterations", "Every iteration", columns, rows, note, _SOURCE)


def iterations_view(trace: Trace, iterations: Iterations) -> View:
    """Return the variation of phases, outliers, and the slowest rank.

    Phases vary over the iterations.
    """
    if not iterations.counted:
        yield f"{trace.path}: {no_iterations(trace)}"
        return
    left_out = (
        f", iterations {', '.join(map(str, iterations.warmup))} left out as warm-up"
        if iterations.warmup
        else ""
    )
    yield f"{trace.path}: {iterations.counted} iterations counted{left_out}"
    if not iterations.rows:
        yield "no finished iteration of this rank was recorded"
    yield spread_table(iterations)
    if iterations.slowest_rank and sum(iterations.slowest_rank.values()):
        rank, times = max(iterations.slowest_rank.items(), key=lambda item: item[1])
        yield (
            f"most often the slowest: rank {rank}, in {times} of {iterations.counted} "
            "iterations"
        )


def numbers_text(numbers: list[int]) -> str:
    """Return the first numbers as text."""
    return ", ".join(map(str, numbers[:_MAX_OUTLIERS])) + (
        ", …" if len(numbers) > _MAX_OUTLIERS else ""
    )

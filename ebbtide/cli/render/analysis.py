"""What the explaining commands print for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from ebbtide.cli.render.tables import table
from ebbtide.units import bytes_text, ms_text, rate_text

if TYPE_CHECKING:
    from ebbtide.analysis.findings import Findings
    from ebbtide.analysis.metrics.iteration_stats import Iterations
    from ebbtide.analysis.metrics.link import Link
    from ebbtide.analysis.metrics.memory import Gap, Memory, PoolUse
    from ebbtide.analysis.metrics.substeps.aggregate import SubStep
    from ebbtide.analysis.metrics.substeps.breakdown import SubSteps
    from ebbtide.profiler.trace import Trace


def ranks(trace: Trace, asked: int | None, as_json: bool) -> list[int]:
    """The ranks to tell about: tables are of one, and say so. Raises TraceError for a rank that is not there."""
    if asked is not None:
        trace.rank(asked)
        return [asked]
    if not as_json and len(trace.ranks) > 1:
        typer.echo(f"rank {trace.ranks[0]} of {len(trace.ranks)} ranks (--rank N shows another, --json all)")
    return trace.ranks if as_json else trace.ranks[:1]


# More rows than this are for a program (`--json`), not for a person.
_MOST_ROWS = 40


def print_findings(trace: Trace, found: Findings, iteration_ms: float | None) -> None:
    typer.echo(f"{trace.path}: {len(found.findings)} finding{'s' if len(found.findings) != 1 else ''}")
    for number, finding in enumerate(found.findings, 1):
        worth = ""
        if finding.worth_ms is not None:
            share = f" of {ms_text(iteration_ms)}" if iteration_ms else ""
            worth = f" (potential gain: up to {ms_text(finding.worth_ms)}{share} per iteration)"
        typer.echo(f"\n{number}. {finding.title}{worth}")
        for line in finding.evidence:
            typer.echo(f"   - {line}")
        typer.echo(f"   {finding.advice}")
    if sum(finding.worth_ms is not None for finding in found.findings) > 1:
        typer.echo("\nEstimated gains overlap; do not add them.")
    if found.unknown:
        typer.echo("\nThis trace cannot tell:")
        for unknown in found.unknown:
            typer.echo(f"   - {unknown.question}\n     {unknown.record}")


def print_link(trace: Trace, found: Link) -> None:
    for entry in found.ranks:
        if entry.source is None:
            continue
        peak = f", peak {rate_text(entry.peak_bytes_per_s)} a direction" if entry.peak_bytes_per_s else ""
        typer.echo(f"rank {entry.rank}: from {entry.source}{peak}")
        for way, count in entry.false_samples.items():
            if count:
                typer.echo(f"  {count} samples of {way} lie above the link's peak: left out")
    rows = [
        [
            use.phase,
            use.direction,
            bytes_text(use.bytes),
            ms_text(use.busy_ms),
            ms_text(use.both_ms),
            rate_text(use.mean_bytes_per_s),
            rate_text(use.busy_bytes_per_s),
            "-" if use.share_of_peak is None else f"{100 * use.share_of_peak:.1f} %",
        ]
        for use in found.phases
        if use.bytes is not None or use.busy_ms is not None
    ]
    if not rows:
        typer.echo(f"{trace.path} tells nothing of the link")
        return
    columns = [
        "phase",
        "direction",
        "bytes",
        "busy",
        "both at once",
        "rate over phase",
        "while busy",
        "of peak",
    ]
    table("The link, medians per iteration", columns, rows[:_MOST_ROWS])
    _cut(len(rows))
    kinds = [
        [
            kind.direction,
            kind.host_memory or "not told",
            f"{kind.count:,}",
            bytes_text(kind.bytes),
            ms_text(kind.busy_ms),
            rate_text(kind.busy_bytes_per_s),
        ]
        for kind in found.copies
    ]
    if kinds:
        columns = ["direction", "host memory", "copies", "bytes", "busy", "while busy"]
        table("All copies of the trace, by the kind of host memory", columns, kinds[:_MOST_ROWS])
        _cut(len(kinds))


def print_steps(trace: Trace, found: SubSteps) -> None:
    how = "they follow each other" if found.tiles else "they run beside each other: times do not add up"
    typer.echo(f"{trace.path}: the sub-steps of an iteration, medians ({how})")
    working = "; ".join(
        f"{use.phase}: {use.resource} {ms_text(use.median_ms)}{_share(use.share, ' ({})')}" for use in found.resources
    )
    typer.echo(f"working: {working}")
    columns = ["sub-step", "phase", "on", "time", "share", "count", "bytes", "h2d", "d2h", "rate", "waits"]
    columns.append(f"peak {found.pool or 'memory'}")
    table(
        "Sub-steps (h2d, d2h: bytes meanwhile; rate: the faster one's while copies run; waits: for a pageable copy)",
        columns,
        _step_rows(found.steps),
    )
    _cut(len(found.steps))
    if found.subgroups:
        columns.insert(1, "subgroup")
        table("By subgroup", columns, _step_rows(found.subgroups, True))
        _cut(len(found.subgroups))


def _step_rows(steps: Sequence[SubStep], by_subgroup: bool = False) -> list[list[str]]:
    return [
        [
            f"- {step.name}" if step.within else step.name,
            *([str(step.subgroup)] if by_subgroup else []),
            step.phase,
            step.resource,
            ms_text(step.median_ms),
            _share(step.share),
            f"{step.count:,.0f}",
            bytes_text(step.bytes),
            bytes_text(step.h2d.bytes),
            bytes_text(step.d2h.bytes),
            rate_text(max(side.busy_bytes_per_s or 0.0 for side in (step.h2d, step.d2h)) or None),
            step.waits_for or "",
            bytes_text(step.peak_bytes),
        ]
        for step in steps[:_MOST_ROWS]
    ]


def _share(share: float | None, text: str = "{}") -> str:
    return "" if share is None else text.format(f"{100 * share:.0f} %")


def print_memory(trace: Trace, found: Memory) -> None:
    typer.echo(f"{trace.path}: medians over the iterations of the least and the most in each phase")

    def rows(uses: Sequence[PoolUse | Gap], names: list[str]) -> list[list[str]]:
        return [
            [name, use.phase, bytes_text(use.low_bytes), bytes_text(use.peak_bytes)]
            for name, use in zip(names, uses, strict=True)
        ]

    if not found.pools:
        typer.echo("no memory was recorded inside its iterations")
        return
    pools = rows(found.pools, [use.pool for use in found.pools])
    table("Memory", ["pool", "phase", "least", "most"], pools[:_MOST_ROWS])
    _cut(len(pools))
    gaps = rows(found.gaps, [gap.gap for gap in found.gaps])
    if gaps:
        table("Between the lines", ["gap", "phase", "least", "most"], gaps[:_MOST_ROWS])
        _cut(len(gaps))


def print_iterations(trace: Trace, found: Iterations) -> None:
    left_out = f", iterations {', '.join(map(str, found.warmup))} left out as warm-up" if found.warmup else ""
    typer.echo(f"{trace.path}: {found.counted} iterations counted{left_out}")
    rows = [
        [
            spread.phase,
            ms_text(spread.median_ms),
            ms_text(spread.spread_ms),
            ms_text(spread.min_ms),
            ms_text(spread.max_ms),
            ", ".join(map(str, spread.odd[:8])) + (", …" if len(spread.odd) > 8 else "") or "none",
        ]
        for spread in found.spreads
    ]
    if rows:
        columns = ["phase", "median", "spread", "min", "max", "odd iterations"]
        table("Time over the iterations (spread: scaled median deviation)", columns, rows[:_MOST_ROWS])
        _cut(len(rows))
    if found.slowest_rank and sum(found.slowest_rank.values()):
        rank, often = max(found.slowest_rank.items(), key=lambda item: item[1])
        typer.echo(f"most often slowest: rank {rank}, in {often} of {found.counted} iterations")


def _cut(rows: int) -> None:
    if rows > _MOST_ROWS:
        typer.echo(f"{rows - _MOST_ROWS} more rows: --json has all")

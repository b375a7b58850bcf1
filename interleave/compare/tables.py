"""The tables of a comparison of policies: measured beside predicted."""

from collections.abc import Callable
from typing import Any

from ebbtide.analysis.tables.table import Column, Table, View, ms, text
from ebbtide.interleave.compare.results import Comparison, Pair
from ebbtide.interleave.compare.runs import Shape
from ebbtide.interleave.model.plan import RESOURCES
from ebbtide.units import bytes_unit, count_text, rate_text

_MIB = 2**20
_PHASES = ("iteration", "forward", "backward", "update")
LOSSES = text("losses", lambda result: "equal" if result.losses_equal else "DIFFER")


def comparison_view(comparison: Comparison, verbose: bool = True) -> View:
    """Return losses and times of each policy, and other optimizers.

    `verbose` adds phases, memory and busy shares.
    """
    shape, testbed = comparison.shape, comparison.testbed
    if len(comparison.results) == 1:
        yield (
            "losses: of one policy, so there is nothing to compare them with (name "
            "several with --policy)"
        )
    elif comparison.losses_equal:
        policies = f"all {len(comparison.results)} policies"
        yield (
            f"losses: equal bit for bit in all {comparison.iterations} iterations of "
            f"{policies}"
        )
    yield f"{job_text(shape)}, subgroups of {count_text(comparison.subgroup_params)})"
    yield from emulation_lines(testbed.link_bytes_per_s, ", its kernels run on the CPU")
    yield from _detailed_tables(comparison) if verbose else (_times_table(comparison),)
    columns = (
        text("other optimizer", "name"),
        *(ms(phase, f"{phase}_ms") for phase in _PHASES),
        text("final loss", lambda row: _loss_text(row.final_loss)),
    )
    title = (
        "Other optimizers on the same job (they round differently, so losses may "
        "differ)"
    )
    yield Table("peers", title, columns, comparison.baselines)
    yield from (
        f"{baseline.name}: {baseline.about}"
        for baseline in comparison.baselines
        if verbose
    )
    yield from (
        f"left out: {name} ({reason})" for name, reason in comparison.skipped.items()
    )
    if not verbose:
        yield "each phase, memory, storage, busy shares: -v"


def job_text(shape: Shape) -> str:
    return (
        f"a GPT of {count_text(shape.params)} parameters in bf16 ({shape.layers} "
        f"layers of width {shape.width}"
    )


def emulation_lines(link_bytes_per_s: float | None, kernels: str = "") -> View:
    if link_bytes_per_s is not None:
        yield (
            f"The device is EMULATED: its link has {rate_text(link_bytes_per_s)} per "
            f"direction{kernels}. Times show "
            "whether the plan runs as predicted; they say nothing about a GPU."
        )


def mib_text(pair: Pair | None) -> str | None:
    return (
        None
        if pair is None
        else f"{pair.measured / _MIB:,.2f} / {pair.predicted / _MIB:,.2f}"
    )


def _title(comparison: Comparison) -> str:
    counted = comparison.iterations - comparison.warmup_iterations
    device = (
        "EMULATED device, not a GPU"
        if comparison.testbed.emulated
        else comparison.testbed.name
    )
    return f"Measured and predicted: {device} (medians of {counted} iterations)"


def pair_columns(label: str, pair_of: Callable[[Any], Pair]) -> tuple[Column, ...]:
    """Return the columns of a measured time with a label: the time, its prediction and
    their ratio."""
    return (
        ms(label, lambda row: pair_of(row).measured),
        ms("predicted", lambda row: pair_of(row).predicted),
        text(
            "ratio",
            lambda row: (
                None if (ratio := pair_of(row).ratio) is None else f"{ratio:.2f}"
            ),
        ),
    )


def _times_table(comparison: Comparison) -> Table:
    columns = (
        text("policy", "policy"),
        *pair_columns("iteration", lambda result: result.times["iteration"]),
        *pair_columns("exposed", lambda result: result.times["exposed"]),
        LOSSES,
    )
    note = (
        "Exposed: what the optimizer adds to forward and backward. Ratio: measured "
        "over predicted."
    )
    return Table(
        "times", _title(comparison), columns, comparison.results, note, max_rows=None
    )


def _detailed_tables(comparison: Comparison) -> View:
    """Return the detailed tables (times of each phase, memory and storage, busy
    shares), and notes on the policies."""
    results = comparison.results
    times: list[tuple[str, str, Pair]] = [
        ("" if number else result.policy, phase, pair)
        for result in results
        for number, (phase, pair) in enumerate(result.times.items())
    ]
    columns: list[Column] = [
        text("policy", lambda row: row[0] or " "),
        text("phase", lambda row: row[1]),
        *pair_columns("measured", lambda row: row[2]),
    ]
    yield Table("times", _title(comparison), columns, times, max_rows=None)
    columns = [
        text("policy", "policy"),
        text("device memory", lambda result: _bytes_text(result.memory.device)),
        text("host memory", lambda result: _bytes_text(result.memory.host)),
        text("storage read", lambda result: _bytes_text(result.memory.storage_read)),
        text(
            "storage written", lambda result: _bytes_text(result.memory.storage_written)
        ),
        text("exact", lambda result: "yes" if result.is_exact else "no"),
        text("final loss", lambda result: _loss_text(result.losses[-1])),
        LOSSES,
    ]
    title = (
        "Memory, storage read and written in an iteration, measured / predicted, and "
        "results"
    )
    yield Table("memory", title, columns, results)

    def busy_text(pair: Pair) -> str:
        return f"{100 * pair.measured:.0f} / {100 * pair.predicted:.0f} %"

    of_resources = [
        text(name, lambda result, name=name: busy_text(result.busy[name]))
        for name in RESOURCES
    ]
    columns = [text("policy", "policy"), *of_resources]
    yield Table(
        "busy", "Busy shares of the update, measured / predicted", columns, results
    )
    for result in results:
        if result.measured.plan.stored:
            yield f"{result.policy}: {result.measured.plan.remark}"
    counted = comparison.iterations - comparison.warmup_iterations
    for result in results:
        if result.counted < counted:
            yield (
                f"{result.policy} changed its plan during the run: only the last "
                f"{result.counted} iterations count"
            )


def _bytes_text(pair: Pair) -> str:
    if not pair.measured and not pair.predicted:
        return "0"
    unit_bytes, unit = bytes_unit(max(pair.measured, pair.predicted))
    return (
        f"{pair.measured / unit_bytes:,.2f} / {pair.predicted / unit_bytes:,.2f} {unit}"
    )


def _loss_text(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.6f}"

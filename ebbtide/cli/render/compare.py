"""Prints a comparison of measured and predicted policies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo
from ebbtide.cli.render.tables import print_table
from ebbtide.interleave.model.plan import RESOURCES
from ebbtide.interleave.policies.storage import storage_summary
from ebbtide.units import bytes_unit, count_text, ms_text, rate_text

if TYPE_CHECKING:
    from ebbtide.interleave.experiments.compare.results import ComparedPolicy, Comparison, Pair


def print_comparison(comparison: Comparison) -> None:
    """Print the job and the device, measured and predicted figures of each policy, and other optimizers."""
    shape, testbed = comparison.shape, comparison.testbed
    layers = f"{shape.layers} layers of width {shape.width}, subgroups of {count_text(comparison.subgroup_params)}"
    echo(f"a GPT of {count_text(shape.params)} parameters in bf16 ({layers})")
    if testbed.emulated:
        echo(
            "The device is EMULATED: its memory is host memory, its link is throttled to "
            f"{rate_text(testbed.link_bytes_per_s)} per direction, and its kernels run on the CPU. Times only show "
            "whether the plan runs as predicted; they say nothing about a GPU."
        )
    _print_policies(comparison)
    if comparison.baselines:
        columns = ["other optimizer", "iteration", "forward", "backward", "update", "final loss"]
        rows = [
            [
                baseline.name,
                ms_text(baseline.iteration_ms),
                ms_text(baseline.forward_ms),
                ms_text(baseline.backward_ms),
                ms_text(baseline.update_ms),
                _loss_text(baseline.final_loss),
            ]
            for baseline in comparison.baselines
        ]
        print_table("Other optimizers on the same job (they round differently, so losses may differ)", columns, rows)
        for baseline in comparison.baselines:
            echo(f"{baseline.name}: {baseline.about}")
    for name, reason in comparison.skipped.items():
        echo(f"left out: {name} ({reason})")
    if comparison.losses_equal:
        policies = f"all {len(comparison.results)} policies" if len(comparison.results) > 1 else "the only policy"
        echo(f"losses: equal bit for bit in all {comparison.iterations} iterations of {policies}")


def _print_policies(comparison: Comparison) -> None:
    counted = comparison.iterations - comparison.warmup_iterations
    device = "EMULATED device, not a GPU" if comparison.testbed.emulated else comparison.testbed.name
    print_table(
        f"Measured and predicted: {device} (medians of {counted} iterations)",
        ["policy", "phase", "measured", "predicted", "measured / predicted"],
        [row for result in comparison.results for row in _time_rows(result)],
    )
    print_table(
        "Memory, storage read and written in an iteration, measured / predicted, and results",
        ["policy", "device memory", "host memory", "storage read", "storage written", "exact", "final loss", "losses"],
        [_memory_row(result) for result in comparison.results],
    )
    print_table(
        "Busy shares of the update, measured / predicted",
        ["policy", *RESOURCES],
        [[result.policy, *map(_shares_text, result.busy.values())] for result in comparison.results],
    )
    for result in comparison.results:
        if result.measured.plan.stored:
            echo(f"{result.policy}: {storage_summary(result.measured.plan, result.measured.workload)}")
    for result in comparison.results:
        if result.counted < counted:
            echo(f"{result.policy} changed its plan during the run: only the last {result.counted} iterations count")


def _time_rows(result: ComparedPolicy) -> Iterator[list[str]]:
    for number, (phase, pair) in enumerate(result.times.items()):
        ratio = "-" if pair.ratio is None else f"{pair.ratio:.2f}"
        yield ["" if number else result.policy, phase, ms_text(pair.measured), ms_text(pair.predicted), ratio]


def _memory_row(result: ComparedPolicy) -> list[str]:
    memory = result.memory
    pairs = (memory.device, memory.host, memory.storage_read, memory.storage_written)
    results = ["yes" if result.is_exact else "no", _loss_text(result.losses[-1])]
    return [result.policy, *map(_bytes_text, pairs), *results, "equal" if result.losses_equal else "DIFFER"]


def _bytes_text(pair: Pair) -> str:
    if not pair.measured and not pair.predicted:
        return "0"
    unit_bytes, unit = bytes_unit(max(pair.measured, pair.predicted))
    return f"{pair.measured / unit_bytes:,.2f} / {pair.predicted / unit_bytes:,.2f} {unit}"


def _shares_text(pair: Pair) -> str:
    return f"{100 * pair.measured:.0f} / {100 * pair.predicted:.0f} %"


def _loss_text(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.6f}"

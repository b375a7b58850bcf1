"""Prints a comparison of measured and predicted policies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from ebbtide.cli.render.tables import print_table
from ebbtide.units import bytes_text, count_text, ms_text, rate_text

if TYPE_CHECKING:
    from ebbtide.interleave.experiments.compare.results import ComparedPolicy, Comparison, Pair


def print_comparison(comparison: Comparison) -> None:
    """Print the job and the device, measured and predicted figures of each policy, and other optimizers."""
    shape, testbed = comparison.shape, comparison.testbed
    layers = f"{shape.layers} layers of width {shape.width}, subgroups of {count_text(comparison.subgroup_params)}"
    typer.echo(f"a GPT of {count_text(shape.params)} parameters in bf16 ({layers})")
    if testbed.emulated:
        typer.echo(
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
            typer.echo(f"{baseline.name}: {baseline.about}")
    for name, reason in comparison.skipped.items():
        typer.echo(f"left out: {name} ({reason})")
    if comparison.losses_equal:
        policies = f"all {len(comparison.results)} policies" if len(comparison.results) > 1 else "the only policy"
        typer.echo(f"losses: equal bit for bit in all {comparison.iterations} iterations of {policies}")


def _print_policies(comparison: Comparison) -> None:
    counted = comparison.iterations - comparison.warmup_iterations
    device = "EMULATED device, not a GPU" if comparison.testbed.emulated else comparison.testbed.name
    print_table(
        f"Measured and predicted: {device} (medians of {counted} iterations)",
        ["policy", "phase", "measured", "predicted", "measured / predicted"],
        [row for result in comparison.results for row in _time_rows(result)],
    )
    print_table(
        "Busy shares of the update and peak device memory, measured / predicted",
        ["policy", "cpu", "gpu", "h2d", "d2h", "device memory", "final loss", "losses"],
        [_resource_row(result) for result in comparison.results],
    )
    for result in comparison.results:
        if result.counted < counted:
            typer.echo(
                f"{result.policy} changed its plan during the run: only the last {result.counted} iterations count"
            )


def _time_rows(result: ComparedPolicy) -> Iterator[list[str]]:
    for number, (phase, pair) in enumerate(result.times.items()):
        ratio = "-" if pair.ratio is None else f"{pair.ratio:.2f}"
        yield ["" if number else result.policy, phase, ms_text(pair.measured), ms_text(pair.predicted), ratio]


def _resource_row(result: ComparedPolicy) -> list[str]:
    peak = result.peak_device_bytes
    memory = f"{bytes_text(peak.measured)} / {bytes_text(peak.predicted)}"
    equal = "equal" if result.losses_equal else "DIFFER"
    return [result.policy, *map(_shares_text, result.busy.values()), memory, _loss_text(result.losses[-1]), equal]


def _shares_text(pair: Pair) -> str:
    return f"{100 * pair.measured:.0f} / {100 * pair.predicted:.0f} %"


def _loss_text(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.6f}"

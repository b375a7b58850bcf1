"""What `ebbtide compare` prints for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from ebbtide.cli.render.tables import table
from ebbtide.units import bytes_text, count_text, ms_text, rate_text

if TYPE_CHECKING:
    from ebbtide.interleave.experiments.compare.results import Comparison, Pair, Result


def print_comparison(found: Comparison) -> None:
    shape, box = found.shape, found.box
    layers = f"{shape.layers} layers of width {shape.width}, subgroups of {count_text(found.subgroup_params)}"
    typer.echo(f"a GPT of {count_text(shape.params)} parameters in bf16 ({layers})")
    where = f"on {box.name}"
    if box.emulated:
        where = "EMULATED device, tells nothing about a GPU"
        link = rate_text(box.link_bytes_per_s)
        typer.echo(
            f"The device is EMULATED: its memory is the host's, its link is throttled to {link} each way, its kernels "
            "run on the CPU. Times tell only whether execution goes as predicted, nothing about a GPU."
        )
    counted = found.iterations - found.warmup_iterations
    title = f"Measured and predicted: {where} (medians of {counted} iterations)"
    rows = [row for result in found.results for row in _times(result)]
    table(title, ["policy", "phase", "measured", "predicted", "measured / predicted"], rows)
    columns = ["policy", "cpu", "gpu", "h2d", "d2h", "on the device at most", "final loss", "losses"]
    about = "Busy shares of the update and device memory, measured / predicted"
    table(about, columns, [_rest(result) for result in found.results])
    for result in found.results:
        if result.counted < counted:
            typer.echo(
                f"{result.policy} planned anew as it learned: of it only the last {result.counted} iterations count"
            )
    if found.peers:
        names = ["other optimizer", "iteration", "forward", "backward", "update", "final loss"]
        others = [
            [
                peer.name,
                *(ms_text(ms) for ms in (peer.iteration_ms, peer.forward_ms, peer.backward_ms, peer.update_ms)),
                _loss(peer.final_loss),
            ]
            for peer in found.peers
        ]
        table("Others on the same job, measured; their rounding is another, so their losses may differ", names, others)
        for peer in found.peers:
            typer.echo(f"{peer.name}: {peer.about}")
    for name, why in found.skipped.items():
        typer.echo(f"left out: {name} ({why})")
    if found.losses_equal:
        all_ = f"all {len(found.results)} policies" if len(found.results) > 1 else "the one policy"
        typer.echo(f"losses: equal bit for bit in all {found.iterations} iterations of {all_}")


def _times(result: Result) -> Iterator[list[str]]:
    for number, (phase, pair) in enumerate(result.times.items()):
        ratio = "-" if pair.ratio is None else f"{pair.ratio:.2f}"
        yield ["" if number else result.policy, phase, ms_text(pair.measured), ms_text(pair.predicted), ratio]


def _rest(result: Result) -> list[str]:
    peak = result.peak_device_bytes
    memory = f"{bytes_text(peak.measured)} / {bytes_text(peak.predicted)}"
    equal = "equal" if result.losses_equal else "DIFFER"
    return [result.policy, *map(_shares, result.busy.values()), memory, _loss(result.losses[-1]), equal]


def _shares(pair: Pair) -> str:
    return f"{100 * pair.measured:.0f} / {100 * pair.predicted:.0f} %"


def _loss(loss: float | None) -> str:
    return "no number" if loss is None else f"{loss:.6f}"

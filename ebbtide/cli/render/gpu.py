"""Prints the state of the GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo
from ebbtide.cli.render.tables import print_table
from ebbtide.phases import ITERATION_PARTS

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.gpu_state import GpuFigure


def print_gpu(figures: Sequence[GpuFigure]) -> None:
    """Print smallest, mean and largest value of each quantity per phase."""
    cells = {(figure.quantity, figure.phase): figure for figure in figures}
    labels = {figure.quantity: f"{figure.label} ({figure.unit})" for figure in figures}
    rows = [
        [label, *(_text(cells.get((quantity, phase))) for phase in ITERATION_PARTS)]
        for quantity, label in labels.items()
    ]
    print_table("GPU: smallest / mean / largest value", ["quantity", *ITERATION_PARTS], rows)
    echo("utilization is NVML's own mean over 1/6 to 1 s: shorter phases also show their neighbours\n")


def _text(figure: GpuFigure | None) -> str:
    if figure is None:
        return "-"
    return f"{figure.min:,.0f} / {figure.mean:,.0f} / {figure.max:,.0f}"

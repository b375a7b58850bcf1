"""Builds the table of the state of the GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.analysis.metrics.gpu_state import GpuFigure
from ebbtide.analysis.report.columns import ReportTable, number_column, text_column

_NOTE = (
    "Smallest value, mean over time and largest value over the steady iterations and all ranks. Utilization is NVML's "
    "own mean over 1/6 to 1 s, so shorter phases also show their neighbours."
)


def gpu_table(figures: Sequence[GpuFigure]) -> ReportTable:
    """Return the table of the state of the GPUs, a row per quantity and phase."""
    columns = (
        text_column("quantity", [f"{figure.label} ({figure.unit})" for figure in figures]),
        text_column("phase", [figure.phase for figure in figures]),
        number_column("smallest", [figure.min for figure in figures]),
        number_column("mean", [figure.mean for figure in figures]),
        number_column("largest", [figure.max for figure in figures]),
    )
    return ReportTable("gpu", "The GPU in each phase", columns, _NOTE)

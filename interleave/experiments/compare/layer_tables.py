"""The table and the picture of a comparison of choices for layers."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ebbtide.analysis.tables.table import Table, View, text
from ebbtide.interleave.advise.pictures.replay import OPERATION_EDGE, OPERATION_LOOKS
from ebbtide.interleave.experiments.compare.layers import WARMUP, LayerComparison, LayerRun
from ebbtide.interleave.experiments.compare.results import Pair
from ebbtide.interleave.experiments.compare.tables import losses_column, pair_columns
from ebbtide.units import bytes_text, count_text, rate_text

matplotlib.use("Agg")

_MIB = 2**20
_DIRECTIONS = ("h2d", "d2h")
_COLORS = {"measured": "#222222", "predicted": "#d55e00"}
_FONT, _MEMORY_HEIGHT, _LANES_HEIGHT = 8, 0.9, 0.75


def layer_comparison_view(comparison: LayerComparison, verbose: bool) -> View:
    """Return how many iterations are as predicted, and the figures of each choice; `verbose`: also bytes of copies."""
    runs, shape = comparison.runs, comparison.shape
    yield f"{comparison.close} of {len(runs)} iterations are within 10 % of the simulated ones"
    if comparison.losses_equal:
        yield f"losses: those of the plain job bit for bit in all {comparison.iterations} iterations of each"
    yield f"a GPT of {count_text(shape.params)} parameters in bf16 ({shape.layers} layers of width {shape.width})"
    if comparison.link_bytes_per_s is not None:
        yield (
            f"The device is EMULATED: its link has {rate_text(comparison.link_bytes_per_s)} per direction. Times show "
            "whether the plan runs as predicted; they say nothing about a GPU."
        )
    columns = [
        text("activations", "activations"),
        text("weights", "weights"),
        *pair_columns("iteration", lambda run: run.iteration_ms),
        text("memory, MiB", lambda run: _bytes_text(run.device_bytes)),
        losses_column(),
    ]
    if verbose:
        columns += [
            text("to device, MiB", lambda run: _bytes_text(run.h2d_bytes)),
            text("to host, MiB", lambda run: _bytes_text(run.d2h_bytes)),
            text("layers", lambda run: ", ".join(f"{count} {kind}" for kind, count in run.kinds.items())),
        ]
    counted = comparison.iterations - WARMUP
    note = (
        f"Memory of layers: measured / predicted, at its peak. With auto it is limited to "
        f"{bytes_text(comparison.memory_budget)}."
    )
    yield Table("layers", f"Measured and predicted: {comparison.device} (medians of {counted})", columns, runs, note)
    if not verbose:
        yield "copies, and layers of each kind: -v"


def _bytes_text(pair: Pair | None) -> str | None:
    return None if pair is None else f"{pair.measured / _MIB:,.2f} / {pair.predicted / _MIB:,.2f}"


def draw_layer_comparison(comparison: LayerComparison) -> Figure:
    """Draw the device memory of layers over an iteration of each choice, and below it the copies over the link, both
    measured and predicted. All choices have the same scales."""
    runs = comparison.runs
    count = len(runs)
    figure = Figure(figsize=(11.0, 0.9 + (_MEMORY_HEIGHT + _LANES_HEIGHT + 0.3) * count), layout="constrained", dpi=110)
    figure.set_label("ebbtide: layers, measured and predicted")
    rows = figure.subplots(2 * count, 1, sharex=True, height_ratios=[_MEMORY_HEIGHT, _LANES_HEIGHT] * count)
    largest = max(max(run.device_bytes.measured, run.device_bytes.predicted) for run in runs) / _MIB
    longest_ms = max(max(run.iteration_ms.measured, run.iteration_ms.predicted) for run in runs)
    for number, run in enumerate(runs):
        _draw_memory(rows[2 * number], run, largest)
        _draw_copies(rows[2 * number + 1], run)
    rows[-1].set_xlim(0, 1.02 * longest_ms)
    rows[-1].set_xlabel("time from the start of the iteration (ms)")
    kinds = {one.kind for run in runs for one in run.copies} | {
        op.kind for run in runs for op in run.predicted.plan.ops
    }
    handles: list[Any] = [
        Patch(**looks, **OPERATION_EDGE, label=kind)
        for kind, looks in OPERATION_LOOKS.items()
        if kind in kinds and kind != "update"
    ]
    handles += [matplotlib.lines.Line2D([], [], color=color, label=name) for name, color in _COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False, fontsize=_FONT)
    device = "an emulated device: these times say nothing about a GPU"
    place = device if comparison.link_bytes_per_s is not None else comparison.device
    figure.suptitle(f"Memory and link of layers on {place}", x=0.01, ha="left", fontsize=10.5)
    return figure


def _draw_memory(axes: Axes, run: LayerRun, largest: float) -> None:
    times, line = run.predicted.layer_memory_line()
    curves = {
        "measured": ([at_s for at_s, _ in run.memory], [size for _, size in run.memory], run.iteration_ms.measured),
        "predicted": (times, [one.total for one in line], run.iteration_ms.predicted),
    }
    for name, (at_s, sizes, end_ms) in curves.items():
        if sizes:
            steps = [1e3 * one for one in at_s], np.array(sizes) / _MIB
            axes.step(
                [*steps[0], end_ms], [*steps[1], steps[1][-1]], where="post", lw=1.2,
                color=_COLORS[name], ls="-" if name == "measured" else "--",
            )  # fmt: skip
    axes.set_ylim(0, 1.08 * largest)
    axes.set_ylabel("MiB", fontsize=_FONT - 1)
    axes.tick_params(axis="y", labelsize=_FONT - 1)
    axes.spines[["top", "right"]].set_visible(False)
    pair = run.iteration_ms
    title = f"{run.name}: iteration measured {pair.measured:,.0f} ms, predicted {pair.predicted:,.0f} ms"
    axes.set_title(f"{title}, {pair.ratio:.2f} times as long", loc="left", fontsize=9)


def _draw_copies(axes: Axes, run: LayerRun) -> None:
    items = run.predicted.items()
    predicted = [(op.kind, op.resource, start, end) for op, start, end in items if op.resource in _DIRECTIONS]
    measured = [(one.kind, "h2d" if one.kind.endswith("up") else "d2h", one.start_s, one.end_s) for one in run.copies]
    for half, copies in enumerate((measured, predicted)):
        for kind, lane, start, end in copies:
            span = (1e3 * start, 1e3 * (end - start))
            height = 2.3 * half + _DIRECTIONS.index(lane) - 0.42
            axes.broken_barh([span], (height, 0.84), **OPERATION_LOOKS[kind], **OPERATION_EDGE)
    names = [f"{lane} {half}" for half in ("measured", "predicted") for lane in _DIRECTIONS]
    axes.set_yticks([0.0, 1.0, 2.3, 3.3], names, fontsize=_FONT - 2)
    axes.set_ylim(3.8, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)

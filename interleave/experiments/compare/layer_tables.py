"""The table and the picture of a comparison of choices for layers."""

import matplotlib
from matplotlib.figure import Figure

from ebbtide.analysis.tables.table import Table, View, text
from ebbtide.interleave.advise.pictures.replay import draw_lanes, schedules_height
from ebbtide.interleave.experiments.compare.layers import WARMUP, LayerComparison
from ebbtide.interleave.experiments.compare.results import Pair
from ebbtide.interleave.experiments.compare.tables import losses_column, pair_columns
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.units import bytes_text, count_text, rate_text

matplotlib.use("Agg")

_MIB = 2**20


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
            text("to device, MiB", lambda run: _bytes_text(run.moved_bytes("h2d"))),
            text("to host, MiB", lambda run: _bytes_text(run.moved_bytes("d2h"))),
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
    """Draw memory of layers and the link over an iteration of each choice: left measured, right predicted."""
    runs = comparison.runs
    figure = Figure(figsize=(18.0, schedules_height([run.predicted for run in runs])), layout="constrained", dpi=100)
    figure.set_label("ebbtide: layers, measured and predicted")
    parts = figure.subfigures(1, 2, squeeze=False)[0]
    for half, part in zip(("measured", "predicted"), parts, strict=True):
        schedules: list[Schedule] = [getattr(run, half) for run in runs]
        titles = [f"{run.name}: {half} {getattr(run.iteration_ms, half):,.0f} ms" for run in runs]
        axes = draw_lanes(part, schedules, titles)
        axes.set_xlabel("time of an iteration (s)")
        axes.set_xlim(0.0, 1.01 * max(max(run.measured.iteration_s, run.predicted.iteration_s) for run in runs))
    device = "an emulated device: these times say nothing about a GPU"
    place = device if comparison.link_bytes_per_s is not None else comparison.device
    figure.suptitle(f"Memory and link of layers on {place}", x=0.01, ha="left", fontsize=10.5)
    return figure

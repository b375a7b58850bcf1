"""The comparison of choices for layers, with picture and tables.

The command is `compare --layers`.
"""

from matplotlib.figure import Figure

from ebbtide.analysis.tables.table import Table, View, text
from ebbtide.features.layers.compare import WARMUP, LayerComparison, compare_layers
from ebbtide.interleave.compare.picture import EMULATED, TITLE
from ebbtide.interleave.compare.tables import (
    LOSSES,
    emulation_lines,
    job_text,
    mib_text,
    pair_columns,
)
from ebbtide.interleave.replay.pictures.replay import (
    add_lane_legend,
    draw_lanes,
    schedules_height,
)
from ebbtide.units import bytes_text

compare = compare_layers


def draw_comparison(comparison: LayerComparison) -> Figure:
    """Draw memory of layers and the link over an iteration of each choice.

    Left is measured, right predicted.
    """
    runs = comparison.runs
    figure = Figure(
        figsize=(18.0, schedules_height([run.predicted for run in runs])),
        layout="constrained",
        dpi=100,
    )
    figure.set_label("ebbtide: layers, measured and predicted")
    schedules = [schedule for run in runs for schedule in (run.measured, run.predicted)]
    longest_s = max(schedule.iteration_s for schedule in schedules)
    for half, part in zip(
        ("measured", "predicted"),
        figure.subfigures(1, 2, squeeze=False)[0],
        strict=True,
    ):
        titles = [
            f"{run.name}: {half} {getattr(run.iteration_ms, half):,.0f} ms"
            for run in runs
        ]
        axes = draw_lanes(part, [getattr(run, half) for run in runs], titles)
        axes.set_xlabel("time of an iteration (s)")
        axes.set_xlim(0.0, 1.01 * longest_s)
    add_lane_legend(figure, schedules)
    device = comparison.device if comparison.link_bytes_per_s is None else EMULATED
    figure.suptitle(f"Memory and link of layers on {device}", **TITLE)
    return figure


def comparison_view(comparison: LayerComparison, verbose: bool) -> View:
    """Return how many iterations are as predicted, and figures of each choice.

    With `verbose`, return also bytes of copies.
    """
    runs = comparison.runs
    yield (
        f"{comparison.close} of {len(runs)} iterations are within 10 % of the "
        "simulated ones"
    )
    if comparison.losses_equal:
        yield (
            "losses: those of the plain job bit for bit in all "
            f"{comparison.iterations} iterations of each"
        )
    yield f"{job_text(comparison.shape)})"
    yield from emulation_lines(comparison.link_bytes_per_s)
    columns = [
        text("activations", "activations"),
        text("weights", "weights"),
        *pair_columns("iteration", lambda run: run.iteration_ms),
        text("memory, MiB", lambda run: mib_text(run.device_bytes)),
        LOSSES,
    ]
    if verbose:
        columns += [
            text("to device, MiB", lambda run: mib_text(run.moved_bytes("h2d"))),
            text("to host, MiB", lambda run: mib_text(run.moved_bytes("d2h"))),
            text(
                "layers",
                lambda run: ", ".join(
                    f"{count} {kind}" for kind, count in run.kinds.items()
                ),
            ),
        ]
    limit = bytes_text(comparison.memory_budget)
    note = (
        "Memory of layers: measured / predicted, at its peak. With auto it is limited "
        f"to {limit}."
    )
    title = (
        f"Measured and predicted: {comparison.device} (medians of "
        f"{comparison.iterations - WARMUP})"
    )
    yield Table("layers", title, columns, runs, note)
    if not verbose:
        yield "copies, and layers of each kind: -v"

"""A picture of the frontier: memory against time, a dot for each combination."""

import textwrap
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ebbtide.features.fit.search import FitPoint, FitSearch, pareto
from ebbtide.interleave.replay.pictures.policy_bars import FONT_SIZE

matplotlib.use("Agg")

# Colours of Okabe and Ito, which differ for colour-blind readers and in grey print.
_STYLES = {
    "full": ("#0072b2", "o"),
    "lora": ("#009e73", "s"),
    "qlora": ("#cc79a7", "^"),
}
_LIMIT_COLOR, _ANSWER_COLOR = "#222222", "#e69f00"
_MOST_LABELS, _TEXT_WIDTH = 12, 38


def draw_frontier(search: FitSearch) -> Figure:
    """Draw the combinations of levers of a job, and for each kind of training a line
    through the points of which none is smaller and faster."""
    figure = Figure(figsize=(10.5, 5.6), layout="constrained", dpi=130)
    axes: Any = figure.subplots()
    for method, (color, marker) in _STYLES.items():
        own = [point for point in search.points if point.job.method == method]
        if own:
            axes.plot(
                *_positions(own),
                marker,
                color=color,
                alpha=0.35,
                markersize=5,
                label=f"{method}: {len(own)} combinations",
            )
            line = pareto(own)
            axes.plot(*_positions(line), color=color, lw=1.5)
            if method == search.job.method:
                _label(axes, line, color)
    limit = search.own.device.limit_bytes / 2**30
    axes.axhline(limit, color=_LIMIT_COLOR, lw=1, linestyle="--")
    axes.annotate(
        f"{search.machine.name}: {limit:,.1f} GiB",
        (0.995, limit),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=FONT_SIZE,
    )
    answer = search.answer
    if answer is not None and answer.job.ranks == search.job.ranks:
        axes.plot(
            *_positions([answer]),
            "*",
            color=_ANSWER_COLOR,
            markersize=14,
            label=f"fastest that fits: {answer.text}",
        )
    axes.set_xlabel("time of an iteration (s), predicted")
    axes.set_ylabel("device memory (GiB)")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    axes.legend(fontsize=FONT_SIZE, loc="best", framealpha=0.9)
    figure.suptitle(
        f"{search.job.model}: {search.job.summary}", x=0.01, ha="left", fontsize=10
    )
    return figure


def _positions(points: list[FitPoint]) -> tuple[list[float], list[float]]:
    times = [point.iteration_s for point in points]
    return times, [point.needed_bytes / 2**30 for point in points]


def _label(axes: Any, line: list[FitPoint], color: str) -> None:
    """Number the points of a line, and list them beside the axes."""
    texts = []
    for number, point in enumerate(line, 1):
        (time,), (size,) = _positions([point])
        axes.annotate(
            str(number),
            (time, size),
            # Neighbours have their numbers on different sides.
            xytext=(7, 4) if number % 2 else (-9, -9),
            textcoords="offset points",
            fontsize=FONT_SIZE,
            color=color,
        )
        levers = textwrap.fill(point.text, _TEXT_WIDTH, subsequent_indent="    ")
        texts.append(f"{number}  {size:,.1f} GiB, {time:.3g} s:\n    {levers}")
    axes.text(
        1.02,
        1.0,
        "\n".join([f"The line of {line[0].job.method}", *texts[:_MOST_LABELS]]),
        transform=axes.transAxes,
        va="top",
        fontsize=FONT_SIZE,
        color=color,
    )

"""A bar chart of a replay: the iteration of each policy, phase by phase, and the bound."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from ebbtide.analysis.plot import PHASE_COLORS
from ebbtide.interleave.replay.results import Replay
from ebbtide.phases import OTHER, PHASES

matplotlib.use("Agg")

_HATCHES = {"other": "", "forward": "//", "backward": "\\\\", "update": ""}
_OTHER_COLOR = "#d0d0d0"
_FITS_TEXTS = {True: "", False: ", does not fit", None: ", not known to fit"}


def chart(replay: Replay) -> Figure:
    """Draw the phases of each policy as bars, in the order requested, and the bound as a line.

    Policies that do not fit, or are not known to fit, are labelled.
    """
    results = replay.results
    figure = Figure(figsize=(9.5, 1.6 + 0.5 * len(results)), layout="constrained", dpi=130)
    axes = figure.subplots()
    rows = np.arange(len(results))
    ends = np.zeros(len(results))
    colors = {OTHER: _OTHER_COLOR, **PHASE_COLORS}
    for phase in (OTHER, *PHASES):
        lengths = np.array([getattr(result, f"{phase}_ms") for result in results])
        axes.barh(
            rows, lengths, left=ends, height=0.62, color=colors[phase], hatch=_HATCHES[phase], edgecolor="white",
            linewidth=0.5, label=phase,
        )  # fmt: skip
        ends += lengths
    bound_ms = replay.bound.iteration_s * 1e3
    axes.axvline(bound_ms, color="#222222", lw=1.2, ls=(0, (5, 3)), label=f"bound {bound_ms:,.0f} ms")
    for row, result, end in zip(rows, results, ends, strict=True):
        axes.annotate(
            f"{end:,.0f} ms{_FITS_TEXTS[result.fits]}",
            (end, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            # The line of the bound must not cross the text.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )
    axes.set_yticks(rows, [result.policy for result in results])
    axes.invert_yaxis()
    axes.set_xlim(0, max(float(ends.max()), bound_ms) * 1.28)
    axes.set_xlabel("time of an iteration (ms), simulated")
    axes.set_title(f"{replay.workload.name} on {replay.machine.name}", loc="left", fontsize=10.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8.5)
    return figure

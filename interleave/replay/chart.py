"""A replay as a picture: the iteration of each policy, phase by phase, and the bound."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from ebbtide.analysis.plot import PHASE_COLORS
from ebbtide.interleave.replay.results import Replay

matplotlib.use("Agg")

_HATCHES = {"other": "", "forward": "//", "backward": "\\\\", "update": ""}


def chart(replay: Replay) -> Figure:
    """Bars of the phases of each policy, in the order asked for, with the bound as a line; fits or not beside them."""
    results = replay.results
    figure = Figure(figsize=(9.5, 1.6 + 0.5 * len(results)), layout="constrained", dpi=130)
    axes = figure.subplots()
    places = np.arange(len(results))
    reached = np.zeros(len(results))
    colors = {"other": "#d0d0d0", **PHASE_COLORS}
    for phase in ("other", "forward", "backward", "update"):
        lengths = np.array([getattr(result, f"{phase}_ms") for result in results])
        axes.barh(
            places, lengths, left=reached, height=0.62, color=colors[phase], hatch=_HATCHES[phase], edgecolor="white",
            linewidth=0.5, label=phase,
        )  # fmt: skip
        reached += lengths
    least = replay.bound.iteration_s * 1e3
    axes.axvline(least, color="#222222", lw=1.2, ls=(0, (5, 3)), label=f"bound {least:,.0f} ms")
    for place, result, end in zip(places, results, reached, strict=True):
        fits = {True: "", False: ", does not fit", None: ", not known to fit"}[result.fits]
        axes.annotate(
            f"{end:,.0f} ms{fits}",
            (end, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            # The line of the bound must not cross the text.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )
    axes.set_yticks(places, [result.policy for result in results])
    axes.invert_yaxis()
    axes.set_xlim(0, max(float(reached.max()), least) * 1.28)
    axes.set_xlabel("time of an iteration (ms), simulated")
    axes.set_title(f"{replay.workload.name} on {replay.machine.name}", loc="left", fontsize=10.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8.5)
    return figure

"""Bars of policies: the phases of an iteration, and beside them device memory, host
memory and traffic of storage.

`ebbtide replay` and `compare` draw their results with it. Colours only repeat what
hatches and texts show.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ebbtide.analysis.plot import PHASE_COLORS
from ebbtide.interleave.replay.replay import RESULT_BYTES
from ebbtide.phases import OTHER, PHASES
from ebbtide.units import bytes_unit

matplotlib.use("Agg")

BAR_HEIGHT = 0.62
# Characters of a line of a policy's string.
_MAX_NAME_WIDTH = 36
_HATCHES = {"other": "", "forward": "//", "backward": "\\\\", "update": ""}
_COLORS = {OTHER: "#d0d0d0", **PHASE_COLORS}
_BYTES_COLOR = "#8a8a8a"
_FAINT_ALPHA = 0.45
_BOUND: dict[str, Any] = {"color": "#222222", "lw": 1.2, "ls": (0, (5, 3))}
# Room for texts behind bars: share of the panel of iterations per character, panels of
# bytes over their longest bar.
_CHARACTER_SHARE, _BYTES_ROOM = 0.0145, 1.5
_FITS_TEXTS = {True: "", False: "does not fit", None: "not known to fit"}
FONT_SIZE = 8.5


@dataclass(frozen=True)
class PolicyBar:
    """An iteration under a policy, simulated or measured."""

    name: str
    # Length of each phase; empty if there is no result.
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    # By the kinds of `RESULT_BYTES`.
    bytes_by_kind: Mapping[str, float] = field(default_factory=dict)
    # What does not hold for the policy, or why it has no result; empty if there is
    # nothing to say.
    remark: str = ""
    # Whether it is drawn lighter: a prediction beside a measurement.
    is_faint: bool = False
    position: float = 0.0
    # Length of the iteration if the phases are medians, which do not add up to it; None
    # if they do.
    median_ms: float | None = None

    @property
    def iteration_ms(self) -> float:
        """Length of the iteration."""
        return (
            sum(self.phases_ms.values()) if self.median_ms is None else self.median_ms
        )

    @property
    def text(self) -> str:
        """The text behind the bar."""
        return ", ".join(
            filter(
                None,
                (f"{self.iteration_ms:,.0f} ms" if self.phases_ms else "", self.remark),
            )
        )


def bar_of(result: Mapping[str, Any], position: float) -> PolicyBar:
    """Return the bar of the fields of a `PolicyResult`, without memory or exactness
    where the result has none."""
    return PolicyBar(
        name=result["policy"],
        phases_ms={phase: result[f"{phase}_ms"] for phase in (OTHER, *PHASES)},
        bytes_by_kind={
            kind: bytes_of(result) for kind, bytes_of in RESULT_BYTES.items()
        },
        remark=", ".join(
            filter(
                None,
                (_FITS_TEXTS[result["fits"]], "" if result["exact"] else "not exact"),
            )
        ),
        position=position,
    )


def byte_kinds(bars: Sequence[PolicyBar]) -> list[str]:
    """Return the kinds of bytes, not 0 for every bar, to draw beside the iterations."""
    return [
        kind
        for kind in RESULT_BYTES
        if any(bar.bytes_by_kind.get(kind) for bar in bars)
    ]


def figure_for(kinds: Sequence[str], height: float) -> Figure:
    """Return a figure as wide as the panels for iterations and kinds of bytes.

    The figure is `height` inches high.
    """
    return Figure(
        figsize=(8.5 + 1.6 * len(kinds), height), layout="constrained", dpi=130
    )


def add_panels(figure: Figure | SubFigure, kinds: Sequence[str], rows: int = 1) -> Any:
    """Return rows of axes: for iterations, and for each kind of bytes."""
    ratios = [4.0, *[1.0] * len(kinds)]
    return figure.subplots(
        rows, len(ratios), squeeze=False, sharey="row", width_ratios=ratios
    )


# Distances between the two bars of a policy, measured and predicted, and between
# policies.
PAIR_STEP, POLICY_STEP = 0.72, 1.75


def draw_medians(figure: Figure | SubFigure, bars: Sequence[PolicyBar]) -> None:
    """Draw measured bars and their predictions in each panel, and a legend below."""
    kinds = byte_kinds(bars)
    (panels,) = add_panels(figure, kinds)
    draw_row(panels, kinds, bars)
    panels[0].set_xlabel("median time of an iteration (ms)")
    panels[0].tick_params(axis="y", labelsize=8.5, length=0)
    add_legend(figure, bars)


def draw_row(
    panels: Sequence[Axes],
    kinds: Sequence[str],
    bars: Sequence[PolicyBar],
    bound_ms: float | None = None,
    bound_name: str = "",
    all_bars: Sequence[PolicyBar] = (),
) -> None:
    """Draw the iterations of bars with their bound, and their bytes.

    The bytes of `all_bars` have one scale.
    """
    all_bars = all_bars or bars
    _draw_iterations(panels[0], bars, bound_ms, bound_name)
    # Room for the figures behind the bars.
    ends = [
        bar.iteration_ms / (1 - _CHARACTER_SHARE * (len(bar.text) + 2)) for bar in bars
    ]
    panels[0].set_xlim(0, max([*ends, 1.02 * (bound_ms or 0.0)]) or 1.0)
    for axes, kind in zip(panels[1:], kinds, strict=True):
        _draw_bytes(
            axes, kind, bars, max(bar.bytes_by_kind.get(kind, 0.0) for bar in all_bars)
        )


def _draw_iterations(
    axes: Axes, bars: Sequence[PolicyBar], bound_ms: float | None, bound_name: str
) -> None:
    """Draw the phases of each bar one after the other.

    Draw its figure and remark behind them, and the bound as a line.
    """
    if bound_ms is not None:
        axes.axvline(bound_ms, label=bound_name, **_BOUND)
    for bar in bars:
        begin = 0.0
        for phase, length in bar.phases_ms.items():
            axes.barh(
                bar.position,
                length,
                left=begin,
                height=BAR_HEIGHT,
                **_phase_looks(phase, bar.is_faint),
            )
            begin += length
        write_figure(axes, bar.position, begin, bar.text)
    positions = [bar.position for bar in bars]
    axes.set_yticks(positions, [_wrapped(bar.name) for bar in bars], parse_math=False)
    axes.set_ylim(max(positions) + 0.5, min(positions) - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(8, prune="upper"))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bytes(
    axes: Axes, kind: str, bars: Sequence[PolicyBar], largest: float
) -> None:
    """Draw the bytes of each bar, and the figure behind it.

    The scale is the scale of the largest.
    """
    unit_bytes, unit = bytes_unit(largest)
    for bar in bars:
        if not bar.phases_ms:
            continue
        size = bar.bytes_by_kind[kind] / unit_bytes
        alpha = _FAINT_ALPHA if bar.is_faint else None
        axes.barh(
            bar.position, size, height=BAR_HEIGHT, color=_BYTES_COLOR, alpha=alpha
        )
        write_figure(axes, bar.position, size, f"{size:.3g}")
    axes.set_xlim(0, largest / unit_bytes * _BYTES_ROOM or 1)
    axes.xaxis.set_major_locator(MaxNLocator(3, prune="upper"))
    axes.set_xlabel(f"{kind} ({unit})")
    axes.tick_params(left=False, labelleft=False)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(
    figure: Figure | SubFigure, bars: Sequence[PolicyBar], more: Sequence[Artist] = ()
) -> None:
    """Add a legend of phases and of what else is drawn, with predictions if there are
    any beside measurements."""
    shown = {phase for bar in bars for phase, length in bar.phases_ms.items() if length}
    handles: list[Any] = [
        Patch(label=phase, **_phase_looks(phase, False))
        for phase in _COLORS
        if phase in shown
    ]
    if any(bar.is_faint for bar in bars):
        handles.append(
            Patch(label="lighter: predicted", color=_BYTES_COLOR, alpha=_FAINT_ALPHA)
        )
    handles += more
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=len(handles),
        frameon=False,
        fontsize=FONT_SIZE,
    )


def _phase_looks(phase: str, is_faint: bool) -> dict[str, Any]:
    looks = {
        "facecolor": _COLORS[phase],
        "hatch": _HATCHES[phase],
        "edgecolor": "white",
        "linewidth": 0.5,
    }
    return {**looks, "alpha": _FAINT_ALPHA} if is_faint else looks


def _wrapped(policy: str) -> str:
    """Return the string of a policy, split into lines if it is long.

    A line has a few of its options.
    """
    lines = [""]
    for part in policy.split(","):
        if lines[-1] and len(lines[-1]) + len(part) > _MAX_NAME_WIDTH:
            lines.append("")
        lines[-1] += f"{',' if lines[-1] else ''}{part}"
    return ",\n".join(lines)


def write_figure(axes: Axes, position: float, end: float, text: str) -> None:
    """Write a figure behind its bar."""
    axes.annotate(
        text,
        (end, position),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=FONT_SIZE,
        parse_math=False,
        # The line of the bound must not cross the text.
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
    )

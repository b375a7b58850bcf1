"""Heat maps of ranks against the times that were put into the trace."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.collections import QuadMesh

from ebbtide.analysis.plot import draw
from ebbtide.errors import TraceError
from ebbtide.features.fleets.plot_ranks import LEVEL_COLORS, heat_levels, heat_maps
from tests.analysis.metrics.ranks.fleets import fleet


def test_heat_maps__are_the_time_behind_the_median_rank() -> None:
    job = fleet(5, 6, {3: {"backward": 1.25}, 1: {"late_ms": 40.0}}, noise=0.0)
    maps = heat_maps(job)
    assert list(maps) == ["late start", "forward", "backward", "update"]
    expected = np.zeros((5, 6))
    assert maps["forward"] == pytest.approx(expected)
    assert maps["update"] == pytest.approx(expected)
    expected[3] = 100.0
    assert maps["backward"] == pytest.approx(expected)
    expected[3], expected[1] = 0.0, 40.0
    assert maps["late start"] == pytest.approx(expected)


def test_draw_ranks__has_a_cell_per_rank_and_iteration() -> None:
    job = fleet(5, 6, {3: {"backward": 1.25}}, noise=0.0)
    figure = draw([job], (1, 4), kind="ranks")
    assert [axes.get_ylabel().split("\n")[0] for axes in figure.axes] == list(
        heat_maps(job)
    )
    (mesh,) = [
        artist for artist in figure.axes[2].collections if isinstance(artist, QuadMesh)
    ]
    cells = np.asarray(mesh.get_array())
    assert cells.shape == (5, 3)
    assert cells[3] == pytest.approx(100.0)
    colors = mesh.to_rgba(cells)
    assert (colors[3] != colors[2]).any()
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert "rank 3: slow backward" in texts
    assert "5 ranks, 1 of them differ" in " ".join(
        text.get_text() for text in figure.axes[0].texts
    )


def test_draw_ranks__says_that_ranks_agree() -> None:
    figure = draw([fleet(5, 6, {}, noise=0.0)], kind="ranks")
    assert "5 ranks, which agree: none of them differs" in " ".join(
        text.get_text() for text in figure.axes[0].texts
    )


@pytest.mark.parametrize(("ranks", "span"), [(1, (0, None)), (3, (0, 1))])
def test_draw_ranks__needs_ranks_and_steady_iterations(
    ranks: int, span: tuple[int, int | None]
) -> None:
    job = fleet(ranks, 6)
    job.raw_meta["warmup_iterations"] = 2
    with pytest.raises(TraceError, match="ranks cannot be compared: it has"):
        draw([job], span, kind="ranks")


def test_heat_levels__double_and_leave_the_largest_above() -> None:
    for top in (0.3, 7.0, 160.0, 9e5):
        levels = heat_levels([np.array([0.0, np.nan, top])])
        assert len(levels) == len(LEVEL_COLORS) - 1
        assert levels[1:] == pytest.approx(2 * levels[:-1])
        assert top / 2.51 <= levels[-1] <= top
    assert (np.diff(heat_levels([np.zeros(4)])) > 0).all()

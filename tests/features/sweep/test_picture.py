"""The picture of a sweep: panels, lines and bars, and the limits of its size."""

from __future__ import annotations

import io
import warnings
from dataclasses import asdict

import pytest
from matplotlib.figure import Figure

from ebbtide.errors import UserError
from ebbtide.features.sweep.picture import Grid, draw_sweep
from ebbtide.features.sweep.task import Row, Scenario
from tests.features.sweep.sweeps import rows
from tests.interleave.job_files import machine, workload

FAST = ["zero-offload", "twin-flow:0.5", "gpu-only"]


def free(*sizes: float) -> list[Scenario]:
    return [Scenario(free_bytes=size) for size in sizes]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_draw_sweep__policies_are_lines_over_the_swept_column() -> None:
    sweep_rows = rows(FAST, free(30e9, 0.0, 10e9))
    figure = draw_sweep(sweep_rows)
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_title()) == (
        "device memory always free (GiB)",
        "box",
    )
    assert axes.get_ylabel() == "job\niteration (s)"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "9.31", "27.9"]
    order = sorted(
        (row for row in sweep_rows if row["policy"] == "twin-flow:0.5"),
        key=lambda row: float(row["free_bytes"]),
    )
    curve, misfits = (line for line in axes.lines if line.get_color() == "#d55e00")
    assert list(curve.get_ydata()) == [row["iteration_ms"] / 1e3 for row in order]
    # The state of 1e9 parameters is resident: it fits with 30 GB free, and not with 0
    # or 10.
    assert (misfits.get_markerfacecolor(), misfits.get_markevery()) == ("white", [0, 1])
    assert legend(figure) == [*FAST, "bound", "does not fit, or is not known to"]
    assert axes.get_ylim()[0] == 0


def test_draw_sweep__names_policies_that_are_not_exact() -> None:
    lines = draw_sweep(rows(["zero-offload", "zenflow:0.1"], free(0.0, 10e9)))
    assert legend(lines)[:2] == ["zero-offload", "zenflow:0.1 (not exact)"]
    texts = [
        text.get_text()
        for text in draw_sweep(rows(["zero-offload", "zenflow:0.1"])).axes[0].texts
    ]
    assert [text.endswith(" ms, not exact") for text in texts] == [False, True]


def test_draw_sweep__shows_systems_with_storage_beside_each_other() -> None:
    with_storage = machine(
        storage=[{"read_bytes_per_s": 6e9, "write_bytes_per_s": 3e9}]
    )
    # 24 GB of state and 8 GB of gradients and parameters.
    tight = workload(host_free_bytes=20e9)
    infinity = "zero-infinity:12,pipeline_read=true,pipeline_write=true"
    policies = ["pipelined", infinity, "mlp-offload", "superoffload"]
    sweep_rows = rows(policies, workloads=[tight], machines=[with_storage])
    assert [row["fits"] for row in sweep_rows] == [True, True, True, False]
    pipelined, all_stored, mlp, none_stored = (
        row["storage_read_bytes"] for row in sweep_rows
    )
    # State and fp32 gradients of 2e9 parameters.
    assert all_stored == 16 * 2e9
    assert 0 < pipelined < mlp < all_stored
    assert none_stored == 0
    figure = draw_sweep(sweep_rows)
    titles = [axes.get_xlabel() for axes in figure.axes]
    assert titles[1:] == [
        "device memory (GiB)",
        "host memory (GiB)",
        "storage traffic (GiB)",
    ]
    for axes, column in zip(
        figure.axes[1:3], ("peak_device_bytes", "host_bytes"), strict=True
    ):
        assert [text.get_text() for text in axes.texts] == [
            f"{row[column] / 2**30:.3g}" for row in sweep_rows
        ]
    texts = [text.get_text() for text in figure.axes[3].texts]
    traffic = [
        row["storage_read_bytes"] + row["storage_written_bytes"] for row in sweep_rows
    ]
    assert texts == [f"{size / 2**30:.3g}" for size in traffic]
    assert [text.get_text().partition(" ms")[2] for text in figure.axes[0].texts] == [
        "",
        "",
        "",
        ", does not fit, not exact",
    ]


def test_draw_sweep__numbers_of_parameters_have_a_logarithmic_scale() -> None:
    (axes,) = draw_sweep(
        rows(
            ["zero-offload"],
            [Scenario(scale_params=factor) for factor in (1.0, 2.0, 8.0)],
        )
    ).axes
    assert axes.get_yscale() == "log"
    # Eight times the parameters do not fit.
    assert [text.get_text() for text in axes.get_xticklabels()] == [
        "1\n2 G",
        "2\n4 G",
        "8",
    ]


def test_draw_sweep__a_column_per_machine_and_a_row_per_further_scenario() -> None:
    machines = [machine(), machine(name="other", cpu_update_params_per_s=1e9)]
    scenarios = [
        Scenario(free_bytes=size, subgroup_params=n)
        for n in (10**8, 5 * 10**8)
        for size in (0.0, 1e9, 2e9)
    ]
    figure = draw_sweep(rows(["zero-offload"], scenarios, machines=machines))
    assert [axes.get_title() for axes in figure.axes] == ["box", "other", "", ""]
    assert [axes.get_ylabel() for axes in figure.axes][::2] == [
        "job, 100M a subgroup\niteration (s)",
        "job, 500M a subgroup\niteration (s)",
    ]
    left, right = figure.axes[:2]
    assert left.get_ylim() == right.get_ylim()
    assert left.dataLim.y1 < right.dataLim.y1 < right.get_ylim()[1]


def test_draw_sweep__policies_are_bars_if_nothing_was_swept() -> None:
    sweep_rows = rows(FAST, machines=[machine(host_memory_bytes=None)])
    figure = draw_sweep(sweep_rows)
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "job on box"
    assert [text.get_text() for text in axes.get_yticklabels()] == FAST
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    # A bar per phase: other, forward, backward and update.
    assert ends[3::4] == pytest.approx([row["iteration_ms"] for row in sweep_rows])
    assert [text.get_text().partition(", ")[2] for text in axes.texts] == [
        "not known to fit",
        "does not fit",
        "does not fit",
    ]
    assert legend(figure) == ["forward", "backward", "update", "bound"]
    assert axes.get_xlim()[1] > max(ends)


@pytest.mark.slow
def test_draw_sweep__an_error_is_written_into_an_empty_panel() -> None:
    unknown_free, other = (
        workload(gpu_free_bytes=None, name="$bare_"),
        workload(subgroup_params=1e9),
    )
    figure = draw_sweep(
        rows(["adaptive", "pipelined"], workloads=[unknown_free, other])
    )
    above, below = (axes for axes in figure.axes if axes.get_title(loc="left"))
    assert (len(above.patches), len(below.patches)) == (4, 8)
    assert above.texts[0].get_text() == "no result"
    figure = draw_sweep(rows(["adaptive"], workloads=[unknown_free, other]))
    text = figure.axes[0].texts[-1]
    assert "what device memory is free" in text.get_text()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(io.BytesIO())
        draw_sweep(
            rows(["adaptive"], free(0, 1), workloads=[workload(params=1)])
        ).savefig(io.BytesIO())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [{"policy": f"interleaved:{n}"} for n in range(25)],
            "at most 24 policies as bars",
        ),
        (
            [
                {"policy": f"interleaved:{n}", "scale_params": s}
                for n in range(9)
                for s in (1.0, 2.0)
            ],
            "at most 8 policies as lines",
        ),
        ([{"machine": f"box {n}"} for n in range(7)], "7 panels"),
        (
            [
                {"scale_params": a, "free_bytes": b}
                for a in range(30)
                for b in range(30)
            ],
            "30 rows",
        ),
    ],
)
def test_grid__refuses_too_many_panels_or_policies(
    changes: list[Row], message: str
) -> None:
    row = {
        "workload": "job",
        "machine": "box",
        "policy": "pipelined",
        **asdict(Scenario()),
    }
    with pytest.raises(UserError, match=message):
        Grid.of([row | change for change in changes])

"""Comparison of two runs whose differences are known."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.analysis.metrics.summary import summarize, whole_trace
from ebbtide.analysis.timeseries.two_samples import DifferenceInterval, beyond_spread
from ebbtide.features.diff.comparison import Change, Diff, SettingChange, compare
from ebbtide.features.diff.tables import diff_view, headline
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.conftest import examples, slow_case

MS = 10**6
GPU: dict[str, Any] = {
    "device": "cuda:0",
    "kind": "cuda",
    "name": "NVIDIA H100",
    "capacity_bytes": 1000,
}
FIGURES = ("median_ms", "peak_bytes", "min_free_bytes", "h2d_bytes", "d2h_bytes")


def with_updates(
    update_ms: list[int], peak: int = 700, moved: int = 64, **meta: Any
) -> TraceBuilder:
    """Make a run with an iteration per update time, after 1 ms other, 10 ms forward and
    20 ms backward.

    The forward has some spread.
    """
    builder = TraceBuilder("recorded", **meta)
    rank = builder.rank(0, devices=[GPU], first_iteration_start_ns=0)
    now = 0
    for number, update in enumerate(update_ms):
        now += MS
        for phase, length in (
            ("forward", 10 * MS + number % 3 * MS // 10),
            ("backward", 20 * MS),
            ("update", update * MS),
        ):
            rank.phase(phase, now, now + length, number)
            rank.memory(now, peak if phase == "backward" else 100)
            if phase == "update":
                rank.transfer("h2d", now, now + MS, moved)
            now += length
    return builder


def trained(update_ms: list[int], name: str = "a.ebb", **options: Any) -> Trace:
    return with_updates(update_ms, **options).build(name)


def of(changes: list[Any], name: str) -> Any:
    return next(change for change in changes if change.name == name)


def test_compare__detects_longer_update_only() -> None:
    diff = compare(
        trained([99, 99, 30, 31, 32, 30, 31]),
        trained([99, 99, 60, 61, 63, 61, 60], "b.ebb"),
    )
    assert (diff.a, diff.b, diff.counted) == ("a.ebb", "b.ebb", (5, 5))
    update = of(diff.median_ms, "update")
    assert (update.a, update.b, update.difference, update.beyond_spread) == (
        31,
        61,
        30,
        True,
    )
    assert update.ratio == pytest.approx(61 / 31)
    assert {change.name: change.beyond_spread for change in diff.median_ms} == {
        "iteration": True,
        "forward": False,
        "backward": False,
        "update": True,
        "other": False,
    }
    assert diff.setting_changes == []


def test_compare__has_memory_and_bytes_of_both() -> None:
    diff = compare(trained([5] * 3), trained([5] * 3, peak=350, moved=128))
    assert diff.peak_bytes == [Change("device", 700, 350)]
    assert of(diff.peak_bytes, "device").ratio == 0.5
    assert (
        of(diff.min_free_bytes, "backward").a,
        of(diff.min_free_bytes, "backward").b,
    ) == (300, 650)
    assert of(diff.h2d_bytes, "update") == Change("update", 64, 128)
    assert of(diff.h2d_bytes, "forward") == Change("forward", 0, 0)
    assert of(diff.h2d_bytes, "forward").ratio is None
    assert of(diff.d2h_bytes, "update") == Change("update", 0, 0)


def test_compare__figures_missing_in_one_run_are_null() -> None:
    bare = TraceBuilder()
    bare.rank(0).phase("forward", 0, MS, 0)
    diff = compare(trained([5] * 3), bare.build())
    figures = json.loads(json.dumps(diff.as_json(), allow_nan=False))
    assert figures["counted_iterations"] == {"a": 3, "b": 1}
    (update,) = (change for change in figures["median_ms"] if change["of"] == "update")
    unknown = dict.fromkeys(("beyond_spread", "distinguishable", "difference_interval"))
    assert update == {
        "of": "update",
        "a": 5,
        "b": None,
        "difference": None,
        "ratio": None,
        **unknown,
    }
    for name in ("peak_bytes", "min_free_bytes", "h2d_bytes"):
        for change in figures[name]:
            assert (change["b"], change["difference"], change["ratio"]) == (
                None,
                None,
                None,
            )


def test_compare__accepts_traces_without_iterations_or_ranks() -> None:
    diff = compare(TraceBuilder().build(), trained([5] * 3))
    assert diff.counted == (0, 3)
    assert [change.beyond_spread for change in diff.median_ms] == [None] * 5
    assert SettingChange("device.name", None, "NVIDIA H100") in diff.setting_changes


def test_compare__does_not_distinguish_few_and_wide_iterations() -> None:
    diff = compare(trained([100, 200, 400]), trained([110, 150, 500]))
    update = of(diff.median_ms, "update")
    assert (update.a, update.b, update.is_distinguishable) == (200, 150, False)
    assert (update.interval.low, update.interval.high, update.interval.confidence) == (
        -290,
        400,
        pytest.approx(0.9),
    )
    entry = update.as_json()
    assert entry["distinguishable"] is False
    assert entry["difference_interval"]["low"] == -290
    # Three iterations are enough for a difference much larger than their spread.
    clear = of(
        compare(trained([100, 101, 102]), trained([150, 151, 152])).median_ms, "update"
    )
    assert clear.is_distinguishable is True
    assert (clear.interval.low, clear.interval.high) == (48, 52)


def test_compare__distinguishes_separate_times_whose_spread_is_wide() -> None:
    wide, short = trained([400, 7500, 10000]), trained([30, 31, 50])
    diff = compare(wide, short)
    update = of(diff.median_ms, "update")
    assert (update.beyond_spread, update.is_distinguishable, update.is_uncertain) == (
        False,
        True,
        True,
    )
    first, *_ = view = list(diff_view(diff, verbose=False))
    assert first == (
        "An iteration takes 62.1 ms in B and 7,531 ms in A, 121.27x faster (size "
        "uncertain: B - A may be -9,970 to "
        "-349.8 ms)."
    )
    times = next(
        part for part in view if not isinstance(part, str) and part.name == "median_ms"
    )
    assert times.rows[-2][-1].text == "size uncertain"
    assert "Size uncertain: " in str(times.note)
    # A difference of a certain size comes before a larger one whose size is uncertain.
    backward = of(diff.median_ms, "backward")
    steady = replace(
        backward,
        b=30.0,
        beyond_spread=True,
        interval=DifferenceInterval(9.0, 11.0, 0.9),
    )
    unchanged = replace(
        of(diff.median_ms, "iteration"), interval=DifferenceInterval(-1.0, 1.0, 0.9)
    )
    assert headline(replace(diff, median_ms=[unchanged, update, steady])).startswith(
        "Largest change: backward takes 30"
    )


def test_compare__has_totals_of_traces_without_iterations() -> None:
    runs = []
    for size, peak in ((64, 300), (128, 500)):
        builder = TraceBuilder()
        rank = (
            builder.rank(0, devices=[GPU])
            .transfer("h2d", 0, MS, size)
            .memory(0, peak)
            .memory(4 * MS, 0)
        )
        rank.kernel(0, 2 * MS).kernel(3 * MS, 4 * MS, "communication")
        builder.rank(1, devices=[GPU]).transfer("h2d", 0, MS, 1)
        runs.append(builder.build())
    diff = compare(*runs)
    totals = {change.name: (change.a, change.b) for change in diff.totals}
    assert totals == {
        "span_ms": (4, 4),
        "h2d_bytes": (65, 129),
        "d2h_bytes": (0, 0),
        "min_free_bytes": (700, 500),
        "compute_ms": (2, 2),
        "communication_ms": (1, 1),
        "copy_ms": (1, 1),
        "idle_ms": (1, 1),
    }
    assert [entry["of"] for entry in diff.as_json()["totals"]] == list(totals)
    assert summarize(runs[0]).totals == whole_trace(runs[0])
    assert summarize(trained([5] * 3)).totals is None
    assert set(asdict(whole_trace(TraceBuilder().build())).values()) == {None}


def test_compare__has_the_time_of_kernels_in_an_iteration() -> None:
    runs = []
    for kernels in ({"gemm": 3, "relu": 2}, {"gemm": 5, "gelu": 1}):
        builder = with_updates([5] * 4)
        for number in range(4):
            for position, (name, length) in enumerate(kernels.items()):
                start = (number * 36 + 2 + 10 * position) * MS
                builder.rank(0).kernel(start, start + length * MS, "compute", name)
        runs.append(builder.build())
    changes = [(change.name, change.a, change.b) for change in compare(*runs).kernels]
    assert sorted(changes) == [
        ("gelu", 0.0, 1.0),
        ("gemm", 3.0, 5.0),
        ("relu", 2.0, 0.0),
    ]
    assert changes[-1][0] == "gelu"
    assert compare(runs[0], with_updates([5] * 4).build()).kernels == []
    assert compare(*runs).operators == []


def test_compare__has_the_time_of_operators_in_an_iteration() -> None:
    runs = []
    for lengths in ((3, 2), (5, 1)):
        builder = with_updates([5] * 4)
        for number in range(4):
            start = (number * 36 + 2) * MS
            for name, length, operator in (
                ("gemm", lengths[0], "mm"),
                ("splitk", lengths[1], "mm"),
                ("x", 1, None),
            ):
                builder.rank(0).kernel(
                    start, start + length * MS, "compute", name, operator=operator
                )
                start += 10 * MS
        runs.append(builder.build())
    diff = compare(*runs)
    assert [(change.name, change.a, change.b) for change in diff.operators] == [
        ("mm", 5.0, 6.0)
    ]
    *_, table = diff_view(diff, by="operator")
    assert [row[0].text for row in table.rows] == ["mm"]
    assert list(diff_view(compare(runs[0], runs[0]), by="operator"))[-2:-1] == [
        "No operator differs."
    ]
    unknown = list(
        diff_view(compare(runs[0], with_updates([5] * 4).build()), by="operator")
    )
    assert any(
        "Not known in both runs: the operators" in line
        for line in unknown
        if isinstance(line, str)
    )


def test_compare__lists_differing_settings() -> None:
    one = {
        "command": ["python", "train.py"],
        "options": {"poll_ms": 25.0, "transfers": False},
    }
    other = {
        "command": ["python", "train.py", "--fast"],
        "options": {"poll_ms": 25.0, "transfers": True},
    }
    a, b = (
        trained([5] * 3, **one, host={"name": "here"}),
        trained([5] * 3, **other, host={"name": "there"}),
    )
    entries = a.raw_meta["ranks"][0], b.raw_meta["ranks"][0]
    entries[0].update(
        torch="2.8",
        threads={"torch": 1, "omp": "1"},
        optimizers=[{"class": "AdamW", "state_bytes": 8}],
    )
    entries[1].update(
        torch="2.9",
        threads={"torch": 2, "omp": "1"},
        optimizers=[{"class": "Adam", "state_bytes": 8}],
    )
    entries[0].update(model={"params": 7, "dtypes": {"float32": 7}})
    entries[1]["devices"] = [
        {**GPU, "capacity_bytes": 2000, "link": {"peak_bytes_per_s": 5}}
    ]
    assert compare(a, b).setting_changes == [
        SettingChange(
            "command", ["python", "train.py"], ["python", "train.py", "--fast"]
        ),
        SettingChange("torch", "2.8", "2.9"),
        SettingChange("threads.torch", 1, 2),
        SettingChange("device.capacity_bytes", 1000, 2000),
        SettingChange("model.params", 7, None),
        SettingChange("model.dtypes", {"float32": 7}, None),
        SettingChange("optimizer.class", "AdamW", "Adam"),
        SettingChange("host.name", "here", "there"),
        SettingChange("options.transfers", False, True),
        SettingChange("link.peak_bytes_per_s", None, 5),
    ]


def figures(diff: Diff) -> list[Change]:
    return [change for name in FIGURES for change in getattr(diff, name)]


RUNS = st.lists(st.integers(0, 100), max_size=9).map(trained)


@settings(max_examples=examples(10, by_default=3))
@given(RUNS, RUNS)
def test_compare__equals_summaries_and_is_antisymmetric(a: Trace, b: Trace) -> None:
    diff, back = compare(a, b), compare(b, a)
    for change, mirrored in zip(figures(diff), figures(back), strict=True):
        assert (change.name, change.a, change.b) == (
            mirrored.name,
            mirrored.b,
            mirrored.a,
        )
        assert change.difference is None or change.difference == -(
            mirrored.difference or 0
        )
    assert [c.beyond_spread for c in diff.median_ms] == [
        c.beyond_spread for c in back.median_ms
    ]
    assert [(s.setting, s.a, s.b) for s in diff.setting_changes] == [
        (s.setting, s.b, s.a) for s in back.setting_changes
    ]
    for side, trace in (("a", a), ("b", b)):
        summary = summarize(trace)
        expected = {phase.phase: phase.median_ms for phase in summary.phases} | {
            "iteration": summary.iteration_ms
        }
        assert {
            change.name: getattr(change, side) for change in diff.median_ms
        } == expected


VALUES = st.lists(st.integers(0, 10**6), max_size=12)


@given(VALUES, VALUES, st.integers(-(10**6), 10**6), st.integers(1, 1000))
def test_beyond_spread__is_invariant_to_scale(
    a: list[int], b: list[int], shift: int, scale: int
) -> None:
    one, other = pd.Series(a, dtype=float), pd.Series(b, dtype=float)
    verdict = beyond_spread(one, other)
    assert (verdict is None) == (min(len(a), len(b)) < 3)
    # By powers of two nothing is rounded.
    assert beyond_spread(one * 2.0**10, other * 2.0**10) == verdict
    if verdict is not None:
        far = pd.Series(b, dtype=float) + 20 * (10**6 + 1)
        assert beyond_spread(one, far) is True


@pytest.mark.parametrize("count", [3, slow_case(5), 10, slow_case(50)])
def test_beyond_spread__has_few_false_and_missed_differences(count: int) -> None:
    random = np.random.default_rng(0)
    draws = random.lognormal(0, 0.5, (2, 500, count)) + 10 * (
        random.random((2, 500, count)) < 0.1
    )
    false = sum(
        bool(beyond_spread(pd.Series(a), pd.Series(b)))
        for a, b in zip(*draws, strict=True)
    )
    assert false <= 10
    true = sum(
        bool(beyond_spread(pd.Series(a), pd.Series(b)))
        for a, b in zip(draws[0], 40 + draws[1], strict=True)
    )
    assert true >= 450


def test_diff__names_peaks_first_and_no_ratio_to_next_to_nothing() -> None:
    runs = []
    for peak, down in ((500 << 20, 1), (450 << 20, 256 << 20)):
        rank = (builder := TraceBuilder()).rank(0, devices=[GPU])
        for number in range(3):
            begin = 40 * MS * number
            for place, phase in enumerate(("forward", "backward", "update")):
                start = begin + 10 * MS * place
                rank.phase(phase, start, start + 10 * MS, number)
            rank.memory(begin, peak, "allocated", "cuda:0")
            rank.transfer("d2h", begin, begin + MS, down, "cuda:0")
        runs.append(builder.build())
    diff = compare(*runs)
    assert headline(diff).startswith("Largest change: the peak of allocated memory is")
    assert of(diff.d2h_bytes, "forward").ratio is None
    sizes = next(
        part
        for part in diff_view(diff, verbose=False)
        if not isinstance(part, str) and part.name == "sizes"
    )
    assert sizes.rows[0][0].text == "peak allocated"

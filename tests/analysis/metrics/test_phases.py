"""Memory and link use of each phase, against direct counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis.metrics.memory import memory_use
from ebbtide.analysis.metrics.phases import link_table, phase_bytes, phase_peaks
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import Trace, TraceBuilder

MS = 10**6
DEVICE = {
    "device": "cuda:0",
    "kind": "cuda",
    "capacity_bytes": 100,
    "link": {"peak_bytes_per_s": 1e9},
}

# ms of other, forward, backward and update
iterations = st.lists(st.tuples(*[st.integers(0, 6)] * 4), min_size=1, max_size=4)
# (start, length, bytes) in ms
copies = st.lists(
    st.tuples(st.integers(0, 70), st.integers(1, 9), st.integers(0, 10**6)), max_size=8
)
memory = st.dictionaries(st.integers(0, 80), st.integers(0, 100), max_size=20)


def built(
    lengths: list[tuple[int, ...]],
    h2d: Any = (),
    d2h: Any = (),
    samples: Any = None,
    source: str = "imported",
    **meta: Any,
) -> TraceBuilder:
    builder = TraceBuilder(source)
    rank = builder.rank(0, devices=[DEVICE], first_iteration_start_ns=0, **meta)
    now = 0
    for iteration, (other, *phases) in enumerate(lengths):
        now += other
        for phase, length in zip(PHASES, phases, strict=True):
            rank.phase(phase, now * MS, (now + length) * MS, iteration)
            now += length
    for direction, rows in (("h2d", h2d), ("d2h", d2h)):
        for start, length, size in rows:
            rank.transfer(direction, start * MS, (start + length) * MS, size)
    for t, size in (samples or {}).items():
        rank.memory(t * MS, size)
    return builder


def clock(lengths: list[tuple[int, ...]]) -> list[tuple[int, str]]:
    """(iteration, phase) of each ms."""
    rows = (zip(("other", *PHASES), row, strict=True) for row in lengths)
    return [
        (n, name)
        for n, row in enumerate(rows)
        for name, length in row
        for _ in range(length)
    ]


def ticks(rows: Any) -> set[int]:
    return {t for start, length, _ in rows for t in range(start, start + length)}


@given(iterations, copies, copies)
def test_link_table__equals_direct_count(lengths: Any, h2d: Any, d2h: Any) -> None:
    trace = built(lengths, h2d, d2h, transfers_recorded=True).build()
    phase_of_tick = clock(lengths)
    table = link_table(trace, 0).frame
    parts = set()
    for row in table.itertuples():
        own, other = (h2d, d2h) if row.direction == "h2d" else (d2h, h2d)
        span = {
            t
            for t, where in enumerate(phase_of_tick)
            if where == (row.iteration, row.phase)
        }
        parts.add((row.iteration, row.phase))
        assert row.length_ms == len(span)
        assert row.busy_ms == len(span & ticks(own))
        assert row.both_ms == len(span & ticks(own) & ticks(other))
        exact = sum(
            size * len(span & ticks([(a, length, 0)])) / length
            for a, length, size in own
        )
        assert row.bytes == pytest.approx(exact, abs=1e-3)
    assert set(phase_of_tick) <= parts
    assert len(table) == 2 * len(parts)
    for direction, rows in (("h2d", h2d), ("d2h", d2h)):
        sizes = phase_bytes(trace, 0, direction)
        assert sizes is not None
        inside = sum(
            size * len(set(range(len(phase_of_tick))) & ticks([(a, n, 0)])) / n
            for a, n, size in rows
        )
        of_table = table.loc[table["direction"] == direction, "bytes"].sum()
        assert (
            sizes.frame.to_numpy().sum()
            == pytest.approx(of_table)
            == pytest.approx(inside, abs=1e-3)
        )
        assert list(sizes.columns) == [*PHASES, "other"]


def test_link_table__sum_needs_every_part_of_phase() -> None:
    # Two micro-steps in the second iteration; samples up to the middle of its first
    # forward.
    builder = built([(0, 10, 10, 10)], transfers_recorded=False)
    rank = builder.rank(0)
    for n, phase in enumerate(("forward", "backward", "forward", "backward", "update")):
        rank.phase(phase, (30 + 10 * n) * MS, (40 + 10 * n) * MS, 1, n // 2)
    for t in range(10, 51, 10):
        rank.link(t * MS, 10 * MS, "gpm", h2d_bytes_per_s=1e8)
    trace = builder.build()
    table = link_table(trace, 0).frame.set_index(["direction", "iteration", "phase"])[
        "bytes"
    ]
    assert [table["h2d", 0, phase] for phase in PHASES] == pytest.approx([1e6] * 3)
    assert np.isnan(table["h2d", 1, "forward"])
    assert np.isnan(table["h2d", 1, "backward"])
    assert table["d2h"].isna().all()
    sizes = phase_bytes(trace, 0, "h2d")
    assert sizes is not None
    assert sizes.columns["other"].tolist() == [0, 0]
    assert phase_bytes(trace, 0, "d2h") is None
    assert link_table(trace, 0).frame["busy_ms"].isna().all()


@given(iterations, memory)
def test_phase_peaks__equal_direct_maximum(
    lengths: Any, samples: dict[int, int]
) -> None:
    trace = built(lengths, samples=samples).build()
    table = phase_peaks(trace, 0, "device").frame
    phase_of_tick = clock(lengths)
    for iteration, phase in set(phase_of_tick):
        span = [
            t for t, where in enumerate(phase_of_tick) if where == (iteration, phase)
        ]
        # A phase begins with what there was, and ends with what its last moment brings.
        sizes = [
            samples[max(s for s in samples if s <= t)]
            for t in (*span, span[-1] + 1)
            if t >= min(samples, default=99)
        ]
        if sizes:
            assert table.loc[iteration, phase] == max(sizes)
        else:
            assert np.isnan(table.loc[iteration, phase])


@pytest.mark.parametrize(
    "trace", [built([]).build(), built([], [(0, 5, 9)], samples={0: 5}).build()]
)
def test_phase_tables__are_empty_without_iterations(trace: Trace) -> None:
    assert phase_peaks(trace, 0, "device").frame.empty
    assert link_table(trace, 0).frame.empty
    sizes = phase_bytes(trace, 0, "h2d")
    assert sizes is None or sizes.frame.empty


def test_phase_tables__leave_out_unfinished_phases() -> None:
    builder = built([(0, 10, 10, 10)], [(0, 60, 60)])
    builder.rank(0).phase("forward", 40 * MS, 50 * MS)
    table = link_table(builder.build(), 0).frame
    assert table["iteration"].unique().tolist() == [0]
    assert isinstance(table, pd.DataFrame)
    assert table.loc[table["direction"] == "h2d", "bytes"].sum() == pytest.approx(30)


def test_phase_peaks__are_unknown_where_a_recorder_left_out_the_readings_of_an_iteration() -> (
    None
):
    lengths = [(0, 1, 1, 1)] * 4
    # Iteration 1 and 3 have none; a reading between phases does not count.
    samples = {1: 10, 2: 30, 3: 20, 4: 25, 7: 12, 8: 32, 9: 22, 10: 25}
    trace = built(lengths, samples=samples, source="recorded").build()
    peaks = phase_peaks(trace, 0, "device").frame
    assert peaks["backward"].isna().tolist() == [False, True, False, True]
    assert peaks["backward"].dropna().tolist() == [30, 32]
    uses = {use.phase: use.peak_bytes for use in memory_use(trace).pools}
    assert uses["backward"] == 31
    imported = built(lengths, samples=samples).build()
    assert phase_peaks(imported, 0, "device").columns["backward"].tolist() == [
        30,
        25,
        32,
        25,
    ]

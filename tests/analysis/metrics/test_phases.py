"""What memory and link did in each phase, against direct counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis.metrics.phases import link_table, phase_bytes, phase_peaks
from ebbtide.profiler.trace import Trace, TraceBuilder

MS = 10**6
DEVICE = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": 100, "link": {"peak_bytes_per_s": 1e9}}
PHASES = ("forward", "backward", "update")

# ms of other, forward, backward and update
iterations = st.lists(st.tuples(*[st.integers(0, 6)] * 4), min_size=1, max_size=4)
# (start, length, bytes) in ms
copies = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 9), st.integers(0, 10**6)), max_size=8)
memory = st.dictionaries(st.integers(0, 80), st.integers(0, 100), max_size=20)


def built(
    lengths: list[tuple[int, ...]], h2d: Any = (), d2h: Any = (), samples: Any = None, **meta: Any
) -> TraceBuilder:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE], first_iteration_start_ns=0, **meta)
    now = 0
    for iteration, (other, *phases) in enumerate(lengths):
        now += other
        for phase, length in zip(PHASES, phases, strict=True):
            rank.phase(phase, now * MS, (now + length) * MS, iteration)
            now += length
    for way, rows in (("h2d", h2d), ("d2h", d2h)):
        for start, length, size in rows:
            rank.transfer(way, start * MS, (start + length) * MS, size)
    for t, size in (samples or {}).items():
        rank.memory(t * MS, size)
    return builder


def clock(lengths: list[tuple[int, ...]]) -> list[tuple[int, str]]:
    """(iteration, phase) of each ms."""
    rows = (zip(("other", *PHASES), row, strict=True) for row in lengths)
    return [(n, name) for n, row in enumerate(rows) for name, length in row for _ in range(length)]


def ticks(rows: Any) -> set[int]:
    return {t for start, length, _ in rows for t in range(start, start + length)}


@given(iterations, copies, copies)
def test_the_link_table_is_what_a_clock_counts(lengths: Any, h2d: Any, d2h: Any) -> None:
    trace = built(lengths, h2d, d2h, transfers_recorded=True).build()
    at = clock(lengths)
    table = link_table(trace, 0)
    seen = set()
    for row in table.itertuples():
        own, other = (h2d, d2h) if row.direction == "h2d" else (d2h, h2d)
        span = {t for t, where in enumerate(at) if where == (row.iteration, row.phase)}
        seen.add((row.iteration, row.phase))
        assert row.length_ms == len(span)
        assert row.busy_ms == len(span & ticks(own))
        assert row.both_ms == len(span & ticks(own) & ticks(other))
        exact = sum(size * len(span & ticks([(a, length, 0)])) / length for a, length, size in own)
        assert row.bytes == pytest.approx(exact, abs=1e-3)
    assert set(at) <= seen
    assert len(table) == 2 * len(seen)
    for way, rows in (("h2d", h2d), ("d2h", d2h)):
        sizes = phase_bytes(trace, 0, way)
        assert sizes is not None
        inside = sum(size * len(set(range(len(at))) & ticks([(a, n, 0)])) / n for a, n, size in rows)
        of_table = table.loc[table["direction"] == way, "bytes"].sum()
        assert sizes.to_numpy().sum() == pytest.approx(of_table) == pytest.approx(inside, abs=1e-3)
        assert list(sizes.columns) == [*PHASES, "other"]


def test_a_phase_of_several_parts_is_known_where_each_part_is() -> None:
    # Two micro-steps in the second iteration; samples up to the middle of its first forward.
    builder = built([(0, 10, 10, 10)], transfers_recorded=False)
    rank = builder.rank(0)
    for n, phase in enumerate(("forward", "backward", "forward", "backward", "update")):
        rank.phase(phase, (30 + 10 * n) * MS, (40 + 10 * n) * MS, 1, n // 2)
    for t in range(10, 51, 10):
        rank.link(t * MS, 10 * MS, "gpm", h2d_bytes_per_s=1e8)
    trace = builder.build()
    table = link_table(trace, 0).set_index(["direction", "iteration", "phase"])["bytes"]
    assert [table["h2d", 0, phase] for phase in PHASES] == pytest.approx([1e6] * 3)
    assert np.isnan(table["h2d", 1, "forward"])
    assert np.isnan(table["h2d", 1, "backward"])
    assert table["d2h"].isna().all()
    sizes = phase_bytes(trace, 0, "h2d")
    assert sizes is not None
    assert sizes["other"].tolist() == [0, 0]
    assert phase_bytes(trace, 0, "d2h") is None
    assert link_table(trace, 0)["busy_ms"].isna().all()


@given(iterations, memory)
def test_peaks_are_what_a_clock_sees(lengths: Any, samples: dict[int, int]) -> None:
    trace = built(lengths, samples=samples).build()
    table = phase_peaks(trace, 0, "device")
    at = clock(lengths)
    for iteration, phase in set(at):
        span = [t for t, where in enumerate(at) if where == (iteration, phase)]
        # A phase begins with what there was, and ends with what its last moment brings.
        held = [
            samples[max(s for s in samples if s <= t)] for t in (*span, span[-1] + 1) if t >= min(samples, default=99)
        ]
        if held:
            assert table.loc[iteration, phase] == max(held)
        else:
            assert np.isnan(table.loc[iteration, phase])


def test_the_highest_part_of_a_phase_is_its_peak() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE], first_iteration_start_ns=0)
    for n, phase in enumerate(("forward", "backward", "forward", "backward", "update")):
        rank.phase(phase, 10 * n, 10 * n + 9, 0, n // 2).memory(10 * n, (30, 50, 40, 20, 10)[n])
    assert phase_peaks(builder.build(), 0, "device").loc[0].to_dict() == {
        "forward": 40,
        "backward": 50,
        "update": 10,
        "other": 50,  # between the parts, with what the one before left
    }


@pytest.mark.parametrize("trace", [built([]).build(), built([], [(0, 5, 9)], samples={0: 5}).build()])
def test_a_trace_without_iterations_has_empty_tables(trace: Trace) -> None:
    assert phase_peaks(trace, 0, "device").empty
    assert link_table(trace, 0).empty
    sizes = phase_bytes(trace, 0, "h2d")
    assert sizes is None or sizes.empty


def test_unfinished_phases_do_not_count() -> None:
    builder = built([(0, 10, 10, 10)], [(0, 60, 60)])
    builder.rank(0).phase("forward", 40 * MS, 50 * MS)
    table = link_table(builder.build(), 0)
    assert table["iteration"].unique().tolist() == [0]
    assert isinstance(table, pd.DataFrame)
    assert table.loc[table["direction"] == "h2d", "bytes"].sum() == pytest.approx(30)

"""Tests exported traces: valid Trace Event Format, with the exact contents of the
trace."""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import TraceError
from ebbtide.features.export.chrome_trace import write_chrome_trace
from ebbtide.profiler.trace import RankBuilder, Trace, TraceBuilder
from tests.features.export.trace_event_file import (
    counter,
    export_and_read,
    rows,
    slices,
    values_of,
)

START = 1_700_000_000_000_000_001
H100 = {
    "device": "cuda:0",
    "kind": "cuda",
    "name": "NVIDIA H100",
    "capacity_bytes": 1000,
}


TIMES = st.integers(0, 5000)
LENGTHS = st.integers(0, 900)
SIZES = st.none() | st.integers(0, 2**62)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    builder = TraceBuilder(clock={"wall_offset_ns": 5})
    for rank in range(draw(st.integers(1, 2))):
        one = builder.rank(rank, devices=[H100] if draw(st.booleans()) else [])
        now = START
        for number in range(draw(st.integers(0, 4))):
            for phase in ("forward", "backward", "update"):
                start = now + draw(LENGTHS)
                now = start + draw(LENGTHS)
                gpu = (
                    sorted([start + draw(TIMES) - 1000, now + draw(TIMES)])
                    if draw(st.booleans())
                    else []
                )
                one.phase(
                    phase,
                    start,
                    now,
                    draw(st.sampled_from([number, None])),
                    draw(st.integers(0, 2)),
                    *gpu,
                )
        draw_copies_and_ops(draw, one)
        for t in draw(st.lists(TIMES, max_size=6)):
            pool = draw(st.sampled_from(["device", "allocated"]))
            one.memory(START + t, draw(st.integers(0, 2**62)), pool)
    return builder.build()


def draw_copies_and_ops(draw: st.DrawFn, one: RankBuilder) -> None:
    for t in draw(st.lists(TIMES, max_size=8)):
        one.transfer(
            draw(st.sampled_from(["h2d", "d2h"])),
            START + t,
            START + t + draw(LENGTHS),
            draw(SIZES),
            device=draw(st.sampled_from(["cuda:0", "cuda:1"])),
            stream=draw(st.none() | st.integers(1, 2)),
            host_memory=draw(st.sampled_from([None, "pinned"])),
            name=draw(st.text(max_size=4)),
        )
    for t in draw(st.lists(TIMES, max_size=8)):
        times = {"start_ns": START + t, "end_ns": START + t + draw(LENGTHS)}
        values = {
            "bytes": draw(SIZES),
            "parent": draw(st.none() | st.integers(-1, 9)),
            "subgroup": draw(SIZES),
        }
        one.add(
            "ops",
            resource=draw(st.sampled_from(["cpu", "gpu"])),
            name="step",
            **times,
            **values,
        )


@given(trace=traces())
def test_write_chrome_trace__has_every_phase_copy_and_op_once_and_exact(
    trace: Trace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = export_and_read(trace, tmp_path_factory.mktemp("out") / "x.json")
    for pid, rank in enumerate(trace.ranks, start=1):
        phases = trace.phases(rank)
        columns = ("iteration", "micro_step")
        host = slices(file, "phase", pid)
        assert values_of(host, "name", "start_ns", "end_ns", *columns) == rows(
            phases, "phase", "start_ns", "end_ns", *columns
        )
        with_gpu_times = phases[phases["gpu_start_ns"].notna()]
        device = slices(file, "device phase", pid)
        assert values_of(device, "name", "start_ns", "end_ns", *columns) == rows(
            with_gpu_times, "phase", "gpu_start_ns", "gpu_end_ns", *columns
        )
        columns = (
            "name",
            "start_ns",
            "end_ns",
            "direction",
            "bytes",
            "host_memory",
            "device",
            "stream",
        )
        copies = slices(file, "copy", pid)
        assert values_of(copies, *columns) == rows(trace.transfers(rank), *columns)
        assert all(
            e["track"].startswith(
                f"{e['args']['direction']} copies {e['args']['device']}"
            )
            for e in copies
        )
        columns = (
            "name",
            "start_ns",
            "end_ns",
            "resource",
            "bytes",
            "subgroup",
            "parent",
            "row",
        )
        ops = trace.ops(rank)
        assert values_of(slices(file, "op", pid), *columns) == rows(
            ops.assign(row=range(len(ops))), *columns
        )
        for (name, pool), samples in trace.memory(rank).groupby(["device", "pool"]):
            expected = list(
                samples[["t_ns", "bytes"]].itertuples(index=False, name=None)
            )
            assert counter(file, f"memory {name} {pool}", pid) == expected


def test_write_chrome_trace__names_processes_tracks_and_counters(
    tmp_path: Path,
) -> None:
    builder = TraceBuilder("recorded", clock={"wall_offset_ns": 1000}, notes=["a note"])
    rank = builder.rank(3, devices=[H100], first_iteration_start_ns=START)
    rank.phase("forward", START + 10, START + 20, 7, 0, START + 15, START + 40)
    rank.phase("update", START + 30, START + 50, 7, 0, START + 45, START + 90)
    rank.transfer(
        "h2d",
        START + 60,
        START + 70,
        64,
        host_memory="pinned",
        stream=7,
        name="Memcpy HtoD",
    )
    rank.memory(START + 12, 500).memory(START + 14, 700, "rss", device="cpu")
    file = export_and_read(builder.build("job.ebb"), tmp_path / "x.json")
    other = file["otherData"]
    assert (other["trace"], other["source"], other["notes"]) == (
        "job.ebb",
        "recorded",
        ["a note"],
    )
    assert (other["start_ns"], other["start_unix_ns"]) == (START, START + 1000)
    names = {
        e["name"]: e["args"]
        for e in file["traceEvents"]
        if e["ph"] == "M" and "tid" not in e
    }
    assert names == {
        "process_name": {"name": "rank 3 · NVIDIA H100"},
        "process_sort_index": {"sort_index": 1},
    }
    tracks = [
        e["args"]["name"] for e in file["traceEvents"] if e["name"] == "thread_name"
    ]
    assert tracks == [
        "iterations",
        "phases (host)",
        "phases (device)",
        "h2d copies cuda:0",
    ]
    (iteration,) = slices(file, "iteration")
    assert (iteration["name"], iteration["ts"], iteration["dur"]) == (
        "iteration 7",
        Decimal("0"),
        Decimal("0.050"),
    )
    assert iteration["args"] == {"iteration": 7}
    assert counter(file, "memory cuda:0 device") == [(START + 12, 500)]
    assert counter(file, "memory cpu rss") == [(START + 14, 700)]


def test_write_chrome_trace__has_a_counter_per_quantity_of_the_gpu(
    tmp_path: Path,
) -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[H100])
    rank.gpu(START, utilization_percent=97.0, power_w=402.5, throttle_reasons=4)
    rank.gpu(START + 100, "cuda:1", power_w=71.25).gpu(
        START + 200, utilization_percent=0.0, power_w=float("inf")
    )
    file = export_and_read(builder.build(), tmp_path / "x.json")
    assert file["otherData"]["start_ns"] == START
    assert {event["name"] for event in file["traceEvents"] if event["ph"] == "C"} == {
        *(
            "gpu cuda:0 utilization",
            "gpu cuda:0 power",
            "gpu cuda:0 throttle",
            "gpu cuda:1 power",
        ),
    }
    assert counter(file, "gpu cuda:0 utilization") == [(START, 97), (START + 200, 0)]
    assert counter(file, "gpu cuda:0 power") == [(START, 402.5)]
    assert counter(file, "gpu cuda:0 throttle") == [(START, 4)]
    assert counter(file, "gpu cuda:1 power") == [(START + 100, 71.25)]


def test_write_chrome_trace__marks_time_without_link_samples(tmp_path: Path) -> None:
    builder = TraceBuilder()
    rank = builder.rank(0)
    # Two windows that follow each other, a sample without h2d, one that begins late,
    # and one that overlaps it.
    for t, window, h2d, d2h in (
        (20, 10, 1e9, 5.5),
        (30, 10, 2e9, 0),
        (40, 10, None, 7),
        (70, 20, 3e9, 8),
        (75, 9, 4e9, 9),
    ):
        rank.link(t, window, "gpm", h2d_bytes_per_s=h2d, d2h_bytes_per_s=d2h)
    file = export_and_read(builder.build(), tmp_path / "x.json")
    assert counter(file, "link cuda:0 h2d") == [
        (10, 1e9),
        (20, 2e9),
        (30, 0),
        (50, 3e9),
        (70, 4e9),
        (75, 0),
    ]
    assert counter(file, "link cuda:0 d2h") == [
        (10, 5.5),
        (20, 0),
        (30, 7),
        (40, 0),
        (50, 8),
        (70, 9),
        (75, 0),
    ]
    gaps = [(e["track"], e["start_ns"], e["end_ns"]) for e in slices(file, "unknown")]
    assert gaps == [
        ("link cuda:0 h2d: not sampled", 30, 50),
        ("link cuda:0 d2h: not sampled", 40, 50),
    ]


def test_write_chrome_trace__gz_is_reproducible_and_equals_plain_file(
    tmp_path: Path,
) -> None:
    builder = TraceBuilder()
    builder.rank(0).memory(1, 2)
    plain = export_and_read(builder.build(), tmp_path / "x.json")
    assert export_and_read(builder.build(), tmp_path / "x.json.gz") == plain
    write_chrome_trace(builder.build(), tmp_path / "y.json.gz")
    assert (tmp_path / "x.json.gz").read_bytes() == (
        tmp_path / "y.json.gz"
    ).read_bytes()


@pytest.mark.parametrize(
    ("table", "kind", "row"),
    [
        ("phases", "phase", {"phase": "forward", "micro_step": 0}),
        (
            "transfers",
            "copy",
            {"direction": "h2d", "bytes": 1, "name": "n", "device": "cuda:0"},
        ),
        ("ops", "op", {"name": "n", "resource": "cpu"}),
        ("kernels", "kernel", {"name": "n", "device": "cuda:0", "kind": "compute"}),
        ("annotations", "annotation", {"name": "n"}),
    ],
)
def test_write_chrome_trace__refuses_negative_lengths_and_writes_nothing(
    tmp_path: Path, table: str, kind: str, row: dict[str, Any]
) -> None:
    builder = TraceBuilder()
    builder.rank(0).add(table, start_ns=5, end_ns=4, **row)
    with pytest.raises(TraceError, match=f"an? {kind} ends before it starts"):
        write_chrome_trace(builder.build(), tmp_path / "x.json")
    assert os.listdir(tmp_path) == []

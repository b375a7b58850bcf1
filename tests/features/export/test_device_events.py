"""Tests exported kernels, copies, launches, flows and annotations."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.features.export import chrome_trace
from ebbtide.features.export.chrome_trace import write_chrome_trace
from ebbtide.features.importers.load import import_trace
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.features.export.trace_event_file import (
    counter,
    export_and_read,
    flows,
    rows,
    slices,
    values_of,
)

# An odd number of nanoseconds that a double of microseconds since 1970 cannot hold.
START = 1_700_000_000_123_456_789
GPU = {"device": "cuda:0", "kind": "cuda"}
TIMES = st.integers(0, 5000)
LENGTHS = st.integers(0, 900)
STREAMS = st.none() | st.integers(0, 2)
LAUNCHES = st.none() | st.integers(-100, 900)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    builder = TraceBuilder()
    for number in range(draw(st.integers(1, 2))):
        rank = builder.rank(number, devices=[GPU])
        for t in draw(st.lists(TIMES, max_size=12)):
            start, before = START + t, draw(LAUNCHES)
            times = {"start_ns": start, "end_ns": start + draw(LENGTHS)}
            times |= {
                "launch_ns": None if before is None else start - before,
                "stream": draw(STREAMS),
            }
            device = draw(st.sampled_from(["cuda:0", "cuda:1"]))
            if draw(st.booleans()):
                kind = draw(
                    st.sampled_from(["compute", "communication", "copy", "memset"])
                )
                rank.add(
                    "kernels",
                    device=device,
                    kind=kind,
                    name=draw(st.text(max_size=4)),
                    **times,
                )
            else:
                rank.add(
                    "transfers",
                    device=device,
                    direction="h2d",
                    bytes=t,
                    name="Memcpy HtoD",
                    **times,
                )
        for t in draw(st.lists(TIMES, max_size=8)):
            thread = draw(st.none() | st.integers(1, 2))
            rank.add(
                "annotations",
                start_ns=START + t,
                end_ns=START + t + draw(LENGTHS),
                name="range",
                thread=thread,
            )
    return builder.build()


@given(trace=traces())
def test_write_chrome_trace__has_every_kernel_copy_and_annotation_once_and_exact(
    trace: Trace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = export_and_read(trace, tmp_path_factory.mktemp("out") / "x.json")
    has_launch = 0
    for pid, rank in enumerate(trace.ranks, start=1):
        kernels, copies = trace.kernels(rank), trace.transfers(rank)
        columns = ("name", "start_ns", "end_ns", "device", "stream", "kind")
        events = [
            e
            for category in ("kernel", "gpu_memcpy", "gpu_memset")
            for e in slices(file, category, pid)
        ]
        assert values_of(events, *columns) == rows(kernels, *columns)
        columns = ("name", "start_ns", "end_ns", "device", "stream", "bytes")
        assert values_of(slices(file, "copy", pid), *columns) == rows(copies, *columns)
        columns = ("name", "start_ns", "end_ns", "thread")
        annotations = trace.annotations(rank)
        assert values_of(slices(file, "user_annotation", pid), *columns) == rows(
            annotations, *columns
        )
        has_launch += sum(
            int((table["launch_ns"] <= table["start_ns"]).sum())
            for table in (kernels, copies)
        )
    # `export_and_read` checks that both ends of each flow are on a slice.
    assert len(flows(file)) == has_launch


def built(copies: bool = True) -> Trace:
    """Build kernels on two streams that overlap, with launches, and a copy on a
    third."""
    builder = TraceBuilder(clock={"wall_offset_ns": 1000})
    rank = builder.rank(0, devices=[GPU])
    rank.kernel(
        START + 1001, START + 3000, name="gemm", launch_ns=START + 501, stream=7
    )
    rank.kernel(
        START + 2000,
        START + 3000,
        "communication",
        "ncclDevKernel_AllReduce",
        stream=20,
    )
    rank.kernel(
        START + 2500, START + 4000, name="relu", launch_ns=START + 601, stream=7
    )
    if copies:
        rank.transfer(
            "h2d",
            START + 3100,
            START + 3200,
            64,
            stream=30,
            name="Memcpy HtoD (Pinned -> Device)",
        )
        rank.transfer(
            "d2h",
            START + 4100,
            START + 4200,
            32,
            stream=7,
            name="Memcpy DtoH (Device -> Pinned)",
        )
    return builder.build()


def test_write_chrome_trace__has_a_track_per_stream_with_kernels_and_copies(
    tmp_path: Path,
) -> None:
    file = export_and_read(built(), tmp_path / "x.json")
    tracks = {
        e["name"]: e["track"]
        for category in ("kernel", "copy", "cuda_runtime")
        for e in slices(file, category)
    }
    assert tracks == {
        "gemm": "cuda:0 stream 7",
        "relu": "cuda:0 stream 7 (2)",  # it overlaps gemm: Perfetto would drop it
        "ncclDevKernel_AllReduce": "cuda:0 stream 20",
        "Memcpy HtoD (Pinned -> Device)": "cuda:0 stream 30",
        "Memcpy DtoH (Device -> Pinned)": "cuda:0 stream 7",
        "launch": "launches (host)",
    }
    kernels = {e["name"]: e["args"] for e in slices(file, "kernel")}
    assert kernels["gemm"] == {
        "device": "cuda:0", "stream": 7, "kind": "compute", "correlation": 1, "us_since_launch": Decimal("0.5")
    }  # fmt: skip
    assert kernels["ncclDevKernel_AllReduce"]["us_since_launch"] is None


def test_write_chrome_trace__leads_flows_from_launches_to_kernels(
    tmp_path: Path,
) -> None:
    file = export_and_read(built(), tmp_path / "x.json")
    launches = {(e["tid"], e["ts"]): e for e in slices(file, "cuda_runtime")}
    kernels = {(e["tid"], e["ts"]): e for e in slices(file, "kernel")}
    ends = [
        (launches[s["tid"], s["ts"]], kernels[f["tid"], f["ts"]])
        for s, f in flows(file).values()
    ]
    assert [
        (a["start_ns"] - START, a["end_ns"] - START, b["name"]) for a, b in ends
    ] == [
        (501, 601, "gemm"),  # up to the next launch
        (601, 1601, "relu"),
    ]


def test_write_chrome_trace__counts_what_was_launched_and_has_not_begun(
    tmp_path: Path,
) -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    rank.kernel(START + 200, START + 400, name="gemm", launch_ns=START + 100, stream=7)
    rank.kernel(START + 400, START + 500, name="relu", launch_ns=START + 150, stream=7)
    rank.kernel(START + 300, START + 350, name="without a launch", stream=8)
    rank.transfer(
        "h2d",
        START + 450,
        START + 460,
        64,
        stream=9,
        launch_ns=START + 160,
        name="Memcpy HtoD",
    )
    queue = counter(export_and_read(builder.build(), tmp_path / "x.json"), "queue")
    assert [(at - START, value) for at, value in queue] == [
        (100, 1),
        (150, 2),
        (160, 3),
        (200, 2),
        (400, 1),
        (450, 0),
    ]


def test_write_chrome_trace__has_the_critical_path_of_the_first_rank_as_a_track(
    tmp_path: Path,
) -> None:
    builder = TraceBuilder()
    # The second rank comes last to the collective, and has the path.
    for number, gemm_end in ((0, 100), (1, 600)):
        rank = builder.rank(number, devices=[GPU], first_iteration_start_ns=START)
        for iteration in range(3):
            at = START + 1000 * iteration
            rank.phase("forward", at, at + 500, iteration, 0).phase(
                "update", at + 500, at + 1000, iteration, 0
            )
            rank.kernel(
                at + 10, at + gemm_end, "compute", "gemm", launch_ns=at + 5, stream=7
            )
            rank.kernel(
                at + gemm_end,
                at + 990,
                "communication",
                "nccl",
                launch_ns=at + 8,
                stream=7,
            )
    file = export_and_read(builder.build(), tmp_path / "x.json")
    path = {pid: slices(file, "critical_path", pid) for pid in (1, 2)}
    assert {event["track"] for pid in path for event in path[pid]} == {"critical path"}
    at = START + 1000  # The iteration with the median time is the second one.
    assert {
        pid: [
            (e["name"], e["args"]["kind"], e["start_ns"] - at, e["end_ns"] - at)
            for e in path[pid]
        ]
        for pid in path
    } == {
        1: [("nccl", "collective", 600, 990), ("not explained", "wait", 990, 1000)],
        2: [
            ("forward", "host", 0, 5),
            ("launch", "launch", 5, 10),
            ("gemm", "kernel", 10, 600),
        ],
    }


def test_write_chrome_trace__states_the_unix_time_of_its_base(tmp_path: Path) -> None:
    file = export_and_read(built(), tmp_path / "x.json")
    assert (file["displayTimeUnit"], file["baseTimeNanoseconds"]) == (
        "ns",
        START + 501 + 1000,
    )
    builder = TraceBuilder()
    builder.rank(0).memory(START, 1)
    assert (
        export_and_read(builder.build(), tmp_path / "y.json")["baseTimeNanoseconds"]
        == START
    )


def test_write_chrome_trace__can_be_imported_with_the_same_kernels(
    tmp_path: Path,
) -> None:
    trace = built(copies=False)
    write_chrome_trace(trace, tmp_path / "run.json")
    again = import_trace([tmp_path / "run.json"], tmp_path / "again.ebb")
    columns = ["start_ns", "end_ns", "device", "stream", "kind", "name", "launch_ns"]
    expected = trace.kernels(0)[columns].astype(object)
    expected[["start_ns", "end_ns", "launch_ns"]] += 1000  # Unix time
    read = again.kernels(0)[columns].astype(object)
    assert (
        read.where(read.notna(), None).values.tolist()
        == expected.where(expected.notna(), None).values.tolist()
    )


def test_write_chrome_trace__nests_annotations_of_a_thread(tmp_path: Path) -> None:
    builder = TraceBuilder()
    rank = builder.rank(0)
    for name, thread, start, end in (
        ("step", 1, 0, 100),
        ("forward", 1, 0, 40),
        ("layer", 1, 10, 20),
        ("next layer", 1, 20, 40),
        ("async", 1, 30, 120),
        ("loader", 2, 5, 50),
        ("anywhere", None, 7, 9),
    ):
        rank.add("annotations", name=name, thread=thread, start_ns=start, end_ns=end)
    file = export_and_read(builder.build(), tmp_path / "x.json")
    first = "annotations thread 1"
    assert {e["name"]: e["track"] for e in slices(file, "user_annotation")} == {
        **dict.fromkeys(("step", "forward", "layer", "next layer"), first),
        "async": f"{first} (2)",
        "loader": "annotations thread 2",
        "anywhere": "annotations",
    }


def test_device_events__join_streams_that_nobody_can_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chrome_trace, "_MAX_TRACKS", 2)
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}])
    for number in range(12):
        stream = number if number < 4 else number % 2
        rank.kernel(number * 10, number * 10 + 5, stream=stream)
    events = export_and_read(builder.build(), tmp_path / "x.json")["traceEvents"]
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    tracks = [names[event["tid"]] for event in events if event.get("cat") == "kernel"]
    assert {track: tracks.count(track) for track in tracks} == {
        "cuda:0 stream 0": 5,
        "cuda:0 stream 1": 5,
        "other streams": 2,
    }

"""What is read of a Kineto trace: its rank, devices, memory, copies and device times; and what of a damaged one."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbtide.profiler.importers.kineto import importer as kineto
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.trace import TraceBuilder, open_trace
from tests.conftest import ebbtide
from tests.profiler.importers.kineto.made_kineto import (
    BASE,
    Event,
    Job,
    base,
    events,
    imported,
    in_order,
    iteration,
    launched,
    made,
    memory,
    named,
    profiled,
    shape,
    span,
)

PUBLISHED = Path(__file__).parents[5] / "shared" / "published" / "kineto"
CARDS = [{"id": n, "name": f"card {n}", "totalGlobalMem": (n + 1) * 10**9} for n in range(4)]


def copied(name: str, ts: float, end: float, size: int, correlation: int = 0, stream: int = 9) -> list[Event]:
    return launched(ts, ts, end, correlation, stream, cat="gpu_memcpy", name=f"Memcpy {name}", bytes=size)


# -- real ones of torch here -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real trace: CPU only, with memory, of two iterations."""
    job = Job()

    def step(number: int) -> None:
        job.forward().backward()
        job.update()

    return profiled(tmp_path_factory.mktemp("kineto") / "run.json", 4, step, profile_memory=True)


def test_a_job_on_the_cpu_has_phases_and_memory_and_no_copies_to_tell_of(recorded: Path) -> None:
    trace = imported(recorded)
    entry = trace.rank(0)
    assert entry["devices"] == [{"device": "cpu", "kind": "cpu", "name": None, "capacity_bytes": None}]
    assert entry["transfers_recorded"] is False
    assert shape(trace.phases(0)) == {2: "fbu", 3: "fbu"}
    told = [event for event in named(recorded, "[memory]") if event["args"]["Device Type"] == 0]
    line = trace.memory(0)
    assert set(zip(line["device"], line["pool"], strict=True)) == {("cpu", "allocated")}
    held = dict(zip((line["t_ns"] - base(recorded)).tolist(), line["bytes"].tolist(), strict=True))
    assert len(held) > 50
    last = None
    for event in told:
        last = held.get(event["start"], last)
        assert last == event["args"]["Total Allocated"]
    (note,) = trace.notes
    assert "ProfilerActivity.CUDA" in note


def test_packed_and_unpacked_are_the_same(recorded: Path, tmp_path: Path) -> None:
    packed = tmp_path / "run.json.gz"
    packed.write_bytes(gzip.compress(recorded.read_bytes()))
    a, b = imported(recorded), imported(packed)
    for table in ("phases", "memory", "transfers"):
        assert a.table(0, table).equals(b.table(0, table))


def test_what_torch_packs_itself_is_read(tmp_path: Path) -> None:
    job = Job()
    path = profiled(tmp_path / "run.json.gz", 3, lambda number: (job.forward().backward(), job.update())[1])
    assert shape(imported(path).phases(0)) == {2: "fbu"}


def test_the_command_writes_a_trace_that_opens(recorded: Path, tmp_path: Path) -> None:
    run = ebbtide("import", recorded, "-o", tmp_path / "run.ebb")
    assert run.returncode == 0, run.stderr
    trace = open_trace(tmp_path / "run.ebb")
    assert trace.meta["imported"] == [{"format": "kineto", "file": "run.json"}]
    assert trace.phases(0).equals(imported(recorded).phases(0))
    summary = json.loads(ebbtide("summary", trace.path, "--json").stdout)
    assert summary["iterations"] == 2
    assert summary["transfers"]["h2d"]["bytes"] is None


# -- made ones of GPU jobs -------------------------------------------------------------------------------------------


def test_copies_are_read_in_order_with_their_sizes_and_kinds_of_memory(tmp_path: Path) -> None:
    both = [*copied("DtoH (Device -> Pinned)", 20, 30.5, 7), *copied("HtoD (Pageable -> Device)", 10, 11, 5)]
    trace = imported(made(tmp_path / "run.json", [*both, *copied("DtoD (Device -> Device)", 1, 2, 3)]))
    rows = trace.transfers(0)[["start_ns", "end_ns", "direction", "bytes", "host_memory", "device", "stream"]]
    assert (rows[["start_ns", "end_ns"]] - BASE).to_numpy().tolist() == [[10_000, 11_000], [20_000, 30_500]]
    assert rows.iloc[:, 2:].to_numpy().tolist() == [
        ["h2d", 5, "pageable", "cuda:0", 9],
        ["d2h", 7, "pinned", "cuda:0", 9],
    ]
    assert trace.rank(0)["transfers_recorded"] is True


def test_a_gpu_that_copied_nothing_has_its_copies_told(tmp_path: Path) -> None:
    trace = imported(made(tmp_path / "run.json", launched(1, 2, 3, 1)))
    assert trace.rank(0)["transfers_recorded"] is True
    assert any("no copy between host and device" in note for note in trace.notes)


def test_memory_of_the_gpus_is_read_at_each_change(tmp_path: Path) -> None:
    told = [
        memory(3, 30, 64),
        memory(1, 10, 64),
        memory(2, 30, 64),
        memory(1.5, 7, 9, device=1),
        memory(2, 999, type=0),
    ]
    trace = imported(made(tmp_path / "run.json", told, deviceProperties=CARDS))
    rows = [(t - BASE, *rest) for t, *rest in trace.memory(0).itertuples(index=False)]
    assert sorted(rows) == [
        (1_000, "cuda:0", "allocated", 10),
        (1_000, "cuda:0", "reserved", 64),
        (1_500, "cuda:1", "allocated", 7),
        (1_500, "cuda:1", "reserved", 9),
        (2_000, "cuda:0", "allocated", 30),
    ]
    assert [device["device"] for device in trace.rank(0)["devices"]] == ["cuda:0", "cuda:1"]


def test_the_devices_are_those_that_worked_the_busiest_first(tmp_path: Path) -> None:
    work = [*launched(0, 1, 2, 1, device=1), *launched(0, 5, 50, 2, device=3), *launched(0, 2, 4, 3, device=1)]
    entry = imported(made(tmp_path / "run.json", work, deviceProperties=CARDS)).rank(0)
    assert entry["devices"] == [
        {"device": "cuda:3", "kind": "cuda", "name": "card 3", "capacity_bytes": 4 * 10**9},
        {"device": "cuda:1", "kind": "cuda", "name": "card 1", "capacity_bytes": 2 * 10**9},
    ]


def device_times(path: Path) -> list[tuple[float, float] | None]:
    """(start, end) of each phase on the device, microseconds after the base."""
    times = imported(path).phases(0)[["gpu_start_ns", "gpu_end_ns"]]
    known = times.notna().all(axis=1)
    return [
        ((start - BASE) / 1000, (end - BASE) / 1000) if told else None
        for told, (start, end) in zip(known, times.itertuples(index=False), strict=True)
    ]


def test_a_phase_ran_on_the_device_when_what_it_launched_ran(tmp_path: Path) -> None:
    work = [
        *launched(11, 15, 35, 1), *launched(29, 35, 45, 2), *launched(41, 46, 47, 3), *launched(69, 70, 120, 4),
        *launched(5, 6, 7, 5), *launched(75, 121, 122, 6), *launched(81, 123, 124, 7),
    ]  # fmt: skip
    assert device_times(made(tmp_path / "run.json", [*iteration(3, 0), *work])) == [(15, 45), (46, 120), (123, 124)]


def test_copies_on_another_stream_do_not_blur_where_a_phase_ends(tmp_path: Path) -> None:
    work = [*launched(11, 15, 35, 1), *launched(41, 46, 80, 3), *launched(81, 82, 84, 7)]
    long = launched(12, 13, 79, 8, stream=9, cat="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)")
    assert device_times(made(tmp_path / "run.json", [*iteration(3, 0), *work, *long])) == [(15, 35), (46, 80), (82, 84)]


def test_a_phase_that_used_only_another_stream_is_told_by_that(tmp_path: Path) -> None:
    work = [*launched(11, 15, 35, 1), *launched(41, 46, 80, 3), *launched(81, 75, 95, 7, stream=9)]
    assert device_times(made(tmp_path / "run.json", [*iteration(3, 0), *work])) == [(15, 35), (46, 80), (80, 95)]


def test_a_phase_that_launched_nothing_has_no_device_times(tmp_path: Path) -> None:
    work = [*launched(11, 15, 35, 1), *launched(81, 82, 84, 0), span("gemm", 41, 42, "kernel", device=0, stream=7)]
    assert device_times(made(tmp_path / "run.json", [*iteration(3, 0), *work])) == [(15, 35), None, None]


@pytest.mark.parametrize("old", [False, True])
def test_the_schema_of_old_traces_is_the_same_to_the_reader(tmp_path: Path, old: bool) -> None:
    """Until torch 1.8 categories had other names, and until 2.4 times were since 1970."""
    names = {"user_annotation": "Operator", "kernel": "Kernel", "gpu_memcpy": "Memcpy", "cuda_runtime": "Runtime"}
    work = [
        *iteration(1, 0),
        *launched(11, 15, 35, 1),
        *copied("HtoD (Pinned -> Device)", 1.001, 2, 8),
        memory(1, 3, 4),
    ]
    if old:
        for event in work:
            event["cat"] = names.get(event["cat"], "")
            event["ts"] = f"@{BASE // 1000 + int(event['ts'])}.{round(event['ts'] % 1 * 1000):03d}@"
        text = json.dumps({"traceEvents": work}).replace('"@', "").replace('@"', "")
        (tmp_path / "run.json").write_text(text)
    else:
        made(tmp_path / "run.json", work)
    trace = imported(tmp_path / "run.json")
    assert (trace.phases(0)["start_ns"] - BASE).tolist() == [10_000, 40_000, 80_000]
    assert (trace.transfers(0)["start_ns"] - BASE).tolist() == [1_001]
    assert trace.phases(0)["gpu_end_ns"].iloc[0] - BASE == 35_000
    assert len(trace.memory(0)) == 2


# -- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "told", "rank"),
    [
        ("worker-rank-7.json", {"rank": 3}, 3),
        ("worker-rank-7.pt.trace.json", None, 7),
        ("rank12_step.json", {}, 12),
        ("Rank_2.json.gz", {"rank": "two"}, 2),
        ("crank5.json", None, 5),
        ("run.json", None, 0),
        ("run.json", {"rank": -1}, 0),
        ("run.json", "odd", 0),
        ("rank99999999.json", None, 0),
    ],
)
def test_the_rank_is_told_or_in_the_name_or_counted(tmp_path: Path, name: str, told: Any, rank: int) -> None:
    trace = imported(made(tmp_path / name, iteration(0, 0), **({} if told is None else {"distributedInfo": told})))
    assert trace.ranks == [rank]


def test_files_of_several_ranks_are_one_trace(tmp_path: Path) -> None:
    info = [{"rank": rank, "world_size": 2, "backend": "nccl"} for rank in (1, 0)]
    paths = [
        made(tmp_path / f"{n}.json", iteration(4, 10 * n), distributedInfo=info[n], host_name="box") for n in (0, 1)
    ]
    trace = imported(*paths)
    assert trace.ranks == [0, 1]
    assert [(trace.phases(rank)["start_ns"].min() - BASE) // 1000 for rank in (0, 1)] == [20, 10]
    entry = trace.rank(1)
    assert (entry["world_size"], entry["backend"], entry["host"]) == (2, "nccl", "box")


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        made(tmp_path / name, iteration(0, 0), distributedInfo={"rank": 5})
    with pytest.raises(SourceError, match=r"a\.json and .*b\.json are both of rank 5"):
        imported(tmp_path / "a.json", tmp_path / "b.json")


def test_phases_that_another_file_told_stand(tmp_path: Path) -> None:
    builder = TraceBuilder("imported")
    builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}]).phase("forward", 1, 2)
    kineto.read(Source(made(tmp_path / "run.json", [*iteration(0, 0), *launched(1, 2, 3, 1)])), builder, 0)
    trace = builder.build()
    assert len(trace.phases(0)) == 1
    assert [device["device"] for device in trace.rank(0)["devices"]] == ["cuda:0"]
    assert any("its phases are left out" in note for note in trace.notes)


# -- what is no trace, or damaged ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ('{"traceEvents": []}', True),
        (' {\n "schemaVersion": 1, "deviceProperties": [', True),
        ('\ufeff{"otherData": {}, "traceEvents" : [', True),
        ('[{"name": "a", "ph": "X"}', True),
        ('{"rank": 0}', False),
        ("[[-1, 1, 37888, 7]]", False),
        ("timestamp, traceEvents", False),
        ("\x80\x04", False),
    ],
)
def test_it_is_known_by_what_it_holds(tmp_path: Path, text: str, known: bool) -> None:
    (tmp_path / "file").write_text(text)
    assert kineto.matches(Source(tmp_path / "file")) is known


@pytest.mark.parametrize("text", ["{}", '{"traceEvents": []}', '{"traceEvents": 3}', '{"traceEvents": [{"ph', "[3, 4]"])
def test_what_holds_no_events_is_one_clean_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(SourceError, match=r"run\.json") as error:
        kineto.read(Source(tmp_path / "run.json"), TraceBuilder(), 0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_was_cut_off_is_read_up_to_there(tmp_path: Path, packed: bool) -> None:
    work = [event for number in range(1000) for event in iteration(number, 200 * number)]
    path = made(tmp_path / ("run.json.gz" if packed else "run.json"), work)
    path.write_bytes(path.read_bytes()[:-300])
    trace = imported(path)
    (note,) = (note for note in trace.notes if "what stands before is imported" in note)
    assert note.startswith(f"{path.name}: it ")
    assert str(tmp_path) not in note
    assert len(shape(trace.phases(0))) > 500


def test_odd_events_are_left_out_and_counted(tmp_path: Path) -> None:
    odd = [span("a", -1e300, 0), span("b", 5, 4), {"ph": "X", "ts": "soon"}, 3, None, [[]], {"ts": {}}]
    trace = imported(made(tmp_path / "run.json", [*iteration(0, 0), *odd, *iteration(1, 100)]))
    assert shape(trace.phases(0)) == {0: "fbu", 1: "fbu"}
    assert "run.json: 7 events could not be read and are left out" in trace.notes


@pytest.mark.parametrize(
    "meta",
    [
        {"deviceProperties": 3},
        {"deviceProperties": [3, {}, {"id": 0, "name": 4, "totalGlobalMem": "lots"}, {"id": [], "totalGlobalMem": -5}]},
        {"deviceProperties": [{"id": 0, "totalGlobalMem": 1e300}]},
        {"distributedInfo": [], "host_name": {}},
        {"distributedInfo": {"rank": 1.5, "world_size": "many", "backend": None}},
        {"baseTimeNanoseconds": "now"},
        {"baseTimeNanoseconds": 10**30},
    ],
)
def test_odd_facts_are_not_told(tmp_path: Path, meta: dict[str, Any]) -> None:
    trace = imported(made(tmp_path / "run.json", [*iteration(0, 0), *launched(11, 12, 13, 1)], **meta))
    (device,) = trace.rank(0)["devices"]
    assert device == {"device": "cuda:0", "kind": "cuda", "name": None, "capacity_bytes": None}
    assert "world_size" not in trace.rank(0)
    assert len(trace.phases(0)) == 3


SMALL = [
    *iteration(0, 0), *launched(11, 12, 13, 1), *copied("HtoD (Pinned -> Device)", 45, 50, 7), memory(5, 10, 20),
    span("autograd::engine::evaluate_function: AddBackward0", 50, 60, "cpu_op", **{"Sequence number": 4}),
    span("nn.Module: Linear", 12, 20, "python_function"),
]  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_a_damaged_file_is_one_clean_error_or_a_trace(tmp_path: Path, data: st.DataObject) -> None:
    path = made(tmp_path / "run.json", SMALL, deviceProperties=CARDS, distributedInfo={"rank": 1})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        length = data.draw(st.sampled_from([0, 1, 3, 30]))
        raw[at : at + length] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"{", b"]", b'"', b"\\", b"1e300", b"-", b"null", b"99999999999"])
        )
    path.write_bytes(raw)
    builder = TraceBuilder("imported")
    with contextlib.suppress(SourceError):
        kineto.read(Source(path), builder, 0)
    trace = builder.build()
    for rank in trace.ranks:
        in_order(trace.phases(rank))
        for table in ("memory", "transfers"):
            trace.table(rank, table)
    json.dumps(trace.meta)


# -- published ones --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["control.json.gz", "sampled_rank-0.json.gz"])
def published(request: pytest.FixtureRequest) -> Path:
    path = PUBLISHED / request.param
    if not path.exists():
        pytest.skip("the published measurements are not beside this checkout")
    return path


def test_published_copies_are_those_that_json_tells(published: Path) -> None:
    trace = imported(published)
    (rank,) = trace.ranks
    rows = trace.transfers(rank)
    for direction, way in (("h2d", "HtoD"), ("d2h", "DtoH")):
        told = [e for e in events(published) if e.get("cat") == "gpu_memcpy" and way in e["name"]]
        found = rows[rows["direction"] == direction]
        assert len(found) == len(told) > 0
        assert found["bytes"].sum() == sum(event["args"]["bytes"] for event in told)
        spans = zip(found["start_ns"].tolist(), found["end_ns"].tolist(), strict=True)
        assert busy(spans) == busy((event["start"], event["end"]) for event in told)


def busy(spans: Any) -> int:
    """ns in which at least one of the spans lasts."""
    total = reached = 0
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


def test_published_phases_are_those_that_are_annotated(published: Path) -> None:
    trace = imported(published)
    phases = trace.phases(trace.ranks[0])
    for phase, name in (("forward", "## forward ##"), ("backward", "## backward ##")):
        found = phases[phases["phase"] == phase]
        assert found["start_ns"].tolist() == [event["start"] for event in named(published, name)]
        assert found["end_ns"].tolist() == [event["end"] for event in named(published, name)]
    steps = [int(e["name"][13:]) for e in events(published) if e.get("name", "").startswith("ProfilerStep#")]
    assert phases["iteration"].unique().tolist() == sorted(steps)
    assert {text.rstrip("u") for text in shape(phases).values()} == {"fb"}


def test_published_device_times_are_those_of_what_each_phase_launched(published: Path) -> None:
    trace = imported(published)
    phases = trace.phases(trace.ranks[0])
    found = events(published)
    calls = {e["args"]["correlation"]: e["start"] for e in found if e.get("cat") == "cuda_runtime"}
    ran: dict[int, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    spans = list(zip(phases["start_ns"].tolist(), phases["end_ns"].tolist(), strict=True))
    for event in found:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            call = calls.get(event["args"]["correlation"], -1)
            for number, (start, end) in enumerate(spans):
                if start <= call < end:
                    ran[number][event["args"]["stream"]].append(event)
    for number, row in enumerate(phases.itertuples()):
        work = ran[number][7]
        assert (row.gpu_start_ns, row.gpu_end_ns) == (min(e["start"] for e in work), max(e["end"] for e in work))


def test_published_phases_are_found_without_annotations_too(tmp_path: Path) -> None:
    path = PUBLISHED / "control.json.gz"
    if not path.exists():
        pytest.skip("the published measurements are not beside this checkout")
    whole = json.loads(gzip.decompress(path.read_bytes()))
    kept = ("ProfilerStep", "Optimizer.step")
    whole["traceEvents"] = [
        event
        for event in whole["traceEvents"]
        if event.get("cat") != "user_annotation" or event["name"].startswith(kept)
    ]
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(whole))
    annotated, told = imported(path).phases(3), imported(bare).phases(3)
    assert told["phase"].tolist() == annotated["phase"].tolist()
    assert told["iteration"].tolist() == annotated["iteration"].tolist()
    backward = told["phase"] == "backward"
    assert (told["start_ns"] >= annotated["start_ns"])[backward].all()
    assert (told["end_ns"] <= annotated["end_ns"])[backward].all()
    ratio = (told["end_ns"] - told["start_ns"]) / (annotated["end_ns"] - annotated["start_ns"])
    assert (ratio[backward] > 0.9).all()

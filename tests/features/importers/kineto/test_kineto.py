"""Contents of a Kineto trace: rank, devices, memory, copies and device times; and
damaged traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbtide.features.importers.kineto.importer import KinetoImporter, read_trace
from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.profiler.trace import TraceBuilder
from ebbtide.profiler.trace.metadata import DeviceInfo
from tests.conftest import slow_case
from tests.features.importers.kineto.made_kineto import (
    BASE,
    Event,
    Job,
    base,
    import_files,
    iteration,
    launched,
    memory_event,
    named,
    profiled,
    shape,
    span,
    write_trace,
)

CARDS = [
    {"id": n, "name": f"card {n}", "totalGlobalMem": (n + 1) * 10**9} for n in range(4)
]


def copied(
    name: str, ts: float, end: float, size: int, correlation: int = 0, stream: int = 9
) -> list[Event]:
    return launched(
        ts,
        ts,
        end,
        correlation,
        stream,
        cat="gpu_memcpy",
        name=f"Memcpy {name}",
        bytes=size,
    )


# -- real traces of the installed torch
# --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a real trace of two iterations on the CPU, with memory."""
    job = Job()

    def step(number: int) -> None:
        job.forward().backward()
        job.update()

    return profiled(
        tmp_path_factory.mktemp("kineto") / "run.json", 4, step, profile_memory=True
    )


def test_read_trace__a_cpu_job_has_phases_and_memory_but_no_copies(
    recorded: Path,
) -> None:
    trace = import_files(recorded)
    entry = trace.rank(0)
    assert entry.devices == (DeviceInfo(device="cpu", kind="cpu"),)
    assert entry.transfers_recorded is False
    assert shape(trace.phases(0)) == {2: "fbu", 3: "fbu"}
    memory_events = [
        event
        for event in named(recorded, "[memory]")
        if event["args"]["Device Type"] == 0
    ]
    memory = trace.memory(0)
    assert set(zip(memory["device"], memory["pool"], strict=True)) == {
        ("cpu", "allocated")
    }
    sizes = dict(
        zip(
            (memory["t_ns"] - base(recorded)).tolist(),
            memory["bytes"].tolist(),
            strict=True,
        )
    )
    assert len(sizes) > 50
    last = None
    for event in memory_events:
        last = sizes.get(event["start"], last)
        assert last == event["args"]["Total Allocated"]
    (note,) = trace.notes
    assert "ProfilerActivity.CUDA" in note


# -- made traces of GPU jobs
# -------------------------------------------------------------------------------------------


def test_transfers__count_as_recorded_if_a_gpu_copied_nothing(tmp_path: Path) -> None:
    trace = import_files(write_trace(tmp_path / "run.json", launched(1, 2, 3, 1)))
    assert trace.rank(0).transfers_recorded is True
    assert any("no copy between host and device" in note for note in trace.notes)


def test_allocator_memory__has_each_change_on_the_gpus(tmp_path: Path) -> None:
    memory_events = [
        memory_event(3, 30, 64),
        memory_event(1, 10, 64),
        memory_event(2, 30, 64),
        memory_event(1.5, 7, 9, device=1),
        memory_event(2, 999, type=0),
    ]
    trace = import_files(
        write_trace(tmp_path / "run.json", memory_events, deviceProperties=CARDS)
    )
    rows = [
        (t - BASE, *columns) for t, *columns in trace.memory(0).itertuples(index=False)
    ]
    assert sorted(rows) == [
        (1_000, "cuda:0", "allocated", 10),
        (1_000, "cuda:0", "reserved", 64),
        (1_500, "cuda:1", "allocated", 7),
        (1_500, "cuda:1", "reserved", 9),
        (2_000, "cuda:0", "allocated", 30),
    ]
    assert [device.device for device in trace.rank(0).devices] == ["cuda:0", "cuda:1"]


def test_devices__are_those_that_ran_work_by_busy_time(tmp_path: Path) -> None:
    work = [
        *launched(0, 1, 2, 1, device=1),
        *launched(0, 5, 50, 2, device=3),
        *launched(0, 2, 4, 3, device=1),
    ]
    entry = import_files(
        write_trace(tmp_path / "run.json", work, deviceProperties=CARDS)
    ).rank(0)
    assert entry.devices == (
        DeviceInfo(
            device="cuda:3", kind="cuda", name="card 3", capacity_bytes=4 * 10**9
        ),
        DeviceInfo(
            device="cuda:1", kind="cuda", name="card 1", capacity_bytes=2 * 10**9
        ),
    )


def device_times(path: Path) -> list[tuple[float, float] | None]:
    """Return the (start, end) of each phase on the device in us after the base, or
    None."""
    times = import_files(path).phases(0)[["gpu_start_ns", "gpu_end_ns"]]
    complete = times.notna().all(axis=1)
    return [
        ((start - BASE) / 1000, (end - BASE) / 1000) if has_times else None
        for has_times, (start, end) in zip(
            complete, times.itertuples(index=False), strict=True
        )
    ]


def test_device_times__span_the_work_that_a_phase_launched(tmp_path: Path) -> None:
    work = [
        *launched(11, 15, 35, 1), *launched(29, 35, 45, 2), *launched(41, 46, 47, 3), *launched(69, 70, 120, 4),
        *launched(5, 6, 7, 5), *launched(75, 121, 122, 6), *launched(81, 123, 124, 7),
    ]  # fmt: skip
    assert device_times(
        write_trace(tmp_path / "run.json", [*iteration(3, 0), *work])
    ) == [
        (15, 45),
        (46, 120),
        (123, 124),
    ]


def test_device_times__ignore_copies_on_another_stream(tmp_path: Path) -> None:
    work = [
        *launched(11, 15, 35, 1),
        *launched(41, 46, 80, 3),
        *launched(81, 82, 84, 7),
    ]
    long = launched(
        12, 13, 79, 8, stream=9, cat="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)"
    )
    assert device_times(
        write_trace(tmp_path / "run.json", [*iteration(3, 0), *work, *long])
    ) == [
        (15, 35),
        (46, 80),
        (82, 84),
    ]


def test_device_times__use_another_stream_if_a_phase_used_no_other(
    tmp_path: Path,
) -> None:
    work = [
        *launched(11, 15, 35, 1),
        *launched(41, 46, 80, 3),
        *launched(81, 75, 95, 7, stream=9),
    ]
    assert device_times(
        write_trace(tmp_path / "run.json", [*iteration(3, 0), *work])
    ) == [(15, 35), (46, 80), (80, 95)]


def test_device_times__are_missing_if_a_phase_launched_nothing(tmp_path: Path) -> None:
    work = [
        *launched(11, 15, 35, 1),
        *launched(81, 82, 84, 0),
        span("gemm", 41, 42, "kernel", device=0, stream=7),
    ]
    assert device_times(
        write_trace(tmp_path / "run.json", [*iteration(3, 0), *work])
    ) == [(15, 35), None, None]


@pytest.mark.parametrize("old", [False, True])
def test_read_trace__reads_the_schema_of_old_versions(
    tmp_path: Path, old: bool
) -> None:
    """Categories had other names until torch 1.8, and times were Unix times until
    2.4."""
    names = {
        "user_annotation": "Operator",
        "kernel": "Kernel",
        "gpu_memcpy": "Memcpy",
        "cuda_runtime": "Runtime",
    }
    work = [
        *iteration(1, 0),
        *launched(11, 15, 35, 1),
        *copied("HtoD (Pinned -> Device)", 1.001, 2, 8),
        memory_event(1, 3, 4),
    ]
    if old:
        for event in work:
            event["cat"] = names.get(event["cat"], "")
            event["ts"] = (
                f"@{BASE // 1000 + int(event['ts'])}.{round(event['ts'] % 1 * 1000):03d}@"
            )
        text = json.dumps({"traceEvents": work}).replace('"@', "").replace('@"', "")
        (tmp_path / "run.json").write_text(text)
    else:
        write_trace(tmp_path / "run.json", work)
    trace = import_files(tmp_path / "run.json")
    assert (trace.phases(0)["start_ns"] - BASE).tolist() == [10_000, 40_000, 80_000]
    assert (trace.transfers(0)["start_ns"] - BASE).tolist() == [1_001]
    assert trace.phases(0)["gpu_end_ns"].iloc[0] - BASE == 35_000
    assert len(trace.memory(0)) == 2


# -- ranks
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "info", "rank"),
    [
        ("worker-rank-7.json", {"rank": 3}, 3),
        slow_case("worker-rank-7.pt.trace.json", None, 7),
        slow_case("rank12_step.json", {}, 12),
        ("Rank_2.json.gz", {"rank": "two"}, 2),
        slow_case("crank5.json", None, 5),
        ("run.json", None, 0),
        slow_case("run.json", {"rank": -1}, 0),
        slow_case("run.json", "odd", 0),
        slow_case("rank99999999.json", None, 0),
    ],
)
def test_rank__comes_from_contents_then_name_then_position(
    tmp_path: Path, name: str, info: Any, rank: int
) -> None:
    trace = import_files(
        write_trace(
            tmp_path / name,
            iteration(0, 0),
            **({} if info is None else {"distributedInfo": info}),
        )
    )
    assert trace.ranks == [rank]


def test_import_trace__combines_files_of_several_ranks(tmp_path: Path) -> None:
    info = [{"rank": rank, "world_size": 2, "backend": "nccl"} for rank in (1, 0)]
    paths = [
        write_trace(
            tmp_path / f"{n}.json",
            iteration(4, 10 * n),
            distributedInfo=info[n],
            host_name="box",
        )
        for n in (0, 1)
    ]
    trace = import_files(*paths)
    assert trace.ranks == [0, 1]
    assert [
        (trace.phases(rank)["start_ns"].min() - BASE) // 1000 for rank in (0, 1)
    ] == [20, 10]
    entry = trace.rank(1)
    assert (entry.world_size, trace.raw_meta["ranks"][1]["backend"], entry.host) == (
        2,
        "nccl",
        "box",
    )


@pytest.mark.parametrize("jobs", [1, 2])
def test_read_trace__refuses_two_files_of_one_process(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr(f"{KinetoImporter.__module__}._MIN_FILES_FOR_PROCESSES", 2)
    job = Job()
    later = profiled(
        tmp_path / "later.json",
        4,
        lambda number: (job.forward().backward(), job.update())[1],
    )
    with pytest.raises(
        SourceError,
        match=(
            r"run\.json and .*later\.json are both of process \d+ on .+: import one "
            r"file per process"
        ),
    ):
        import_trace([recorded, later], tmp_path / "x.ebb", align="start", jobs=jobs)
    # Ranks that the files state may have a number of a process in common: each in a
    # container on one host.
    made = [
        write_trace(
            tmp_path / f"{n}.json",
            iteration(0, 0),
            distributedInfo={"rank": n, "world_size": 2},
            host_name="box",
        )
        for n in (0, 1)
    ]
    assert import_files(*made).ranks == [0, 1]


def test_read_trace__keeps_phases_of_another_file(tmp_path: Path) -> None:
    builder = TraceBuilder("imported")
    builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}]).phase(
        "forward", 1, 2
    )
    read_trace(
        Source(
            write_trace(
                tmp_path / "run.json", [*iteration(0, 0), *launched(1, 2, 3, 1)]
            )
        ),
        builder,
        0,
    )
    trace = builder.build()
    assert len(trace.phases(0)) == 1
    assert [device.device for device in trace.rank(0).devices] == ["cuda:0"]
    assert any("its phases are left out" in note for note in trace.notes)


# -- other and damaged files
# -------------------------------------------------------------------------------------------


# -- published traces
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_import_trace__in_processes_is_that_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ebbtide.features.importers.kineto.importer._MIN_FILES_FOR_PROCESSES", 3
    )
    files = []
    for rank in (2, 0, 1):
        work = [
            *launched(12, 14, 20 + rank, 1),
            *copied("HtoD (Pinned -> Device)", 22, 25 + rank, 8 << rank, 2),
        ]
        files.append(
            write_trace(
                tmp_path / f"rank{rank}.json",
                [*iteration(1, 0), span("aten::mm", 11, 13), *work],
            )
        )
    for jobs in (1, 2):
        import_trace(files, tmp_path / f"{jobs}.ebb", jobs=jobs)
    alone, together = (
        {
            file.relative_to(folder): file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file()
        }
        for folder in (tmp_path / "1.ebb", tmp_path / "2.ebb")
    )
    assert alone == together
    twice = write_trace(tmp_path / "other-rank1.json", iteration(1, 0))
    with pytest.raises(
        SourceError, match=r"rank1\.json and .*other-rank1\.json are both of rank 1"
    ):
        import_trace([*files, twice], tmp_path / "3.ebb", jobs=2)
    assert not (tmp_path / "3.ebb").exists()

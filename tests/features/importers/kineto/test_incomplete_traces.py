"""Kineto traces of other accelerators than NVIDIA's, and traces that lack a part:
devices and copies."""

from __future__ import annotations

from pathlib import Path

from ebbtide.analysis import TraceAnalysis
from ebbtide.analysis.metrics.devices import ran_on_cpu
from ebbtide.analysis.metrics.missing import no_link
from ebbtide.analysis.metrics.summary import summarize
from tests.features.importers.kineto.made_kineto import (
    Event,
    import_files,
    iteration,
    launched,
    memory_event,
    span,
    write_trace,
)

HIP, MTIA = 6, 19


def test_allocator_memory__counts_rocm_devices_as_gpus(tmp_path: Path) -> None:
    events = [
        memory_event(1, 2_200_000_000, 2_400_000_000, type=HIP),
        memory_event(2, 8, type=0),
    ]
    memory = summarize(import_files(write_trace(tmp_path / "run.json", events))).memory
    assert memory.pools == {"allocated": 2_200_000_000, "reserved": 2_400_000_000}


def test_allocator_memory__names_other_accelerators(tmp_path: Path) -> None:
    trace = import_files(
        write_trace(
            tmp_path / "run.json", [memory_event(1, 64, 128, type=MTIA, device=2)]
        )
    )
    assert [device.device for device in trace.rank(0).devices] == ["mtia:2"]


def rocm_copy(
    kind: str, ts: float, correlation: int, call_bytes: str | None, **fields: int
) -> list[Event]:
    """Return a copy as Kineto writes it for ROCm: the size is a string in the call, and
    may be missing in the copy."""
    sizes = {"bytes": call_bytes} if call_bytes is not None else {}
    call = span(
        "hipMemcpyWithStream",
        ts,
        ts + 1,
        "cuda_runtime",
        cid=11,
        correlation=correlation,
        **sizes,
    )
    work = {
        "cat": "gpu_memcpy",
        "device": 2,
        "stream": 0,
        "correlation": correlation,
        **fields,
    }
    return [call, span(f"Memcpy {kind}", ts, ts + 5, **work)]


def test_transfers__take_missing_sizes_from_the_calls_of_rocm(tmp_path: Path) -> None:
    events = [
        *rocm_copy("HtoD (Host -> Device)", 10, 7, "4096"),
        *rocm_copy("DtoH (Device -> Host)", 20, 8, None),
        *rocm_copy("DtoH (Device -> Host)", 30, 9, "64", bytes=32),
    ]
    rows = import_files(write_trace(tmp_path / "run.json", events)).transfers(0)
    assert rows["direction"].tolist() == ["h2d", "d2h", "d2h"]
    assert rows["bytes"].fillna(-1).tolist() == [4096, -1, 32]


def test_transfers__count_an_event_once_and_no_impossible_size(tmp_path: Path) -> None:
    copy = span(
        "Memcpy HtoD (Pinned -> Device)",
        10,
        20,
        "gpu_memcpy",
        device=0,
        stream=7,
        bytes=5,
        correlation=3,
    )
    large = [
        {**copy, "ts": ts, "args": {**copy["args"], "bytes": 2**62}} for ts in (30, 50)
    ]
    trace = import_files(write_trace(tmp_path / "run.json", [copy, *large, copy]))
    assert trace.transfers(0)["bytes"].fillna(-1).tolist() == [5, -1, -1]
    assert (
        "run.json: GPU activities that are in it twice are counted once: 1"
        in trace.notes
    )
    assert summarize(trace).transfers["h2d"].bytes == 5


def test_cut_trace__has_unknown_copies_and_host_times(tmp_path: Path) -> None:
    copy = span(
        "Memcpy HtoD (Pinned -> Device)",
        12,
        13,
        "gpu_memcpy",
        device=0,
        stream=7,
        bytes=5,
        correlation=3,
    )
    path = write_trace(
        tmp_path / "run.json",
        [*iteration(0, 0), copy, *launched(11, 12, 99, 1), *launched(41, 50, 60, 2)],
    )
    path.write_bytes(path.read_bytes()[:-60])
    trace = import_files(path)
    for transfers in summarize(trace).transfers.values():
        assert (transfers.count, transfers.bytes, transfers.busy_ms) == (
            None,
            None,
            None,
        )
    assert trace.kernels(0).empty
    assert TraceAnalysis(trace).activity(0).total.compute_ms is None
    phases = trace.phases(0)
    assert phases["gpu_end_ns"].isna().all()
    assert phases["phase"].tolist() == ["forward", "backward", "update"]
    assert any("cut off: phases have the host's times" in note for note in trace.notes)
    assert any(
        "cut off: how much was copied is not known" in note for note in trace.notes
    )
    # Marks that are not in the rest may have been in the file.
    whole = write_trace(tmp_path / "whole.json", [span("forward", 10, 30), copy, copy])
    assert any("prof.step()" in note for note in import_files(whole).notes)
    whole.write_bytes(whole.read_bytes()[:-60])
    assert not any(
        "prof.step()" in note or "record_function" in note
        for note in import_files(whole).notes
    )


def test_devices__are_not_known_without_gpu_activities_and_memory(
    tmp_path: Path,
) -> None:
    cards = [{"id": 0, "name": "NVIDIA A100", "totalGlobalMem": 40 * 10**9}]
    mtia = span("runFunction", 1, 2, "mtia_runtime")
    for events, meta in (
        (iteration(0, 0), {"deviceProperties": cards}),
        ([*iteration(0, 0), mtia], {}),
    ):
        trace = import_files(write_trace(tmp_path / "run.json", events, **meta))
        assert not ran_on_cpu(trace)
        assert "CPU" not in no_link(trace)
    on_cpu = import_files(
        write_trace(
            tmp_path / "run.json", [*iteration(0, 0), memory_event(5, 10, type=0)]
        )
    )
    assert ran_on_cpu(on_cpu)

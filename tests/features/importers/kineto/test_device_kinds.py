"""Accelerators that are no CUDA: the same events under the names of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

from ebbtide.analysis.metrics.activity.activity import gpu_activity
from ebbtide.analysis.metrics.summary import summarize
from ebbtide.features.importers.load import import_trace
from ebbtide.profiler.chrome_trace.device_kinds import copy_name
from ebbtide.profiler.trace import Trace
from tests.features.importers.kineto.made_kineto import (
    Event,
    iteration,
    memory_event,
    span,
    write_trace,
)


class Names(NamedTuple):
    """Names of one kind of devices in a trace."""

    device: str
    type: int
    runtime: str
    h2d: str
    d2h: str
    collective: str
    stream: str = "stream"


CUDA = Names(
    "cuda:0",
    1,
    "cuda_runtime",
    "Memcpy HtoD (Pageable -> Device)",
    "Memcpy DtoH (Device -> Pinned)",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
)
KINDS = {
    "rocm": CUDA._replace(
        type=6, h2d="Memcpy HtoD (Host -> Device)", d2h="CopyDeviceToHost"
    ),
    "xpu": Names(
        "xpu:0",
        12,
        "xpu_runtime",
        "Memcpy M2D (Memory -> Device)",
        "Memcpy D2H (Device -> Host)",
        "oneccl_allreduce_large_kernel",
        "sycl queue",
    ),
    "xpu driver": Names(
        "xpu:0",
        12,
        "xpu_driver",
        "Memcpy H2D (Host -> Device)",
        "Memcpy D2M (Device -> Memory)",
        "oneccl_allreduce_large_kernel",
        "sycl queue",
    ),
    "hpu": CUDA._replace(
        device="hpu:0", type=15, runtime="hpu_op", collective="hccl_x"
    ),
    "mtia": CUDA._replace(device="mtia:0", type=19, runtime="mtia_runtime"),
    "privateuse1": CUDA._replace(
        device="privateuseone:0", type=20, runtime="privateuse1_runtime"
    ),
}


def job(names: Names) -> list[Event]:
    events = []
    for number in range(4):
        start = number * 100.0
        events += iteration(number, start)
        events.append(memory_event(start, 7 << 20, 9 << 20, names.type))
        work = [
            (1, "gpu_memcpy", names.h2d, 3, 9, {"bytes": 4096}),
            (12, "kernel", "gemm", 13, 35, {}),
            (45, "kernel", "gemm_bwd", 46, 60, {}),
            (65, "kernel", names.collective, 66, 76, {}),
            (82, "kernel", "adam", 83, 88, {}),
            (92, "gpu_memcpy", names.d2h, 93, 97, {"bytes": 64}),
        ]
        for place, (launch, category, name, begin, end, args) in enumerate(work, 1):
            own: dict[str, Any] = {"correlation": number * 10 + place, "device": 0}
            events.append(
                span("launch", start + launch, start + launch + 1, names.runtime, **own)
            )
            more = {names.stream: 7, **own, **args}
            events.append(span(name, start + begin, start + end, category, **more))
    return events


def imported(folder: Path, events: list[Event]) -> Trace:
    file = write_trace(folder / "t.json", events)
    return import_trace([file], folder / "t.ebb", force=True)


def figures(trace: Trace) -> dict[str, Any]:
    summary, shares = summarize(trace).as_json(), gpu_activity(trace, 0)
    return {
        "phases": summary["phases"],
        "transfers": summary["transfers"],
        "memory": summary["memory"]["peak_bytes"],
        "activity": shares.as_json()["total"],
        "causes": shares.as_json()["without_compute"],
        "streams": sorted(pd.unique(trace.kernels(0)["stream"])),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_import__has_the_figures_of_cuda_for_every_kind(
    tmp_path: Path, kind: str
) -> None:
    expected = figures(imported(tmp_path, job(CUDA)))
    trace = imported(tmp_path, job(KINDS[kind]))
    assert figures(trace) == expected
    assert expected["transfers"]["h2d"]["bytes"] == 4 * 4096
    devices = {*trace.kernels(0)["device"], *trace.transfers(0)["device"]}
    assert devices == {KINDS[kind].device} == {*trace.memory(0)["device"]}
    assert trace.rank(0).main_device.device == KINDS[kind].device
    assert trace.rank(0).main_device.kind == KINDS[kind].device.partition(":")[0]


def test_import__tells_the_kind_by_memory_where_no_call_was_recorded(
    tmp_path: Path,
) -> None:
    calls = {"launch", "cudaLaunchKernel"}
    events = [event for event in job(KINDS["xpu"]) if event["name"] not in calls]
    trace = imported(tmp_path, events)
    assert (
        set(trace.kernels(0)["device"]) == {"xpu:0"} == set(trace.memory(0)["device"])
    )


@pytest.mark.parametrize(
    ("name", "direction", "memory"),
    [
        ("Memcpy HtoD (Pinned -> Device)", "h2d", "pinned"),
        ("Memcpy DtoH (Device -> Pageable)", "d2h", "pageable"),
        ("Memcpy HtoD (Host -> Device)", "h2d", None),
        ("Memcpy HtoA (Pinned -> Array)", "h2d", "pinned"),
        ("Memcpy H2D (Host -> Device)", "h2d", "pinned"),
        ("Memcpy M2D (Memory -> Device)", "h2d", "pageable"),
        ("Memcpy D2M (Device -> Memory)", "d2h", "pageable"),
        ("Memcpy DtoD (Device -> Device)", None, None),
        ("Memcpy D2S (Device -> Shared)", None, None),
        ("CopyHostToDevice", "h2d", None),
    ],
)
def test_copy_name__tells_direction_and_memory(
    name: str, direction: str | None, memory: str | None
) -> None:
    assert copy_name(name) == (direction, memory)


def test_import__counts_what_no_kind_has(tmp_path: Path) -> None:
    names = CUDA._replace(runtime="vpu_runtime", h2d="upload", d2h="upload")
    trace = imported(tmp_path, job(names))
    summary = summarize(trace).as_json()
    assert [phase["h2d_bytes"] for phase in summary["phases"]] == [None] * 4
    assert trace.phases(0)["gpu_start_ns"].isna().all()
    notes = "\n".join(trace.notes)
    assert "not known are left out: vpu_runtime (24)" in notes
    assert "do not tell their direction (8)" in notes
    assert "phases have the host's times" in notes


def test_import__joins_tasks_of_ascend_with_the_calls_that_launched_them(
    tmp_path: Path,
) -> None:
    """As msprof writes them: cann_assembler.cpp, ascend_hardware_assembler.cpp."""
    events = [event for n in range(4) for event in iteration(n, n * 100.0)]
    for number in range(4):
        at = number * 100
        call = {"Mode": "launch", "level": "node", "connection_id": number + 5}
        events.append(span("Node@launch", at + 15, at + 17, "", **call))
        own = {"Task Type": "AI_CORE", "Physic Stream Id": 7, "Task Id": number}
        task = {**own, "connection_id": number + 5}
        events.append(span("aclnnMatmul", at + 20, at + 50, "", **task))
    trace = imported(tmp_path, events)
    kernels = trace.kernels(0)
    delays = kernels["start_ns"] - kernels["launch_ns"]
    assert set(delays) == {5000}
    assert set(kernels["stream"]) == {7}
    assert trace.calls(0)["name"].tolist() == ["Node@launch"] * 4
    # Phases have the device's times: the forward launched the kernels.
    assert trace.phases(0)["gpu_start_ns"].notna().any()


def test_import__reads_tasks_of_ascend(tmp_path: Path) -> None:
    events = [event for n in range(4) for event in iteration(n, n * 100.0)]
    for number in range(4):
        for task, name, begin, end in (
            ("AI_CORE", "aclnnMatmul", 20, 50),
            ("AI_CPU", "hcom_allReduce__1", 50, 60),
            ("EVENT_WAIT", "EVENT_WAIT", 60, 95),
            ("MEMCPY_ASYNC", "MEMCPY_ASYNC", 60, 70),
        ):
            args = {"Task Type": task, "Stream Id": 3}
            event = span(name, number * 100 + begin, number * 100 + end, "", **args)
            events.append({**event, "ts": str(event["ts"])})
    trace = imported(tmp_path, events)
    kernels = trace.kernels(0)
    assert kernels["kind"].tolist() == ["compute", "communication", "copy"] * 4
    assert (set(kernels["device"]), set(kernels["stream"])) == ({"npu:0"}, {3})
    summary = summarize(trace).as_json()
    assert {phase["h2d_bytes"] for phase in summary["phases"]} == {None}
    notes = "\n".join(trace.notes)
    assert "phases have the host's times" in notes
    assert "only wait or signal are left out: 4" in notes

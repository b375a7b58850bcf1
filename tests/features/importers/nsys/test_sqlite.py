"""SQLite exports of Nsight Systems: what a trace says must be what was written into the
file."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.analysis import TraceAnalysis
from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.source import SourceError
from ebbtide.profiler.trace import Trace
from tests.conftest import examples
from tests.features.importers.nsys.made_exports import (
    D2D,
    D2H,
    DEVICE,
    H2D,
    PAGEABLE,
    SESSION_NS,
    MadeExport,
    global_pid,
    import_in_memory,
    training,
)

US = 1000


def imported(*exports: MadeExport) -> Trace:
    return import_in_memory(*(export.write() for export in exports))


def relative(values: pd.Series) -> list[int]:
    return (values - SESSION_NS).tolist()


def test_training__has_phases_with_the_times_of_host_and_device(tmp_path: Path) -> None:
    trace = imported(training(tmp_path / "run.sqlite"))
    phases = trace.phases(0)
    assert phases["phase"].tolist() == ["forward", "backward", "update"] * 3
    assert phases["iteration"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    second = phases[phases["iteration"] == 1]
    assert relative(second["start_ns"]) == [1001 * US, 1101 * US, 1201 * US]
    assert relative(second["end_ns"]) == [1101 * US, 1201 * US, 1901 * US]
    # The copies on another stream do not count, the collective does, and launches of
    # autograd's own thread do.
    assert relative(second["gpu_start_ns"]) == [1011 * US, 1301 * US, 1721 * US]
    assert relative(second["gpu_end_ns"]) == [1301 * US, 1721 * US, 1951 * US]
    assert relative(trace.iteration_marks(0)["end_ns"]) == [
        1001 * US,
        2001 * US,
        3001 * US,
    ]
    assert trace.rank(0).first_iteration_start_ns == SESSION_NS + US
    assert not trace.notes


def test_kernels__have_the_innermost_range_of_their_thread_as_operator(
    tmp_path: Path,
) -> None:
    export = (
        MadeExport(tmp_path / "run.sqlite")
        .session()
        .range("step 12", 0, 100)
        .range("block", 10, 50)
    )
    export.range("aten::mm, seq = 7, op_id = 3", 12, 30).range(
        "aten::relu", 12, 60, thread=2
    )
    for launched in (5, 15, 31, 70):
        export.kernel("gemm", 200 + launched, 201 + launched, launched)
    operators = imported(export).kernels(0)["operator"]
    assert operators.astype(object).where(operators.notna(), None).tolist() == [
        None,
        "aten::mm",
        "block",
        None,
    ]


def test_copies__have_kind_bytes_host_memory_stream_and_launch(tmp_path: Path) -> None:
    made = MadeExport(tmp_path / "run.sqlite").session()
    made.copy(H2D, 10, 20, 100, 5, srcKind=PAGEABLE, streamId=3).copy(
        D2H, 30, 40, 200, 6
    )
    made.copy(11, 50, 60, 300, srcKind=4).copy(D2D, 70, 80, 400, 7).memset(
        90, 95, launched=8
    )
    # Neither is work of the GPU: a copy within the host, and one whose end was not
    # recorded.
    made.copy(9, 100, 110, 1, srcKind=0, dstKind=1).copy(H2D, 120, 0, 1)
    # Kind 0 is unknown: the memories tell.
    made.copy(0, 130, 140, 500, srcKind=DEVICE, dstKind=PAGEABLE)
    trace = imported(made)
    copies = trace.transfers(0)
    assert copies["direction"].tolist() == ["h2d", "d2h", "h2d", "d2h"]
    assert copies["bytes"].tolist() == [100, 200, 300, 500]
    assert copies["host_memory"].fillna("?").tolist() == [
        "pageable",
        "pinned",
        "?",
        "pageable",
    ]
    assert copies["stream"].tolist() == [3, 7, 7, 7]
    assert relative(copies["launch_ns"].dropna()) == [5, 6]
    assert copies["launch_ns"].isna().tolist()[2:] == [True, True]
    kernels = trace.kernels(0)
    assert kernels["kind"].tolist() == ["copy", "memset"]
    assert relative(kernels["start_ns"]) == [70, 90]
    assert relative(kernels["launch_ns"]) == [7, 8]
    assert trace.rank(0).transfers_recorded


@settings(max_examples=examples(25, by_default=3))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["nccl_all_reduce", "gemm", H2D, D2H, D2D]),
            st.integers(0, 400),
            st.integers(1, 90),
        ),
        max_size=30,
    )
)
def test_activity__equals_a_direct_count(work: list[tuple[Any, int, int]]) -> None:
    # A trace without any kernel does not say whether kernels were recorded.
    work = [("gemm", 50, 10), *work]
    busy: dict[str, set[int]] = {
        "compute": set(),
        "communication": set(),
        "copy": set(),
    }
    sizes = dict.fromkeys((H2D, D2H, D2D), 0)
    with TemporaryDirectory() as folder:
        made = MadeExport(Path(folder) / "run.sqlite").session()
        for number, (what, start, length) in enumerate(work):
            if isinstance(what, str):
                made.kernel(what, start, start + length, streamId=number)
                busy["compute" if what == "gemm" else "communication"] |= {
                    *range(start, start + length)
                }
            else:
                made.copy(what, start, start + length, length, streamId=number)
                busy["copy"] |= {*range(start, start + length)}
                sizes[what] += length
        trace = imported(made)
    total = TraceAnalysis(trace).activity(0).total
    for kind, times in busy.items():
        assert getattr(total, f"{kind}_ms") == pytest.approx(len(times) / 1e6)
    first, last = (
        min(start for _, start, _ in work),
        max(start + length for _, start, length in work),
    )
    assert total.idle_ms == pytest.approx(
        (last - first - len(set.union(*busy.values()))) / 1e6, abs=1e-12
    )
    copied = trace.transfers(0).groupby("direction")["bytes"].sum()
    assert (copied.get("h2d", 0), copied.get("d2h", 0)) == (sizes[H2D], sizes[D2H])


def test_memory__is_what_was_allocated_and_not_yet_released(tmp_path: Path) -> None:
    made = (
        training(tmp_path / "run.sqlite", 1)
        .memory(9000, 1, 77, memKind=1)
        .memory(9500, 0xE, 500, released=True)
    )
    memory = imported(made).memory(0)
    assert set(memory["pool"]) == {"cuda"}
    assert set(memory["device"]) == {"cuda:0"}
    # The block that is released without an allocation was there from the start; pinned
    # host memory does not count.
    assert relative(memory["t_ns"]) == [0, 6 * US, 9500, 196 * US]
    gib = 1 << 30
    assert memory["bytes"].tolist() == [
        gib + 500,
        gib + 500 + (1 << 28),
        gib + (1 << 28),
        gib,
    ]


def test_memory__bounds_free_memory(tmp_path: Path) -> None:
    trace = imported(training(tmp_path / "run.sqlite"))
    assert trace.rank(0).main_device.capacity_bytes == 80 << 30
    summary = TraceAnalysis(trace).summary()
    assert (summary.free_pool, summary.memory.pool) == ("cuda", "cuda")
    assert summary.memory.peak_bytes == (1 << 30) + (1 << 28)


def test_processes__are_ranks_in_the_order_of_their_gpus(tmp_path: Path) -> None:
    made = (
        MadeExport(tmp_path / "run.sqlite")
        .session()
        .gpu(0, "A100")
        .gpu(1, "H100", 90 << 30)
    )
    # Each process counts its own devices from 0: process 10 has the second card.
    made.add("TARGET_INFO_CUDA_DEVICE", gpuId=1, cudaId=0, pid=10).add(
        "TARGET_INFO_CUDA_DEVICE", gpuId=0, cudaId=0, pid=20
    )
    # Both number their calls from 1.
    for pid, start in ((10, 1000), (20, 2000)):
        made._correlation = 0
        made.kernel(f"kernel_{pid}", start, start + 10, start - 100, pid=pid)
        made.range("forward", start - 200, start - 50, pid=pid)
    trace = imported(made)
    assert [trace.rank(rank).pid for rank in trace.ranks] == [20, 10]
    assert [trace.rank(rank).main_device.name for rank in trace.ranks] == [
        "A100",
        "H100",
    ]
    assert [relative(trace.kernels(rank)["launch_ns"]) for rank in trace.ranks] == [
        [1900],
        [900],
    ]
    assert [relative(trace.phases(rank)["gpu_start_ns"]) for rank in trace.ranks] == [
        [2000],
        [1000],
    ]
    assert any(
        "20, 10" in note and "in the order of their GPUs" in note
        for note in trace.notes
    )


def test_processes__have_the_ranks_of_mpi(tmp_path: Path) -> None:
    made = MadeExport(tmp_path / "run.sqlite").session()
    for pid, rank in ((10, 5), (20, 3)):
        made.kernel("k", pid, pid + 5, pid=pid).add(
            "MPI_RANKS", globalTid=global_pid(pid) | 9, rank=rank
        )
    trace = imported(made)
    assert {rank: trace.rank(rank).pid for rank in trace.ranks} == {3: 20, 5: 10}


def test_files_of_one_process__are_ranks_by_their_names(tmp_path: Path) -> None:
    exports = [
        training(tmp_path / f"report_rank{rank}.sqlite", pid=100 - rank)
        for rank in (1, 0)
    ]
    trace = imported(*exports)
    assert {rank: trace.rank(rank).pid for rank in trace.ranks} == {0: 100, 1: 99}
    same = [training(tmp_path / name) for name in ("a_rank0.sqlite", "b_rank0.sqlite")]
    with pytest.raises(SourceError, match="both of rank 0"):
        imported(*same)


def test_cuda_graphs__count_as_compute_with_a_note(tmp_path: Path) -> None:
    trace = imported(
        MadeExport(tmp_path / "run.sqlite")
        .session()
        .graph(4, 100, 200, 90)
        .graph(4, 300, 400, 290)
    )
    assert trace.kernels(0)["name"].tolist() == ["CUDA graph 4"] * 2
    assert TraceAnalysis(trace).activity(0).total.compute_ms == pytest.approx(200 / 1e6)
    assert any(
        "2 launches of CUDA graphs" in note and "--cuda-graph-trace=node" in note
        for note in trace.notes
    )


def test_annotations__have_registered_names_and_domains(tmp_path: Path) -> None:
    made = MadeExport(tmp_path / "run.sqlite").session().kernel("k", 0, 1)
    made.add(
        "NVTX_EVENTS",
        start=0,
        end=None,
        eventType=75,
        text="NCCL",
        globalTid=global_pid(1234),
        domainId=5,
    )
    made.range("ignored", 50, None)
    made.range("", 10, 20, text=None, textId=made.string("registered")).range(
        "ncclAllReduce", 12, 15, domainId=5
    )
    annotations = imported(made).annotations(0)
    assert annotations["name"].tolist() == ["registered", "NCCL:ncclAllReduce"]
    assert (relative(annotations["start_ns"]), relative(annotations["end_ns"])) == (
        [10, 12],
        [20, 15],
    )
    assert annotations["thread"].tolist() == [1, 1]


def test_file_without_gpu_work__says_that_copies_are_not_known(tmp_path: Path) -> None:
    trace = imported(
        MadeExport(tmp_path / "run.sqlite")
        .session()
        .range("forward", 10, 20)
        .range("backward", 20, 30)
    )
    assert not trace.rank(0).transfers_recorded
    assert TraceAnalysis(trace).activity(0).total.compute_ms is None
    text = "\n".join(trace.notes)
    assert "no work of a GPU" in text
    assert "no use of GPU memory" in text
    assert "update" in text


def test_file_without_start_of_the_session__has_no_dates(tmp_path: Path) -> None:
    made = MadeExport(tmp_path / "run.sqlite").kernel("k", 5, 6)
    trace = import_trace([made.write()], tmp_path / "run.ebb")
    assert trace.raw_meta["clock"]["name"] == "unknown"
    assert trace.kernels(0)["start_ns"].tolist() == [5]
    dated = MadeExport(tmp_path / "dated.sqlite").session().kernel("k", 5, 6).write()
    with pytest.raises(SourceError, match="no dates"):
        import_trace([made.path, dated], tmp_path / "both.ebb")

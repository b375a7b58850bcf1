"""CSV reports of `nsys stats`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.analysis import TraceAnalysis
from ebbtide.profiler.importers.importer import ImportOptions
from ebbtide.profiler.importers.load import import_trace, recognize
from ebbtide.profiler.importers.nsys.importer import NsysCsvImporter
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.trace import Trace, TraceBuilder

# The columns of Nsight Systems 2024.6, and those of 2020 and 2021.
WORK = (
    "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB),"
    "Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name\n"
)
OLD_WORK = WORK.replace("(ns)", "(nsec)").replace("GreenCtx,", "").replace("(MB/s)", "(MBps)")
CALLS = "Start (ns),Duration (ns),Name,Result,CorrID,Pid,Tid,T-Pri,Thread Name\n"
RANGES = (
    "Start (ns),End (ns),Duration (ns),DurChild (ns),DurNonChild (ns),Name,PID,TID,Lvl,NumChild,RangeId,ParentId,"
    "RangeStack,NameTree\n"
)
PROJECTED = (
    "Name,Projected Start (ns),Projected Duration (ns),Orig Start (ns),Orig Duration (ns),Style,PID,TID,NumGPUOps,Lvl,"
    "NumChild,RangeId,ParentId,RangeStack\n"
)
PREAMBLE = (
    "\nNOTICE: Existing SQLite export found: run.sqlite\n\nProcessing [run.sqlite] with [cuda_gpu_trace.py]... \n"
)


def work_row(
    start: str, duration: str, name: str, number: int = 1, size: str = "", memories: str = ",", **more: str
) -> str:
    device = more.get("device", "NVIDIA A100-SXM4-80GB (0)")
    return f'{start},{duration},{number},,,,,,,,,,{size},,{memories},{device},1,,{more.get("stream", "7")},"{name}"\n'


def job() -> str:
    """Return the report of work in 1 ms: forward to 300 us, backward to 700 us, update."""
    return WORK + "".join(
        (
            work_row("10000", "290000", "gemm<int, 4>(float *)", 1),
            work_row("20000", "50000", "[CUDA memcpy Host-to-Device]", 2, "4.194", "Pinned,Device", stream="13"),
            work_row("300000", "390000", "gemm_backward(float *)", 3),
            work_row("600000", "100000", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 4, stream="20"),
            work_row("650000", "60000", "[CUDA memcpy DtoH]", 5, "8.389", "Device,Pageable", stream="14"),
            work_row("700000", "1000", "[CUDA memset]", 6, "0.001", "Device,"),
            work_row("701000", "200000", "adam(float *)", 7),
        )
    )


def imported(folder: Path, *texts: str) -> Trace:
    paths = [folder / f"report_{number}.csv" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
        assert recognize(Source(path)) == "nsys-csv"
    builder = TraceBuilder("imported")
    NsysCsvImporter().import_into(builder, [Source(path) for path in paths], ImportOptions())
    return builder.build()


def test_work__is_read_with_kinds_and_sizes(tmp_path: Path) -> None:
    trace = imported(tmp_path, PREAMBLE + job())
    kernels, copies = trace.kernels(0), trace.transfers(0)
    assert kernels["kind"].tolist() == ["compute", "compute", "communication", "memset", "compute"]
    assert kernels["name"].tolist()[0] == "gemm<int, 4>(float *)"
    assert kernels["end_ns"].tolist() == [300000, 690000, 700000, 701000, 901000]
    assert copies["direction"].tolist() == ["h2d", "d2h"]
    assert copies["host_memory"].tolist() == ["pinned", "pageable"]
    assert copies["bytes"].tolist() == [4_194_000, 8_389_000]
    assert copies["stream"].tolist() == [13, 14]
    assert trace.rank(0).main_device.name == "NVIDIA A100-SXM4-80GB"
    assert TraceAnalysis(trace).activity(0).total.compute_ms == pytest.approx(0.88)
    assert any("rounded" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("header", "start", "duration", "size", "stated_bytes"),
    [
        (OLD_WORK, "1500", "300", "2.000", 2_000_000),
        (OLD_WORK.replace(" (nsec)", "(nsec)").replace("Bytes (MB)", "Size (MB)"), "1500", "300", "2", 2_000_000),
        (OLD_WORK.replace("nsec", "us").replace("Bytes (MB)", "Bytes (KB)"), "1.5", "0.3", "2.5", 2500),
        (OLD_WORK.replace("nsec", "ms").replace("Bytes (MB)", "Bytes (MiB)"), "0.0015", "0.0003", "0.5", 524288),
        (OLD_WORK.replace("nsec", "s").replace("Bytes (MB)", "Bytes (byte)"), "0.0000015", "0.0000003", "77", 77),
    ],
)  # fmt: skip
def test_units__are_those_of_the_header(
    tmp_path: Path, header: str, start: str, duration: str, size: str, stated_bytes: int
) -> None:
    row = work_row(start, duration, "[CUDA memcpy HtoD]", 1, size, "Pageable,Device").replace(",1,,7,", ",1,7,")
    (copy,) = imported(tmp_path, header + row).transfers(0).itertuples()
    assert (copy.start_ns, copy.end_ns, copy.bytes, copy.stream) == (1500, 1800, stated_bytes, 7)


def test_projected_ranges__give_phases_with_device_times(tmp_path: Path) -> None:
    ranges = PROJECTED + (
        "None,10000,891000,None,None,None,77,77,7,0,3,None,None,None\n"
        ":forward,10000,290000,5000,45000,PushPop,77,77,2,1,0,1,None,:1\n"
        ":backward,300000,410000,50000,50000,PushPop,77,77,3,1,0,2,None,:2\n"
        ":optimizer_step,700000,201000,100000,700000,PushPop,77,77,2,1,0,3,None,:3\n"
    )
    # The report of the same ranges by the host adds nothing.
    again = RANGES + "5000,50000,45000,0,45000,:forward,77,77,0,0,1,,:1,:forward\n"
    trace = imported(tmp_path, job() + "\nProcessing [run.sqlite] with [nvtx_gpu_proj_trace.py]...\n" + ranges, again)
    phases = trace.phases(0)
    assert phases["phase"].tolist() == ["forward", "backward", "update"]
    assert phases["start_ns"].tolist() == [5000, 50000, 100000]
    assert phases["gpu_start_ns"].tolist() == [10000, 300000, 710000]
    assert phases["gpu_end_ns"].tolist() == [300000, 710000, 901000]
    assert phases["iteration"].tolist() == [0, 0, 0]
    assert trace.annotations(0)["name"].tolist() == ["forward", "backward", "optimizer_step"]
    assert trace.rank(0).pid == 77


def test_calls__give_launches_and_device_times(tmp_path: Path) -> None:
    launches = (6000, 7000, 60000, 70000, 80000, 110000, 120000)
    calls = CALLS + "".join(
        f"{start},5000,cudaLaunchKernel,0,{number},77,{78 if number in (3, 4) else 77},,python\n"
        for number, start in enumerate(launches, 1)
    )
    spans = (("forward", 5000, 50000), ("backward", 50000, 100000), ("step", 100000, 800000))
    ranges = RANGES + "".join(f"{a},{b},{b - a},0,{b - a},:{name},77,77,0,0,1,,:1,x\n" for name, a, b in spans)
    trace = imported(tmp_path, job(), calls, ranges)
    assert trace.kernels(0)["launch_ns"].tolist() == [6000, 60000, 70000, 110000, 120000]
    phases = trace.phases(0)
    assert phases["gpu_start_ns"].tolist() == [10000, 300000, 700000]
    assert phases["gpu_end_ns"].tolist() == [300000, 700000, 901000]
    without_calls = imported(tmp_path, job(), ranges)
    assert without_calls.phases(0)["gpu_start_ns"].isna().all()
    assert any("host's times" in note for note in without_calls.notes)


def test_devices__count_as_ranks_where_the_process_is_not_stated(tmp_path: Path) -> None:
    rows = [work_row("10", "20", f"kernel_{n}", device=f"NVIDIA H100 ({n})") for n in (1, 0)]
    trace = imported(tmp_path, WORK + "".join(rows))
    assert [trace.rank(rank).main_device.device for rank in trace.ranks] == ["cuda:0", "cuda:1"]
    assert [trace.kernels(rank)["name"].tolist() for rank in trace.ranks] == [["kernel_0"], ["kernel_1"]]
    assert any("each device counts as a rank" in note for note in trace.notes)
    # Calls of the same number in two processes tell nothing, calls of different numbers do.
    calls = CALLS + "1,1,cudaLaunchKernel,0,1,50,50,,x\n2,1,cudaLaunchKernel,0,2,40,40,,x\n"
    rows = [work_row("10", "20", "a", 1, device="H (1)"), work_row("10", "20", "b", 2, device="H (0)")]
    trace = imported(tmp_path, WORK + "".join(rows), calls)
    assert [(trace.rank(rank).pid, *trace.kernels(rank)["name"]) for rank in trace.ranks] == [(40, "b"), (50, "a")]


def test_reports__have_no_dates(tmp_path: Path) -> None:
    (tmp_path / "gpu.csv").write_text(job())
    trace = import_trace([tmp_path / "gpu.csv"], tmp_path / "run.ebb")
    assert trace.raw_meta["clock"]["name"] == "unknown"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WORK, "no work of a GPU"),
        (RANGES + "x,y,z,0,0,:forward,77,77,0,0,1,,:1,x\n", "no work of a GPU"),
        (WORK + '1,2,3,"unfinished\n', "damaged"),
    ],
)
def test_damaged_reports__are_refused_with_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SourceError, match=message) as refused:
        imported(tmp_path, text)
    assert "\n" not in str(refused.value)


def test_cut_off_report__loses_its_last_row_with_a_note(tmp_path: Path) -> None:
    text = WORK + work_row("10", "20", "kernel") + "50"
    trace = imported(tmp_path, text)
    assert len(trace.kernels(0)) == 1
    assert any("1 rows are incomplete" in note for note in trace.notes)

"""The recorder and commands on the stand-in, against what the job itself measures."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from ebbtide.profiler.trace import open_trace
from tests.conftest import ebbtide
from tests.cuda_runtime.conftest import OnStandIn

STEPS = 8
HOST_BYTES = 2 << 20
# The optimizer's state lies in pinned memory; copies use streams of their own, and each
# phase has some.
TRAINING = f"""
import json
import torch
from torch import nn

class Streamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 1024) / 32)
    def forward(self, x):
        return x @ self.weight.to("cuda")

class Offloaded(torch.optim.SGD):
    def step(self):
        stream = torch.cuda.current_stream()
        for one in (uploads, downloads):
            one.wait_stream(stream)
        with torch.cuda.stream(uploads):
            state = host.to("cuda", non_blocking=True)
        stream.wait_stream(uploads)
        state.mul_(0.5)
        downloads.wait_stream(stream)
        with torch.cuda.stream(downloads):
            host.copy_(state, non_blocking=True)
        stream.wait_stream(downloads)
        super().step()

torch.manual_seed(0)
host = torch.ones({HOST_BYTES} // 4, pin_memory=True)
uploads, downloads = torch.cuda.Stream(), torch.cuda.Stream()
model = nn.Sequential(nn.Linear(64, 512).cuda(), Streamed())
optimizer = Offloaded(model.parameters(), lr=1e-3)
marks = []
def mark():
    marks.append(torch.cuda.Event(enable_timing=True))
    marks[-1].record()
x = torch.randn(8, 64).cuda()
allocated = []
for _ in range({STEPS}):
    mark()
    y = model(x)
    mark()
    loss = y.square().mean()
    mark()
    loss.backward()
    mark()
    mark()
    allocated.append(torch.cuda.memory_allocated())
    optimizer.step()
    mark()
    optimizer.zero_grad()
torch.cuda.synchronize()
times_ms = [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]
phases = {{name: times_ms[place::6] for place, name in ((0, "forward"), (2, "backward"), (4, "update"))}}
reserved = torch.cuda.memory_stats()["reserved_bytes.all.peak"]
print(json.dumps({{"phases": phases, "reserved": reserved, "allocated": allocated}}))
"""
# Of a phase with one copy.
COPY_MS = 100
SETTINGS = {"gbps": HOST_BYTES / COPY_MS / 1e6, "jitter_us": 500}


class Profiled:
    """A job on the stand-in, its figures and its trace."""

    def __init__(self, run: OnStandIn, folder: Path) -> None:
        job, self.path = folder / "job.py", folder / "run.ebb"
        job.write_text(TRAINING)
        options = ["--transfers", "--iterations", "0:100", "-o", str(self.path)]
        done = run(
            ["-m", "ebbtide", "profile", *options, "--", sys.executable, str(job)],
            **SETTINGS,
        )
        self.figures = json.loads(done.stdout)
        self.trace = open_trace(self.path)


@pytest.fixture(scope="module")
def profiled(
    on_stand_in: OnStandIn, tmp_path_factory: pytest.TempPathFactory
) -> Profiled:
    return Profiled(on_stand_in, tmp_path_factory.mktemp("profiled"))


def test_profile__has_the_times_of_the_events_of_the_job(profiled: Profiled) -> None:
    phases = profiled.trace.phases(0)
    times_ms = (phases["gpu_end_ns"] - phases["gpu_start_ns"]) / 1e6
    for name, of_events_ms in profiled.figures["phases"].items():
        recorded_ms = times_ms[phases["phase"] == name].tolist()
        assert len(recorded_ms) == STEPS
        assert min(recorded_ms) >= COPY_MS
        ratios = [
            one / other for one, other in zip(recorded_ms, of_events_ms, strict=True)
        ]
        # Where cores are short, the thread that works for a stream is late.
        assert statistics.median(ratios) == pytest.approx(1, rel=0.1)


def test_profile__counts_copies_with_bytes_streams_and_host_memory(
    profiled: Profiled,
) -> None:
    copies = profiled.trace.transfers(0)
    copies = copies[copies["bytes"] == HOST_BYTES]
    groups = copies.groupby(["direction", "host_memory", "stream"]).size()
    main = 0
    assert groups["h2d", "pageable", main] == groups["d2h", "pageable", main] == STEPS
    pinned = groups.drop(index=main, level="stream")
    assert pinned.tolist() == [STEPS] * 2
    assert set(pinned.index.droplevel("stream")) == {
        ("h2d", "pinned"),
        ("d2h", "pinned"),
    }
    assert pinned.index.get_level_values("stream").nunique() == 2
    times_ms = (copies["end_ns"] - copies["start_ns"]) / 1e6
    assert times_ms.min() >= COPY_MS * 0.99
    assert times_ms.median() == pytest.approx(COPY_MS, rel=0.05)


def test_profile__has_the_pools_of_torch(profiled: Profiled) -> None:
    memory = profiled.trace.memory(0)
    peaks = memory.groupby("pool")["bytes"].max()
    assert peaks["device"] == peaks["reserved"] == profiled.figures["reserved"]
    # One reading is at the end of the backward.
    assert set(profiled.figures["allocated"]) <= set(
        memory["bytes"][memory["pool"] == "allocated"]
    )
    assert peaks["pinned"] == HOST_BYTES


def test_profile__has_counters_of_the_link_that_agree_with_copies(
    profiled: Profiled,
) -> None:
    link: pd.DataFrame = profiled.trace.link(0)
    assert set(link["source"]) == {"nvml-counters"}
    # Where cores are short, readings are late, and windows in which a counter of 32
    # bits may have wrapped are left out: a copy may lie outside of all windows.
    begins_ns = link["t_ns"] - link["window_ns"]
    span = (begins_ns > link["t_ns"].shift()).cumsum()
    first_ns = begins_ns.groupby(span).min().to_numpy()
    last_ns = link["t_ns"].groupby(span).max().to_numpy()
    copies = profiled.trace.transfers(0)
    starts_ns = copies["start_ns"].to_numpy()[:, None]
    ends_ns = copies["end_ns"].to_numpy()[:, None]
    is_inside = ((first_ns <= starts_ns) & (ends_ns <= last_ns)).any(axis=1)
    is_touched = ((first_ns < ends_ns) & (starts_ns < last_ns)).any(axis=1)
    assert is_inside.any()
    for direction in ("h2d", "d2h"):
        counted = (link[f"{direction}_bytes_per_s"] * link["window_ns"]).sum() / 1e9
        is_own = copies["direction"] == direction
        least = copies["bytes"][is_own & is_inside].sum()
        most = copies["bytes"][is_own & is_touched].sum()
        assert least * 0.98 <= counted <= most * 1.02


OUT_OF_MEMORY = """
import json
import ebbtide, torch
from torch import nn
model = nn.Linear(256, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.ones(8, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
kept = torch.ones(1 << 24, device="cuda")
print(json.dumps(ebbtide.metrics()))
print(json.dumps([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]), flush=True)
model(torch.ones(1 << 15, 256, device="cuda"))
"""


def test_memory_at_oom__and_metrics_have_the_figures_of_torch(
    on_stand_in: OnStandIn, tmp_path: Path
) -> None:
    job, path, capacity = tmp_path / "job.py", tmp_path / "run.ebb", 128 << 20
    job.write_text(OUT_OF_MEMORY)
    command = [
        "-m",
        "ebbtide",
        "profile",
        "-o",
        str(path),
        "--",
        sys.executable,
        str(job),
    ]
    done = on_stand_in(command, succeeds=False, bytes=capacity)
    metrics, (allocated, reserved) = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 1
    assert "torch.OutOfMemoryError" in done.stderr
    assert metrics["ebbtide/capacity_bytes"] == capacity
    assert metrics["ebbtide/peak_bytes/reserved"] < reserved
    answer = json.loads(ebbtide("memory", path, "--at", "oom", "--json").stdout)
    inputs = 256 * 4 << 15
    assert answer["requested_bytes"] == 4 * inputs
    assert answer["allocated_bytes"] == allocated + inputs
    # Before it raises, torch gives cached memory back.
    assert allocated + inputs <= answer["reserved_bytes"] <= reserved + inputs
    assert answer["free_bytes"] == capacity - answer["reserved_bytes"]


PLUGGABLE = """
#include <stddef.h>
int cudaMalloc(void **, size_t);
int cudaFree(void *);
void *take(size_t bytes, int device, void *stream) {
    void *memory = NULL;
    cudaMalloc(&memory, bytes);
    return memory;
}
void give(void *memory, size_t bytes, int device, void *stream) { cudaFree(memory); }
"""
SHORT_TRAINING = """
import sys

import torch

if len(sys.argv) > 1:
    allocator = torch.cuda.memory.CUDAPluggableAllocator(sys.argv[1], "take", "give")
    torch.cuda.memory.change_current_allocator(allocator)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("allocator", ["backend:cudaMallocAsync", "pluggable"])
def test_profile__records_jobs_with_another_allocator(
    on_stand_in: OnStandIn,
    allocator: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, path, library = (
        tmp_path / "job.py",
        tmp_path / "run.ebb",
        tmp_path / "pluggable.so",
    )
    job.write_text(SHORT_TRAINING)
    arguments = []
    if allocator == "pluggable":
        (tmp_path / "pluggable.c").write_text(PLUGGABLE)
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "pluggable.c"],
            check=True,
        )
        arguments = [str(library)]
    else:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    options = ["--iterations", "0:100", "-o", str(path)]
    on_stand_in(
        [
            "-m",
            "ebbtide",
            "profile",
            *options,
            "--",
            sys.executable,
            str(job),
            *arguments,
        ]
    )
    trace = open_trace(path)
    assert trace.phases(0)["iteration"].nunique() == 4
    assert any("allocator is not torch's own" in note for note in trace.notes)

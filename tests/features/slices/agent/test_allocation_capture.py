"""Allocations of some iterations: on the CPU in a real job, on CUDA with the calls of a
scripted allocator."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.analysis.metrics.holders.holders import holders_at, memory_by_category
from ebbtide.features.slices.agent.detailed_capture import AllocationCapture
from ebbtide.profiler.agent.options import Options
from ebbtide.profiler.memory_snapshot.recorded import read_recorded
from ebbtide.profiler.trace import Trace, open_trace
from tests.conftest import run_process
from tests.profiler.agent.jobs import PRELUDE

JOB = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(64, 500, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.blocks(self.embedding(x)))

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
for number in range(6):
    tokens = torch.randint(0, 500, (8, 32))
    optimizer.zero_grad()
    {before}
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    {after}
print(loss.item())
"""
# The tied weight counts once.
PARAMS = 500 * 64 + 2 * (64 * 256 + 256 + 256 * 64 + 64)
TENSORS = 1 + 2 * 4
WITH_A_PROFILER = {
    "before": (
        "profiler = torch.profiler.profile() if number == 3 else None; profiler and "
        "profiler.start()"
    ),
    "after": "profiler and profiler.stop()",
}


def profiled(folder: Path, *options: str, **parts: str) -> tuple[Trace, Any]:
    script = folder / "train.py"
    script.write_text(
        JOB.replace("{before}", parts.get("before", "pass")).replace(
            "{after}", parts.get("after", "pass")
        )
    )
    command = [
        sys.executable,
        "-m",
        "ebbtide",
        "profile",
        "-o",
        folder / "run.ebb",
        *options,
        "--",
        sys.executable,
        script,
    ]
    run = run_process(command)
    assert run.returncode == 0, run.stderr
    return open_trace(folder / "run.ebb"), run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Any]:
    return profiled(tmp_path_factory.mktemp("job"), "--allocator-iterations", "2")


def test_allocation_capture__holders_of_a_known_model_are_exact(
    recorded: tuple[Trace, Any],
) -> None:
    trace = recorded[0]
    phases = trace.phases(0)
    update = phases[(phases["phase"] == "update") & (phases["iteration"] == 3)].iloc[0]
    holders = holders_at(trace, 0, int(update["start_ns"]))
    assert holders is not None
    assert holders.pool == "tensors"
    sizes = dict(holders.by("category"))
    assert sizes["parameter"] == sizes["gradient"] == 4 * PARAMS
    # Two moments, and a step of 4 bytes per tensor.
    assert sizes["optimizer_state"] == 8 * PARAMS + 4 * TENSORS
    modules = {
        holder.module: holder.bytes
        for holder in holders.holders
        if holder.category == "parameter"
    }
    assert modules["blocks.1.up"] == 4 * (64 * 256 + 256)
    assert modules["embedding"] == 4 * 500 * 64


def test_allocation_capture__knows_nearly_all_of_the_peak(
    recorded: tuple[Trace, Any],
) -> None:
    holders = holders_at(recorded[0], 0)
    assert holders is not None
    sizes = dict(holders.by("category"))
    assert sum(sizes.values()) == holders.bytes
    assert sizes.get(None, 0) <= 0.05 * holders.bytes
    assert sizes["activation"] > 0


def test_allocation_capture__activations_have_the_module_and_the_line_that_made_them(
    recorded: tuple[Trace, Any],
) -> None:
    rows = recorded[0].allocations(0)
    up = rows[(rows["module"] == "blocks.0.up") & rows["category"].isna()]
    assert len(up)
    assert any(
        "forward (" in stack and "train.py" in stack for stack in up["stack"].dropna()
    )
    timelines = memory_by_category(recorded[0], 0, "cpu")
    assert all(sizes.min() >= 0 for _, sizes in timelines.values())


@pytest.mark.slow
def test_allocation_capture__leaves_the_streams_and_the_result_of_the_job_alone(
    recorded: tuple[Trace, Any], tmp_path: Path
) -> None:
    trace, run = recorded
    bare = run_process([sys.executable, trace.path.with_name("train.py")], cwd=tmp_path)
    assert run.stdout == bare.stdout
    assert all(line.startswith("ebbtide: ") for line in run.stderr.splitlines())
    assert set(trace.memory(0)["pool"]) >= {"heap", "tensors"}
    assert not list(trace.path.glob("spool/*"))


@pytest.mark.slow
def test_allocation_capture__ends_before_the_job_begins_a_profiler_of_its_own(
    tmp_path: Path,
) -> None:
    trace, _ = profiled(tmp_path, "--allocator-iterations", "3", **WITH_A_PROFILER)
    assert any("the job uses a profiler" in note for note in trace.notes)
    assert len(trace.allocations(0)) > 0


TWO_THREADS = """
import threading, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = PlainSGD(model.parameters(), lr=1e-2)
def train(steps):
    for _ in range(steps):
        model(torch.randn(8, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
def train_in_thread(steps):
    thread = threading.Thread(target=train, args=(steps,))
    thread.start()
    thread.join()
{calls}
print(sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "note"),
    [
        ("train_in_thread(4)\ntrain_in_thread(4)", "let the main thread train"),
        ("train(4)\ntrain_in_thread(6)", "several threads train"),
    ],
)
def test_allocation_capture__does_not_crash_a_job_that_trains_in_other_threads(
    tmp_path: Path, calls: str, note: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PRELUDE + TWO_THREADS.replace("{calls}", calls))
    trace = tmp_path / "run.ebb"
    profile = [
        sys.executable,
        "-m",
        "ebbtide",
        "profile",
        "--allocator-iterations",
        "4",
        "-o",
        trace,
        "--",
    ]
    run = run_process([*profile, sys.executable, script])
    bare = run_process([sys.executable, script])
    assert (
        (run.returncode, run.stdout)
        == (bare.returncode, bare.stdout)
        == (0, bare.stdout)
    ), run.stderr
    assert all(line.startswith("ebbtide: ") for line in run.stderr.splitlines())
    assert any(note in text for text in open_trace(trace).notes)


def event(action: str, size: int, time_us: int, addr: int = 4096) -> dict[str, Any]:
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": 0,
        "time_us": time_us,
        "device": 0,
    }


def recorder_of(job_info: Any, torch: Any) -> Any:
    """Return a recorder without a model."""
    return SimpleNamespace(
        torch=torch,
        job_info=job_info,
        note_once=job_info.note,
        threads=SimpleNamespace(several=False),
        model_and_optimizers=lambda: ([], []),
        read_tensors=lambda read: read([], []),
    )


def test_allocation_capture__reads_the_history_of_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Before: one block, 1000 bytes asked for. Then 700 asked for; then the first is
    # freed.
    events = [
        event("alloc", 700, 1),
        event("free_requested", 1000, 2, 512),
        event("free_completed", 1000, 3, 512),
    ]
    block = {
        "size": 1024,
        "requested_size": 700,
        "address": 4096,
        "state": "active_allocated",
    }
    segment = {"device": 0, "address": 4096, "total_size": 2048, "blocks": [block]}
    snapshot = {"device_traces": [events], "segments": [segment]}
    states: list[Any] = []
    memory = SimpleNamespace(
        _snapshot=lambda: snapshot,
        _record_memory_history=lambda **options: states.append(options["enabled"]),
    )
    cuda = SimpleNamespace(
        current_device=lambda: 0, is_initialized=lambda: True, memory=memory
    )
    torch: Any = SimpleNamespace(
        cuda=cuda, _C=SimpleNamespace(_cuda_isHistoryEnabled=lambda: False)
    )
    notes: list[str] = []
    job_info = SimpleNamespace(
        path=lambda name: str(tmp_path / name), note=notes.append
    )
    recorder = recorder_of(job_info, torch)
    owners = [(4096, 700, "gradient", "layer")]
    monkeypatch.setattr(
        "ebbtide.features.slices.agent.detailed_capture.list_blocks", lambda *_: owners
    )
    capture = AllocationCapture(recorder, Options(allocator_iterations=1))
    capture.enter_iteration(1)
    assert states == []
    capture.enter_iteration(2)
    capture.enter_update()
    capture.enter_iteration(3)
    assert states == ["all", None]
    description = tmp_path / "allocations-description.json"
    entries = json.loads(description.read_text())
    entries["wall_to_monotonic_ns"] = 5
    entries["owners"] = [[2_500, owners]]
    description.write_text(json.dumps(entries))
    allocations, memory = read_recorded(description)
    requested = memory[memory["pool"] == "requested"]
    assert list(zip(requested["t_ns"], requested["bytes"], strict=True)) == [
        (1_005, 1000),
        (1_005, 1700),
        (2_005, 700),
        (3_005, 700),
    ]
    assert allocations[["bytes", "category", "module", "device"]].astype(
        object
    ).to_numpy().tolist() == [
        [1000, None, None, "cuda:0"],
        [700, "gradient", "layer", "cuda:0"],
    ]
    assert notes == []


def test_allocation_capture__leaves_a_history_of_the_job_alone(tmp_path: Path) -> None:
    cuda = SimpleNamespace(
        current_device=lambda: 0, is_initialized=lambda: True, memory=None
    )
    torch: Any = SimpleNamespace(
        cuda=cuda, _C=SimpleNamespace(_cuda_isHistoryEnabled=lambda: True)
    )
    notes: list[str] = []
    job_info = SimpleNamespace(note=notes.append)
    recorder = recorder_of(job_info, torch)
    capture = AllocationCapture(recorder, Options(allocator_iterations=1))
    for iteration in (2, 3):
        capture.enter_iteration(iteration)
    assert len(notes) == 1
    assert "history of its own" in notes[0]

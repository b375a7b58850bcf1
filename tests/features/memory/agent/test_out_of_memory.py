"""Out-of-memory errors of real jobs on the CPU: the record, the holders, and the job's
own output."""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.features.memory.agent.out_of_memory import OutOfMemoryWatch
from ebbtide.profiler import Tracer
from ebbtide.profiler.trace import Trace
from tests.conftest import Recorded, ebbtide_in_process, run_process
from tests.profiler.agent.jobs import PRELUDE

MIB = 1 << 20
# A limit of the job's own raises in the forward of the third iteration; before, a
# thread runs out of memory.
JOB = (
    PRELUDE
    + """
import threading
class Limited(nn.Module):
    calls = 0
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)
    def forward(self, x):
        Limited.calls += 1
        if Limited.calls == 3:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB, of a total capacity of 4.00 GiB")
        return self.inner(x)
def fail():
    raise torch.OutOfMemoryError("the thread tried to allocate 3 bytes")
thread = threading.Thread(target=fail, name="loader")
thread.start()
thread.join()
model = nn.Sequential(nn.Linear(16, 32), Limited(), nn.Linear(32, 4))

class Momentum(PlainSGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("momentum", torch.zeros_like(p)).add_(p.grad)
            p -= 0.01 * self.state[p]["momentum"]
optimizer = Momentum(model.parameters(), lr=1e-2)
for _ in range(STEPS):
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)


def by_size(holder: dict[str, Any]) -> tuple[int, str]:
    return -holder["bytes"], holder["category"]


def test_out_of_memory__keeps_phase_request_and_holders_and_the_output_of_the_job(
    record: Callable[..., Recorded], tmp_path: Path
) -> None:
    recorded = record(JOB, options=("--allocator-iterations", "0"))
    bare = run_process([sys.executable, str(tmp_path / "job.py")], cwd=tmp_path)
    lines = recorded.run.stderr.splitlines(keepends=True)
    assert (
        "".join(line for line in lines if not line.startswith("ebbtide:"))
        == bare.stderr
    )
    assert (
        (recorded.run.returncode, recorded.run.stdout)
        == (bare.returncode, bare.stdout)
        == (1, "")
    )
    assert "Traceback" in bare.stderr
    assert (
        f"the job ran out of memory: ebbtide memory {recorded.path} --at oom"
        in recorded.run.stderr
    )
    in_thread, in_forward = recorded.trace.rank(0).out_of_memory
    assert (in_thread.phase, in_thread.iteration, in_thread.requested_bytes) == (
        "other",
        0,
        3,
    )
    assert (in_forward.phase, in_forward.iteration) == ("forward", 2)
    assert (in_forward.requested_bytes, in_forward.capacity_bytes) == (2 << 30, 4 << 30)
    assert not recorded.trace.meta.options.allocator_iterations
    answer = json.loads(
        ebbtide_in_process("memory", recorded.path, "--at", "oom", "--json").stdout
    )
    named = [holder for holder in answer["holders"] if holder["category"] is not None]
    assert [
        (h["category"], h["module"], h["bytes"]) for h in sorted(named, key=by_size)[:3]
    ] == [
        ("optimizer_state", "1.inner", 4 * (32 * 32 + 32)),
        ("parameter", "1.inner", 4 * (32 * 32 + 32)),
        ("optimizer_state", "0", 4 * (16 * 32 + 32)),
    ]
    assert (
        sum(holder["bytes"] for holder in answer["holders"])
        == answer["bytes"]
        == answer["allocated_bytes"]
    )
    text = ebbtide_in_process("memory", recorded.path, "--at", "oom").stdout
    assert "ran out of memory on cpu" in text
    assert "in forward of iteration 2" in text


class Greedy(nn.Module):
    """A model that asks for more than there is in some of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 2 == 0:
            torch.empty(1 << 50)
        return self.layer(x)


def train(steps: int) -> int:
    model = Greedy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failures = 0
    for _ in range(steps):
        try:
            loss = model(torch.ones(2, 8)).sum()
        except RuntimeError:
            failures += 1
            # The error is being handled, and is not one of this call.
            loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        optimizer.step()
    return failures


def test_out_of_memory__of_the_cpu_allocator_is_recorded_three_times_while_the_job_goes_on(
    tmp_path: Path,
) -> None:
    hooks = sys.excepthook, threading.excepthook
    with (
        warnings.catch_warnings(record=True) as warned,
        Tracer(tmp_path / "run.ebb") as tracer,
    ):
        assert train(6) == 5
        assert (sys.excepthook, threading.excepthook) != hooks
    assert "ran out of memory" in str(warned[0].message)
    assert (sys.excepthook, threading.excepthook) == hooks
    trace = tracer.trace
    assert trace is not None
    errors = trace.rank(0).out_of_memory
    assert [(error.phase, error.iteration, error.device) for error in errors] == [
        ("forward", number, "cpu") for number in (1, 2, 3)
    ]
    assert {error.requested_bytes for error in errors} == {4 << 50}
    assert all("DefaultCPUAllocator" in (error.message or "") for error in errors)
    assert all((error.allocated_bytes or 0) > 0 for error in errors)
    assert trace.phases(0)["iteration"].max() == 5
    reasons = [entry.reason for entry in trace.rank(0).inventories]
    assert sorted(reasons) == ["out of memory"] * 3 + ["update"] * 2
    check_inventories(trace)


def check_inventories(trace: Trace) -> None:
    parameters = 4 * (8 * 8 + 8)
    for entry in trace.rank(0).inventories:
        counts = {holder.category: holder.bytes for holder in entry.holders}
        assert counts["parameter"] == parameters
        # SGD has no state, and its gradients stay from the first backward on.
        assert counts.get("gradient", parameters) == parameters
        assert set(counts) <= {"parameter", "gradient"}


class FakeRecorder:
    """A recorder in the backward of iteration 7 that keeps what it is given."""

    def __init__(self) -> None:
        self.live = self.in_phase = True
        self.phase, self.iteration = 1, 7
        self.values: dict[str, Any] = {}
        self.job_info = SimpleNamespace(set=self.values.__setitem__)
        self.faults: list[Exception] = []
        self.fail = self.faults.append

    def begin(self) -> bool:
        return True

    begin_error = begin

    def flush(self) -> None:
        self.values["flushed"] = True

    def read_memory(self, device: int | None = None) -> list[tuple[int, int, int]]:
        number = device or 0
        return [(2, number, 50 * MIB + number), (1, number, 60 * MIB), (5, 0xFFFF, 1)]


@pytest.fixture
def observed() -> tuple[FakeRecorder, OutOfMemoryWatch, SimpleNamespace]:
    attached: list[Any] = []
    cuda = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 0)
    fake_torch = SimpleNamespace(
        OutOfMemoryError=torch.OutOfMemoryError,
        cuda=cuda,
        _C=SimpleNamespace(_cuda_attach_out_of_memory_observer=attached.append),
    )
    recorder = FakeRecorder()
    inventories = SimpleNamespace(add_out_of_memory=lambda *_: None)
    recorder.torch = fake_torch
    watch = OutOfMemoryWatch(recorder, inventories)  # type: ignore[arg-type]
    watch.attach_observer(0)
    watch.attach_observer(1)
    assert attached == [watch.observe]
    return recorder, watch, cuda


def test_watch__joins_what_the_observer_and_the_exception_say(
    observed: tuple[FakeRecorder, OutOfMemoryWatch, SimpleNamespace],
) -> None:
    recorder, watch, _ = observed
    watch.observe(0, 20 * MIB, 80 * MIB, 10 * MIB)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    watch.see(error)
    watch.see(error)
    watch.observe(1, 1, 2, 3)
    watch.observe(0, 30 * MIB, 80 * MIB, 10 * MIB)
    watch.observe(0, 40 * MIB, 80 * MIB, 10 * MIB)
    watch.see(torch.OutOfMemoryError("of the fourth one"))
    watch.see(ValueError("CUDA error: out of memory"))
    first, other_device, last = recorder.values["out_of_memory"]
    first.pop("t_ns")
    assert first == {
        "device": "cuda:0",
        "iteration": 7,
        "phase": "backward",
        "requested_bytes": 20 * MIB,
        "free_bytes": 10 * MIB,
        "reserved_bytes": 60 * MIB,
        "allocated_bytes": 50 * MIB,
        "capacity_bytes": 80 * MIB,
        "message": str(error),
    }
    assert (
        other_device["device"],
        other_device["allocated_bytes"],
        other_device["message"],
    ) == (
        "cuda:1",
        50 * MIB + 1,
        None,
    )
    assert (last["requested_bytes"], last["message"]) == (30 * MIB, None)
    assert recorder.values["flushed"]
    assert recorder.faults == []


def test_watch__records_each_of_several_errors_with_the_same_text(
    observed: tuple[FakeRecorder, OutOfMemoryWatch, SimpleNamespace],
) -> None:
    recorder, watch, _ = observed
    for _ in range(3):
        # The next one takes the address of this one, which is freed.
        error = RuntimeError(
            "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."
        )
        watch.see(error)
        watch.see(error)
        del error
    assert len(recorder.values["out_of_memory"]) == 3


def test_watch__takes_the_inventory_of_an_error_in_a_backward_when_that_has_raised(
    observed: tuple[FakeRecorder, OutOfMemoryWatch, SimpleNamespace],
) -> None:
    _, watch, _ = observed
    quiet, moments = [False], []

    def add(record: dict[str, Any]) -> bool:
        if quiet[0]:
            moments.append((record["t_ns"], record["phase"]))
        return quiet[0]

    watch._inventories.add_out_of_memory = add  # type: ignore[method-assign]
    watch.observe(0, 20 * MIB, 80 * MIB, 10 * MIB)
    quiet[0] = True
    error = torch.OutOfMemoryError("CUDA out of memory.")
    watch.see(error)
    watch.see(error)
    assert moments == [(watch._records[0]["t_ns"], "backward")]
    # In a quiet moment it is taken at once, and only once.
    watch.observe(0, 30 * MIB, 80 * MIB, 10 * MIB)
    assert len(moments) == 2
    watch.see(torch.OutOfMemoryError("CUDA out of memory."))
    assert len(moments) == 2

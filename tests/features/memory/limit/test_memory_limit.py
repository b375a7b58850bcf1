"""The limit of memory for a block of code, on the CPU with real tensors, and on CUDA
with snapshots made by hand."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from ebbtide.features.memory import limit as limits
from ebbtide.features.memory.limit import BEFORE, MemoryEvent, replay
from ebbtide.profiler import MemoryLimitExceeded, memory_limit

MB = 10**6


def hold(size: int) -> torch.Tensor:
    temporary = torch.ones(size // 2, dtype=torch.uint8)
    kept = torch.ones(size, dtype=torch.uint8)
    del temporary
    return kept


def exceeded(limit: str, size: int) -> MemoryLimitExceeded:
    with pytest.raises(MemoryLimitExceeded) as raised, memory_limit(limit, "cpu"):
        hold(size)
    return raised.value


def test_memory_limit__passes_below_and_lists_the_holders_above() -> None:
    with memory_limit("100GB", "cpu"):
        hold(30 * MB)
    error = exceeded("40MB", 30 * MB)
    assert isinstance(error, AssertionError)
    assert error.limit_bytes == 40 * MB
    # The temporary tensor counts at the peak; both are in `hold`.
    block_bytes = error.peak_bytes - dict(error.holders).get(BEFORE, 0)
    assert block_bytes == 45 * MB
    (first, first_bytes), (second, second_bytes) = [
        entry for entry in error.holders if entry[0] != BEFORE
    ]
    assert (first_bytes, second_bytes) == (30 * MB, 15 * MB)
    assert first.startswith("hold (")
    assert second.startswith("hold (")
    assert "above the limit of 38.15 MiB" in str(error)
    assert "28.61 MiB  hold (" in str(error)


def test_memory_limit__counts_tensors_from_before_as_long_as_they_live() -> None:
    model = torch.nn.Linear(1000, 5000)
    model(torch.ones(1, 1000)).sum().backward()
    gradients = 4 * (1000 * 5000 + 5000)
    with pytest.raises(MemoryLimitExceeded) as raised, memory_limit(1, "cpu"):
        pass
    before = raised.value.peak_bytes
    assert raised.value.holders == [(BEFORE, before)]

    @memory_limit(1, "cpu")
    def step() -> None:
        model.zero_grad()
        hold(10 * MB)

    with pytest.raises(MemoryLimitExceeded) as raised:
        step()
    # The gradients were released before as much was allocated.
    assert raised.value.peak_bytes == before
    assert before >= 2 * gradients


def test_memory_limit__is_a_decorator_and_passes_exceptions_on() -> None:
    @memory_limit("5MB", device="cpu")
    def step(size: int) -> None:
        hold(size)
        if size == 1:
            raise KeyError("of the step")

    for _ in range(2):
        with pytest.raises(MemoryLimitExceeded):
            step(50 * MB)
    with pytest.raises(KeyError):
        step(1)


def test_memory_limit_fixture__is_the_function(memory_limit: Any) -> None:
    with pytest.raises(MemoryLimitExceeded), memory_limit("1MB", "cpu"):
        hold(10 * MB)


@pytest.mark.parametrize(
    ("limit", "device"), [("much", "cpu"), (-1, "cpu"), ("1GB", "tpu")]
)
def test_memory_limit__refuses_what_is_no_size_or_device(
    limit: Any, device: str
) -> None:
    with (
        pytest.raises(ValueError, match=r"not a size|at least 0|not a device"),
        memory_limit(limit, device),
    ):
        pass


def test_pytest_plugin__loads_nothing_but_pytest() -> None:
    program = (
        "import sys, ebbtide.profiler.pytest_plugin; print(*sorted(m for m in "
        "sys.modules if '.' not in m))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"torch", "numpy", "pandas", "msgspec"} & set(run.stdout.split())


def test_replay__finds_the_first_largest_use() -> None:
    events = [
        MemoryEvent(1, 50, "a"),
        MemoryEvent(2, 30, "b"),
        MemoryEvent(1, -50),
        MemoryEvent(9, -5),
        MemoryEvent(1, 40, "c"),
        MemoryEvent(3, 10, "b"),
    ]
    assert replay(events).bytes == 80
    assert replay(events).holders == (("a", 50), ("b", 30))


def frames(name: str) -> list[dict[str, Any]]:
    inner = {"name": "empty", "filename": "/env/torch/_tensor.py", "line": 3}
    return [inner, {"name": name, "filename": "/job/train.py", "line": 7}]


def test_cuda_peak__lists_holders_of_the_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def event(
        action: str, address: int, size: int, name: str = "step"
    ) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": size, "frames": frames(name)}

    blocks = [
        {"state": "active_allocated", "size": 512, "requested_size": 500},
        {"state": "inactive", "size": 512},
        {"state": "active_allocated", "size": 1024, "requested_size": 900},
    ]
    snapshot = {
        "device_traces": [
            [],
            [
                event("free_requested", 9000, 4000),
                event("segment_alloc", 100, 2048),
                event("alloc", 1124, 900, "forward"),
                event("alloc", 5000, 700),
                event("free_requested", 5000, 700),
            ],
        ],
        "segments": [
            {"device": 1, "address": 100, "blocks": blocks},
            {"device": 0, "address": 0, "blocks": blocks},
        ],
    }
    calls: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", calls.append)
    monkeypatch.setattr(
        torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False
    )
    monkeypatch.setattr(
        memory,
        "_record_memory_history",
        lambda **options: calls.append(options["enabled"]),
    )
    monkeypatch.setattr(memory, "_snapshot", lambda: snapshot)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: 5120)
    with pytest.raises(MemoryLimitExceeded) as raised, memory_limit(5000, "cuda:1"):
        assert calls == [1, "all"]
    assert calls == [1, "all", None]
    assert raised.value.peak_bytes == 5120
    assert raised.value.holders == [(BEFORE, 4500)]
    assert limits._call_site(frames("f")) == "f (/job/train.py:7)"

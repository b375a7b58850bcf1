"""At which phase boundaries memory is read, and jobs that are recorded without
memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from ebbtide.profiler.agent.memory_reader import (
    ALLOCATED,
    RESERVED,
    MemoryReader,
    PhaseReadings,
)
from tests.conftest import Recorded
from tests.profiler.agent.jobs import PLAIN, PRELUDE, STEPS

STEP_PHASES = 3


def steps_read(step_ns: int, cost_ns: int, enabled: bool = True) -> list[int]:
    """Return the readings at the ends of each step's phases, if a reading takes
    `cost_ns`."""
    memory = MemoryReader(torch, enabled)
    memory.read_here = list  # type: ignore[method-assign]
    memory.cost_ns = cost_ns
    readings = PhaseReadings(memory)
    counts = []
    for start_ns in range(step_ns, 200 * step_ns, step_ns):
        readings.begin_step(start_ns)
        counts.append(0)
        for _ in range(STEP_PHASES):
            if readings.at_ends:
                readings.read(start_ns)
                counts[-1] += 1
    return counts


def test_phase_readings__read_every_step_where_that_takes_little_time() -> None:
    assert set(steps_read(step_ns=3_000_000, cost_ns=5_000)) == {STEP_PHASES}


def test_phase_readings__read_a_short_step_as_a_whole_or_not_at_all() -> None:
    counts = steps_read(step_ns=500_000, cost_ns=5_000)
    assert set(counts) == {0, STEP_PHASES}
    share = sum(counts) * 5_000 / (len(counts) * 500_000)
    assert 0.0045 < share <= 0.0055


def test_phase_readings__are_none_where_memory_is_not_recorded() -> None:
    assert set(steps_read(step_ns=3_000_000, cost_ns=10_000, enabled=False)) == {0}


def test_memory_reader__reads_the_device_of_the_last_phase_on_every_thread() -> None:
    current = threading.local()

    def stats(device: int) -> dict[str, dict[str, dict[str, int]]]:
        size = {"all": {"current": device << 30}}
        return {"allocated_bytes": size, "reserved_bytes": size}

    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: getattr(current, "device", 0),
    )
    memory = MemoryReader(
        SimpleNamespace(cuda=cuda, _C=SimpleNamespace(_cuda_memoryStats=stats))
    )
    readings = PhaseReadings(memory)
    with ThreadPoolExecutor(1) as pool:
        for device in (3, 2):
            current.device = device
            expected = [
                (pool_code, device, device << 30) for pool_code in (ALLOCATED, RESERVED)
            ]
            assert readings.read(0) == expected
            assert pool.submit(memory.read).result() == expected
        # An error in a thread has the figures of its own device.
        assert [reading[1] for reading in pool.submit(memory.read, 1).result()] == [
            1,
            1,
        ]


@pytest.mark.slow
def test_profile__records_phases_alone(record: Callable[..., Recorded]) -> None:
    recorded = record(PRELUDE + PLAIN, options=("--record", "phases"))
    assert recorded.run.returncode == 0, recorded.run.stderr
    assert len(recorded.phases()) == STEPS
    assert "heap" not in set(recorded.trace.memory(0)["pool"])
    assert recorded.trace.meta.options.memory is False

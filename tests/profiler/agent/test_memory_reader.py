"""At which phase boundaries memory is read, and jobs that are recorded without memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ebbtide.profiler.agent.memory_reader import MemoryReader, PhaseReadings
from tests.conftest import Recorded
from tests.profiler.agent.jobs import PLAIN, PRELUDE, STEPS

STEP_PHASES = 3


def steps_read(step_ns: int, cost_ns: int, enabled: bool = True) -> list[int]:
    """Return the readings at the ends of each step's phases, if a reading takes `cost_ns`."""
    memory = MemoryReader(torch, enabled)
    memory.read = list  # type: ignore[method-assign]
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
    assert set(steps_read(step_ns=3_000_000, cost_ns=10_000)) == {STEP_PHASES}


def test_phase_readings__read_a_short_step_as_a_whole_or_not_at_all() -> None:
    counts = steps_read(step_ns=500_000, cost_ns=10_000)
    assert set(counts) == {0, STEP_PHASES}
    share = sum(counts) * 10_000 / (len(counts) * 500_000)
    assert 0.009 < share <= 0.011


def test_phase_readings__are_none_where_memory_is_not_recorded() -> None:
    assert set(steps_read(step_ns=3_000_000, cost_ns=10_000, enabled=False)) == {0}


def test_profile__records_phases_alone(record: Callable[..., Recorded]) -> None:
    recorded = record(PRELUDE + PLAIN, options=("--record", "phases"))
    assert recorded.run.returncode == 0, recorded.run.stderr
    assert len(recorded.phases()) == STEPS
    assert "heap" not in set(recorded.trace.memory(0)["pool"])
    assert recorded.trace.meta.options.memory is False

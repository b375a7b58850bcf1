"""Windows of free memory by the records of the agent."""

from __future__ import annotations

from ebbtide.features.run.driver.phase_memory import PhaseMemory
from ebbtide.profiler.agent.memory_reader import HEAP
from ebbtide.profiler.agent.spool import HOST, MEMORY, PHASE, RECORD

FORWARD, BACKWARD, UPDATE = range(3)


def phase(code: int, start: int, end: int) -> bytes:
    return RECORD.pack(PHASE, code, 0, 1, 0, 0, 0, start, end, 0)


def reading(time: int, size: int, pool: int = HEAP) -> bytes:
    return RECORD.pack(MEMORY, pool, HOST, 0, 0, 0, 0, time, size, 0)


def memory_of(*records: bytes) -> PhaseMemory:
    """Return a memory that gets the records when it is asked."""
    memory = PhaseMemory(lambda: memory.add(b"".join(records)))
    return memory


# The first iteration, whose memory is not typical.
FIRST = (
    reading(5, 10_000),
    phase(FORWARD, 0, 10),
    phase(BACKWARD, 10, 20),
    reading(29, 10),
    phase(UPDATE, 20, 30),
)


def test_spare_memory_is_that_below_the_peak() -> None:
    memory = memory_of(
        *FIRST,
        reading(31, 100),
        reading(39, 700),
        phase(FORWARD, 31, 40),
        reading(45, 900),
        reading(49, 300),
        phase(BACKWARD, 40, 50),
        reading(55, 200),
        phase(UPDATE, 50, 60),
    )
    # The update begins with what the backward has left.
    assert memory.spare_bytes() == {"forward": 200, "backward": 0, "update": 600}


def test_largest_of_several_iterations_counts() -> None:
    later = [
        record
        for begin, size in ((100, 500), (200, 800))
        for record in (
            reading(begin + 1, size),
            phase(FORWARD, begin, begin + 10),
            reading(begin + 11, size + 50),
            phase(BACKWARD, begin + 10, begin + 20),
            reading(begin + 20, 10),
            phase(UPDATE, begin + 21, begin + 30),
        )
    ]
    assert memory_of(*FIRST, *later).spare_bytes() == {
        "forward": 50,
        "backward": 0,
        "update": 840,
    }


def test_nothing_is_spare_where_memory_is_not_read() -> None:
    phases = phase(FORWARD, 31, 40), phase(BACKWARD, 40, 50), phase(UPDATE, 50, 60)
    without = [FIRST[1], FIRST[2], FIRST[4]]
    assert memory_of(*without, *phases).spare_bytes() == {}
    assert memory_of(*FIRST).spare_bytes() == {}
    assert memory_of().spare_bytes() == {}


def test_records_end_with_the_first_question() -> None:
    memory = memory_of(*FIRST)
    spare = memory.spare_bytes()
    later = reading(31, 5), phase(FORWARD, 31, 40), phase(BACKWARD, 40, 50)
    memory.add(b"".join((*later, phase(UPDATE, 50, 60))))
    assert memory.spare_bytes() == spare
    assert not memory._data

"""The figures that a recorder keeps for its job: which iterations they are of, and when
they are known."""

from __future__ import annotations

from ebbtide.features.live.agent.iteration_figures import (
    IterationFigures,
    IterationTimes,
)
from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.iteration_rule import (
    BACKWARD,
    ENDED,
    FORWARD,
    OPEN,
    UPDATE,
)
from ebbtide.profiler.agent.spool import ON_DEVICE

STEP_NS = 100
# Phase -> start and end within a step.
TIMES = {FORWARD: (10, 30), BACKWARD: (30, 70), UPDATE: (80, 90)}
LATE_NS = 5
HEAP = (3, 0)


class Records:
    """Writes records to figures, as the spool does."""

    def __init__(self, figures: IterationFigures) -> None:
        self.figures = figures

    def put(
        self,
        kind: int,
        code: int = 0,
        small: int = 0,
        a: int = 0,
        x: int = 0,
        y: int = 0,
    ) -> None:
        """Write a record."""
        self.figures.add(kinds.RECORD.pack(kind, code, small, a, 0, 0, 0, x, y, 0))

    def add_memory(self, size: int, time_ns: int = 0) -> None:
        """Write a reading of the heap."""
        self.put(kinds.MEMORY, *HEAP, x=time_ns, y=size)

    def add_phase(
        self, phase: int, sequence: int, start_ns: int, end_ns: int, small: int = 0
    ) -> None:
        """Write a phase."""
        self.put(kinds.PHASE, phase, small, sequence, start_ns, end_ns)

    def add_step(
        self, number: int, on_device: bool = False, size: int | None = None
    ) -> None:
        """Write a step, and the end of its iteration; on a device it runs LATE_NS later
        than the host says. size: What is read at the ends of its phases."""
        for phase, (start_ns, end_ns) in TIMES.items():
            at_ns = number * STEP_NS
            if size is not None:
                self.add_memory(size, at_ns + end_ns)
            self.add_phase(
                phase,
                3 * number + phase,
                at_ns + start_ns,
                at_ns + end_ns,
                ON_DEVICE if on_device else 0,
            )
        self.put(kinds.ITERATION, a=number)

    def pass_on_device(self, number: int, *phases: int) -> None:
        """Write the device times of phases of a step."""
        for phase in phases:
            start_ns, end_ns = (number * STEP_NS + ns + LATE_NS for ns in TIMES[phase])
            self.put(kinds.GPU_TIMES, a=3 * number + phase, x=start_ns, y=end_ns)


def figures_and_records() -> tuple[IterationFigures, Records]:
    figures = IterationFigures()
    return figures, Records(figures)


def all_times(figures: IterationFigures) -> list[IterationTimes]:
    figures.read()
    return list(figures.times())


def test_times__begin_at_the_end_of_the_iteration_before() -> None:
    figures, records = figures_and_records()
    assert all_times(figures) == []
    records.add_step(0)
    records.add_step(1)
    assert [
        (t.number, t.start_ns, t.end_ns, t.phase_ns) for t in all_times(figures)
    ] == [
        (1, 90, 190, (20, 40, 10)),
        (0, 10, 90, (20, 40, 10)),
    ]


def test_times__begin_where_the_recording_of_iterations_does() -> None:
    figures, records = figures_and_records()
    records.put(kinds.START, x=3)
    records.add_step(0)
    assert [times.start_ns for times in all_times(figures)] == [3]


def test_times__are_those_of_the_device_once_it_has_passed_all_phases() -> None:
    figures, records = figures_and_records()
    for number in range(3):
        records.add_step(number, on_device=True)
    records.pass_on_device(0, FORWARD, BACKWARD, UPDATE)
    records.pass_on_device(1, FORWARD, BACKWARD, UPDATE)
    records.pass_on_device(2, FORWARD, BACKWARD)
    assert [(t.number, t.start_ns, t.end_ns) for t in all_times(figures)] == [
        (1, 95, 195),
        (0, 15, 95),
    ]
    records.pass_on_device(2, UPDATE)
    assert all_times(figures)[0][:3] == (2, 195, 295)


def test_times__leave_out_the_oldest_kept_iteration_whose_start_is_not_known() -> None:
    figures, records = figures_and_records()
    for number in range(200):
        records.add_step(number)
    times = all_times(figures)
    assert times[0].number == 199
    assert {t.end_ns - t.start_ns for t in times} == {STEP_NS}
    assert [t.number for t in times] == list(range(199, 199 - len(times), -1))


def test_times__are_right_after_more_records_than_are_kept() -> None:
    figures, records = figures_and_records()
    records.add_step(0)
    assert len(all_times(figures)) == 1
    for number in range(1, 5000):
        records.add_step(number)
    times = all_times(figures)
    assert times[0].number == 4999
    assert len(times) > 100
    assert {t.end_ns - t.start_ns for t in times} == {STEP_NS}
    assert {t.phase_ns for t in times} == {(20, 40, 10)}


def test_end_iteration__extends_the_last_one_by_a_second_optimizer() -> None:
    figures, records = figures_and_records()
    records.add_step(0)
    records.add_memory(50)
    records.add_step(1)
    records.add_memory(30, 198)
    records.add_phase(UPDATE, 99, 195, 198)
    records.put(kinds.ITERATION, a=1)
    assert all_times(figures)[0][:] == (1, 90, 198, (20, 40, 13))
    assert figures.peaks(1) == {HEAP: 50}


def test_peaks__start_with_the_value_that_stands_and_are_of_the_last_iteration_that_was_read() -> (
    None
):
    figures, records = figures_and_records()
    records.add_memory(70)
    records.add_step(0, size=60)
    records.add_step(1, size=20)
    records.add_step(2)
    figures.read()
    assert [figures.peaks(number) for number in range(3)] == [
        {HEAP: 70},
        {HEAP: 60},
        {HEAP: 60},
    ]


def test_times__do_not_count_iterations_before_an_optimizer_steps() -> None:
    figures, records = figures_and_records()
    for number in range(2):
        records.add_phase(FORWARD, 2 * number, 20 * number, 20 * number + 10)
        records.add_phase(BACKWARD, 2 * number + 1, 20 * number + 10, 20 * number + 20)
        records.put(kinds.ITERATION, ENDED if number else OPEN, a=number)
        assert all_times(figures) == []
    records.add_phase(UPDATE, 4, 40, 50)
    records.put(kinds.ITERATION, a=0)
    assert [(t.number, t.phase_ns) for t in all_times(figures)] == [(0, (20, 20, 10))]

"""The figures that a recorder keeps for its job: which iterations they are of, and when
they are known."""

from __future__ import annotations

from ebbtide.profiler.agent.gpu_clock import DeviceSpan, EventMark
from ebbtide.profiler.agent.iteration_figures import IterationFigures, PhaseRecord
from ebbtide.profiler.agent.iteration_rule import BACKWARD, FORWARD, UPDATE

STEP_NS = 100
# Phase -> start and end within a step.
TIMES = {FORWARD: (10, 30), BACKWARD: (30, 70), UPDATE: (80, 90)}
LATE_NS = 5
HEAP = (3, 0)


def add_step(
    figures: IterationFigures, number: int, device: int | None = None, read: bool = True
) -> None:
    """Add a step and end its iteration; on a device it runs LATE_NS later than the host
    says."""
    for phase, (start_ns, end_ns) in TIMES.items():
        mark = None if device is None else EventMark(device, object(), 0)
        record = PhaseRecord(
            phase,
            3 * number + phase,
            0,
            0,
            number * STEP_NS + start_ns,
            number * STEP_NS + end_ns,
            mark,
            mark,
        )
        figures.add_phase(record, read)
    figures.end_iteration(number)


def pass_on_device(figures: IterationFigures, number: int, *phases: int) -> None:
    for phase in phases:
        start_ns, end_ns = (number * STEP_NS + ns + LATE_NS for ns in TIMES[phase])
        figures.add_device_times(DeviceSpan(3 * number + phase, start_ns, end_ns))


def test_times__begin_at_the_end_of_the_iteration_before() -> None:
    figures = IterationFigures()
    assert list(figures.times()) == []
    add_step(figures, 0)
    add_step(figures, 1)
    assert [(t.number, t.start_ns, t.end_ns, t.phase_ns) for t in figures.times()] == [
        (1, 90, 190, (20, 40, 10)),
        (0, 10, 90, (20, 40, 10)),
    ]


def test_times__begin_where_the_recording_of_iterations_does() -> None:
    figures = IterationFigures()
    figures.begin(3)
    add_step(figures, 0)
    assert [times.start_ns for times in figures.times()] == [3]


def test_times__are_those_of_the_device_once_it_has_passed_all_phases() -> None:
    figures = IterationFigures()
    for number in range(3):
        add_step(figures, number, device=0)
    pass_on_device(figures, 0, FORWARD, BACKWARD, UPDATE)
    pass_on_device(figures, 1, FORWARD, BACKWARD, UPDATE)
    pass_on_device(figures, 2, FORWARD, BACKWARD)
    assert [(t.number, t.start_ns, t.end_ns) for t in figures.times()] == [
        (1, 95, 195),
        (0, 15, 95),
    ]
    pass_on_device(figures, 2, UPDATE)
    assert next(figures.times())[:3] == (2, 195, 295)


def test_times__leave_out_the_oldest_kept_iteration_whose_start_is_not_known() -> None:
    figures = IterationFigures()
    for number in range(200):
        add_step(figures, number)
    times = list(figures.times())
    assert times[0].number == 199
    assert {t.end_ns - t.start_ns for t in times} == {STEP_NS}
    assert [t.number for t in times] == list(range(199, 199 - len(times), -1))


def test_end_iteration__extends_the_last_one_by_a_second_optimizer() -> None:
    figures = IterationFigures()
    add_step(figures, 0)
    figures.add_memory([(*HEAP, 50)])
    add_step(figures, 1)
    figures.add_memory([(*HEAP, 30)])
    figures.add_phase(PhaseRecord(UPDATE, 99, 0, 0, 195, 198, None, None), True)
    figures.end_iteration(1)
    assert next(figures.times())[:] == (1, 90, 198, (20, 40, 13))
    assert figures.peaks(1) == {HEAP: 50}


def test_peaks__start_with_the_value_that_stands_and_are_of_the_last_iteration_that_was_read() -> (
    None
):
    figures = IterationFigures()
    figures.add_memory([(*HEAP, 70)])
    figures.add_memory([(*HEAP, 60)])
    add_step(figures, 0)
    figures.add_memory([(*HEAP, 20)])
    add_step(figures, 1)
    add_step(figures, 2, read=False)
    assert [figures.peaks(number) for number in range(3)] == [
        {HEAP: 70},
        {HEAP: 60},
        {HEAP: 60},
    ]

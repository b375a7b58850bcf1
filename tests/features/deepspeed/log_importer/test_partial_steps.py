"""Logs without timers of whole steps: phases from micro-steps; and Megatron's report of
memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.features.deepspeed.log_importer.made_logs import (
    import_log,
    iteration_lines,
    lengths_ms,
    log_line,
    micro_step_line,
    timer_text,
)

ACCUMULATION = (
    'json = {\n    "gradient_accumulation_steps": 2,\n    "zero_optimization": {\n     '
    '   "stage": 3\n    }\n}'
)
REPORT = (
    "[Rank 0] (after 1 iterations) memory (MB) | allocated: 18244.640625 | max "
    "allocated: 41299.50146484375 | "
    "reserved: 46764.0 | max reserved: 46764.0"
)


def accumulated_lines(update_ms: float = 40) -> list[str]:
    """Return four micro-steps of two steps, without timers of whole steps."""
    lines = []
    for number in range(4):
        updates = number % 2 == 1
        if updates:
            lines.append(
                log_line(
                    1 + number, f"[Rank 0] {timer_text(optimizer_step=update_ms - 5)}"
                )
            )
        lines.append(
            micro_step_line(
                1 + number, fwd=100, bwd=200, step=update_ms if updates else 0.05
            )
        )
    return lines


@pytest.mark.parametrize("config", [[], [ACCUMULATION]])
def test_steps_of_micro_steps__end_at_updates(
    tmp_path: Path, config: list[str]
) -> None:
    trace = import_log(tmp_path, [*config, *accumulated_lines()])
    expected = [
        (0, "forward", 100.0),
        (0, "backward", 200.0),
        (1, "forward", 100.0),
        (1, "backward", 200.0),
    ]
    assert lengths_ms(trace) == [
        (step, *row) for step in (0, 1) for row in [*expected, (1, "update", 40.0)]
    ]
    assert trace.ops(0)["name"].tolist() == ["optimizer_step"] * 2
    assert any("iterations are made of its micro-steps" in note for note in trace.notes)
    assert not any("turn on wall_clock_breakdown" in note for note in trace.notes)


def test_megatron_report__is_the_memory_of_a_log_without_marks(tmp_path: Path) -> None:
    trace = import_log(tmp_path, [*iteration_lines(1), REPORT, *iteration_lines(2)])
    memory = trace.memory(0)
    assert dict(zip(memory["pool"], memory["bytes"], strict=True)) == {
        "allocated": round(41299.50146484375 * 2**20),
        "reserved": 46764 * 2**20,
    }
    assert memory["t_ns"].unique().tolist() == [trace.phases(0)["start_ns"].min()]
    assert any("Megatron" in note for note in trace.notes)
    assert not any("turn on memory_breakdown" in note for note in trace.notes)

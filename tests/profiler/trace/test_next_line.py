"""The last lines of commands: what a trace has, and the command to go on with."""

from __future__ import annotations

import pytest

from ebbtide.profiler.trace import RankBuilder, TraceBuilder
from ebbtide.profiler.trace.trace import closing_lines, next_line

IDLE = "next: ebbtide profile -- CMD (a job that trains: no iteration was seen)"


def idle(builder: TraceBuilder) -> RankBuilder:
    """Record a job that ran a model and did not train it, on a host without a GPU."""
    return builder.rank().phase("forward", 0, 10**6).memory(0, 2**20, "heap", "cpu")


def test_closing_lines__name_what_records_training_where_there_is_none() -> None:
    builder = TraceBuilder("recorded")
    idle(builder)
    assert closing_lines(builder.build()) == [
        "trace: built.ebb, 0 iterations on 1 rank",
        "recorded: phases, memory",
        IDLE,
    ]
    assert closing_lines(TraceBuilder("recorded").build())[1:] == [
        "recorded: nothing",
        IDLE,
    ]
    # A source whose feature is not installed, or that no command makes.
    assert closing_lines(TraceBuilder("simulated").build())[-1] == IDLE


@pytest.mark.parametrize("has", ["iteration", "device", "gpu"])
def test_next_line__is_the_next_command_of_a_trace_with_something_to_explain(
    has: str,
) -> None:
    builder = TraceBuilder("recorded")
    rank = idle(builder)
    if has == "iteration":
        rank.phase("backward", 10**6, 2 * 10**6, 0)
    elif has == "device":
        rank.memory(0, 2**30, "device", "cuda:0")
    else:
        rank.gpu(0, power_w=100.0)
    trace = builder.build()
    assert next_line(trace, "findings {}") == f"next: ebbtide findings {trace.path}"

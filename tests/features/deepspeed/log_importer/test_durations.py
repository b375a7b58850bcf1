"""Timers of a log, in the formats of several versions and launchers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.phases import PHASES
from tests.conftest import FUZZ, slow_case
from tests.features.deepspeed.log_importer.made_logs import (
    PLAIN,
    import_log,
    iteration_lines,
    lengths_ms,
    log_line,
    mark_lines,
    micro_step_line,
    stamp_ns,
    step_lines,
    timer_text,
)

OLD = {"fwd": "forward", "bwd": "backward"}


def old(text: str) -> str:
    """Return a line as before DeepSpeed 0.10: with other names, and with the rank
    twice."""
    for new, name in OLD.items():
        text = re.sub(rf"\b{new}", name, text)
    return text.replace("[Rank 0] ", "[Rank 0] rank=0 ")


def colored(text: str) -> str:
    return text.replace("[INFO]", "\x1b[32m[INFO]\x1b[0m").replace(
        "time", "\x1b[1;33mtime\x1b[0m"
    )


@pytest.mark.parametrize(
    "dialect",
    [
        old,
        colored,
        slow_case(lambda text: f"worker-1: {text}"),
        slow_case(lambda text: f"[default0]:{text}"),
        slow_case(lambda text: f"[rank0]:{text}"),
        slow_case(lambda text: f"{text}\r"),
        lambda text: (
            "  3%|#  | 12/345 [00:07<06:50,  1.23s/it]\r  4%|#  | 13/345 "
            f"[00:07<06:50,  1.23s/it]{text}"
        ),
        lambda text: f"{text}[2024-04-15 10:00:00,000] [INFO] [rank 1 breaks in",
        slow_case(lambda text: f"2024-04-15T10:00:00.5 \n{text}"),
        slow_case(lambda text: text.replace("[Rank 0] ", "")),
        slow_case(lambda text: f"{text}\n[Rank 1] {timer_text(fwd=1, bwd=1, step=1)}"),
        slow_case(
            lambda text: (
                f"{text}\n time (ms) | forward-backward: 7.00 | optimizer: 8.00 | "
                "batch-generator: 9.00"
            )
        ),
        slow_case(
            lambda text: (
                f"{text}\ncomm op: all_reduce | time (ms): 12.00 | msg size: 4 KB | "
                "algbw (Gbps): 1.00"
            )
        ),
        slow_case(
            lambda text: (
                f"{text}\n[Rank 0] time (ms) | fwd: 9.00 (fwd_moe: 1.00, 1st_a2a: "
                "0.00, top_k: 0.00)"
            )
        ),
        slow_case(
            lambda text: (
                f"{text}\n iteration 2/ 10 | elapsed time per iteration (ms): 7570.1 | "
                "lm loss: 1.18E+01 |"
            )
        ),
    ],
)
def test_timer_reader__reads_the_same_times_from_other_formats(
    tmp_path: Path, dialect: Callable[[str], str]
) -> None:
    lines = [*mark_lines(0.1, "forward"), *step_lines()]
    first = import_log(tmp_path, lines)
    other = import_log(tmp_path, [dialect(text) for text in lines])
    pd.testing.assert_frame_equal(first.phases(0), other.phases(0))
    assert lengths_ms(other) == PLAIN
    pd.testing.assert_frame_equal(first.memory(0), other.memory(0))
    assert len(other.memory(0))
    assert not {"fwd", "forward", "fwd_microstep"} & set(other.ops(0)["name"])


def test_timer_reader__a_cut_log_loses_only_its_last_step(tmp_path: Path) -> None:
    text = "\n".join(step_lines())
    last_timer = text.rindex("| step: ")
    # Wherever it is cut within the last line, no shortened figure is taken for a whole
    # one.
    for cut in range(last_timer - 40, len(text), 3 if FUZZ <= 1 else 1):
        assert lengths_ms(import_log(tmp_path, text[:cut].encode())) == PLAIN[:12]
    assert lengths_ms(import_log(tmp_path, text.encode())) == PLAIN


def test_time_phases__micro_steps_add_up_to_the_step(tmp_path: Path) -> None:
    lines = []
    for number in range(5):
        start = 10.0 * number
        lines += [
            micro_step_line(start + 1, 100, 200),
            micro_step_line(start + 2, 101, 202),
            micro_step_line(start + 3, 102, 204, 50),
        ]
        lines += [log_line(start + 3, timer_text(fwd=303.02, bwd=606.01, step=50.1))]
    trace = import_log(tmp_path, lines)
    rows = lengths_ms(trace)
    assert [row[:3] for row in rows[:7]] == [
        *((0, number, phase) for number in range(3) for phase in PHASES[:2]),
        (0, 2, "update"),
    ]
    by_phase = {
        phase: summary
        for summary in summarize(trace).phases
        for phase in [summary.phase]
    }
    assert by_phase["forward"].median_ms == pytest.approx(303.02, abs=1e-6)
    assert by_phase["backward"].median_ms == pytest.approx(606.01, abs=1e-6)
    assert by_phase["update"].median_ms == pytest.approx(50.1, abs=1e-6)
    assert by_phase["forward"].count == 15
    ends = trace.phases(0)["end_ns"].to_numpy()
    assert [ends[1], ends[3]] == [stamp_ns(log_line(1, "")), stamp_ns(log_line(2, ""))]


def test_timer_reader__a_skipped_step_is_an_iteration(tmp_path: Path) -> None:
    skip = log_line(
        3.5,
        "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 4096, "
        "reducing to 4096",
    )
    trace = import_log(
        tmp_path,
        [*step_lines(3), skip, *iteration_lines(4.0, step=0.21), *iteration_lines(5.0)],
    )
    assert [row[3] for row in lengths_ms(trace) if row[2] == "update"] == [
        50.0,
        50.0,
        50.0,
        0.21,
        50.0,
    ]


def test_timer_reader__a_resumed_run_continues_the_iterations(tmp_path: Path) -> None:
    broken_off = [micro_step_line(11, 500, 900), micro_step_line(12, 500, 900)]
    again = [
        micro_step_line(101, 50, 100),
        log_line(101, timer_text(fwd=100, bwd=200, step=50)),
    ]
    trace = import_log(
        tmp_path,
        [
            *step_lines(2),
            *broken_off,
            micro_step_line(100, 50, 100),
            *again,
            *step_lines(1),
        ],
    )
    rows = lengths_ms(trace)
    # The micro-steps of the step that never came to its end are of no iteration.
    assert [row for row in rows if row[0] == 2] == [
        (2, 0, "forward", 50.0), (2, 0, "backward", 100.0), (2, 1, "forward", 50.0), (2, 1, "backward", 100.0),
        (2, 1, "update", 50.0),
    ]  # fmt: skip
    assert summarize(trace).iterations == 4
    # The times of the second run start again, but no phase begins before the previous
    # phase has ended.
    assert (
        np.diff(trace.phases(0)[["start_ns", "end_ns"]].to_numpy().ravel()) >= 0
    ).all()

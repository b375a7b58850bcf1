"""Steps that overflow skipped: lines of DeepSpeed and apex, and their times."""

from __future__ import annotations

import pytest

from ebbtide.features.explain.readers.overflows import Overflows
from ebbtide.features.explain.readers.step_logs import StepLog
from ebbtide.features.explain.record import read_records
from tests.features.explain.asked import answers_to, text_of

SKIP = (
    "[2025-02-03 10:00:0{}] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] "
    "OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {}, reducing to {}"
)
APEX = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {}"


@pytest.mark.parametrize(
    ("lines", "count", "scale"),
    [
        ([SKIP.format(1, 65536, 32768), SKIP.format(2, 32768, 16384)], 2, 16384),
        ([APEX.format("32768.0")], 1, 32768),
        ([SKIP.format(1, 1, 1), "step 4 loss 2.0"], 1, 1),
    ],
)
def test_overflows__are_counted_with_the_last_scale(
    lines: list[str], count: int, scale: float
) -> None:
    records = read_records(text_of("\n".join(lines)))
    (overflows,) = [one for one in records if isinstance(one, Overflows)]
    assert (overflows.count, overflows.last_scale) == (count, scale)
    advice = answers_to("\n".join(lines))["skipped-steps"].advice or ""
    assert ("cannot fall" in advice) == (scale == 1)


@pytest.mark.parametrize(
    "content",
    ["loss scale: 65536", "step 3: no overflow, loss=2.0", "stack overflow in parser"],
)
def test_overflows__are_none_in_other_lines(content: str) -> None:
    assert "skipped-steps" not in answers_to(content)


def test_times_of_skipped_steps__are_left_out() -> None:
    bars = [
        f"  {n}%|#         | {n}/90 [00:{2 * n:02d}<09:09,  {rate:.2f}s/it]"
        for n, rate in enumerate((2.0, 2.0, 9.0, 9.0, 9.0), 1)
    ]
    lines = [bars[0] + SKIP.format(1, 8, 4), bars[1], *bars[2:]]
    (log,) = [
        one
        for one in read_records(text_of("\n".join(lines)))
        if isinstance(one, StepLog)
    ]
    assert log.rank is None
    assert list(log.values("step_s")) == [2, 9, 9, 9]


def test_iterations_that_megatron_skipped__have_no_time() -> None:
    line = (
        " iteration {0}/ 90 | elapsed time per iteration (ms): {1}.0 | "
        "number of skipped iterations: {2} |"
    )
    lines = [line.format(n, 1000 * (n + 1), n == 2) for n in range(1, 5)]
    content = "\n".join(lines).replace("True", "1").replace("False", "0")
    (log,) = [one for one in read_records(text_of(content)) if isinstance(one, StepLog)]
    assert list(log.values("step_s")) == [2, 4, 5]

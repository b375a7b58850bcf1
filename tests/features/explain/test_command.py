"""`ebbtide explain`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import ebbtide_in_process
from tests.features.explain.test_out_of_memory import TORCH_2

TITAN = (
    "[rank0]:[titan] 2026-03-02 11:20:{second},000 - root - INFO - step:  {step}  loss: "
    " 9.5  grad_norm: 26.5  memory: 60.50GiB(75.6%)  tps: 7,402  tflops: 232.9  mfu: "
    "10.35%"
)


def test_explain__answers_a_mixed_text_with_places(tmp_path: Path) -> None:
    steps = [TITAN.format(second=10 + 2 * step, step=step) for step in range(4)]
    file = tmp_path / "issue.md"
    file.write_text("\n".join(["Why?", "```", *steps, TORCH_2, "```"]))
    done = ebbtide_in_process("explain", str(file), "--json")
    result = json.loads(done.stdout)
    kinds = {record["kind"]: record for record in result["records"]}
    assert set(kinds) == {"StepLog", "OutOfMemoryMessage"}
    assert kinds["OutOfMemoryMessage"]["place"]["first_line"] == 7
    times = {answer["rule"]: answer["title"] for answer in result["answers"]}
    assert times["step-time"] == "a step takes 2.00 s (median)"
    shown = ebbtide_in_process("explain", str(file))
    assert shown.returncode == 0
    assert len(shown.stdout.splitlines()) <= 24


@pytest.mark.parametrize("content", ["Dear all, it does not work.\n", "", "\n\n"])
def test_explain__refuses_a_text_that_holds_nothing(
    content: str, tmp_path: Path
) -> None:
    file = tmp_path / "letter.txt"
    file.write_text(content)
    done = ebbtide_in_process("explain", str(file))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1

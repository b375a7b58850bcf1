"""Logs and traces among the texts, which are imported."""

from __future__ import annotations

import json
from pathlib import Path

from ebbtide.profiler.trace import open_trace
from tests.conftest import ebbtide_in_process

TIMERS = (
    "[Rank 0] time (ms) | fwd: {forward:.2f} | bwd: 860.11 | bwd_inner: 803.02 | "
    "bwd_allreduce: 57.01 | step: {step:.2f}\n"
)


def quoted(log: str) -> str:
    return "".join(f"> {line}\n" for line in log.splitlines())


def test_log_in_a_mail__is_imported_and_kept_where_asked(tmp_path: Path) -> None:
    log = "".join(
        TIMERS.format(forward=371.2 + step, step=22_840.3) for step in range(5)
    )
    text, kept = tmp_path / "mail.txt", tmp_path / "run.ebb"
    text.write_text(f"Why is it slow?\n\n{quoted(log)}")
    done = ebbtide_in_process("explain", str(text), "-o", str(kept), "--json")
    result = json.loads(done.stdout)
    (trace,) = (
        record for record in result["records"] if record["kind"] == "ImportedTrace"
    )
    assert trace["figures"]["format"] == "deepspeed-log"
    assert trace["figures"]["iterations"] == 5
    assert open_trace(kept).phases(0)["iteration"].nunique() == 5
    rules = [answer["rule"] for answer in result["answers"]]
    assert rules.count("update-bound") == 1


def test_text_that_holds_no_log__keeps_nothing(tmp_path: Path) -> None:
    text, kept = tmp_path / "text.txt", tmp_path / "run.ebb"
    text.write_text("step 1: my_loss=0.5 step_time=0.25\n")
    done = ebbtide_in_process("explain", str(text), "-o", str(kept), "--json")
    kinds = {record["kind"] for record in json.loads(done.stdout)["records"]}
    assert kinds == {"StepLog"}
    assert not kept.exists()


def test_import__names_explain_where_it_refuses(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    done = ebbtide_in_process("import", str(text), "-o", str(tmp_path / "run.ebb"))
    assert done.returncode == 2
    assert "ebbtide explain" in done.stderr


def test_trace__says_how_an_iteration_divides(tmp_path: Path) -> None:
    text = tmp_path / "train.log"
    text.write_text(
        "[Rank 0] rank=0 time (ms) | fwd_microstep: 330.00 | bwd_microstep: 660.00 | "
        "bwd_inner_microstep: 550.00 | bwd_allreduce_microstep: 50.00 | "
        "step_microstep: 110.00\n" * 5
    )
    done = ebbtide_in_process("explain", str(text), "--json")
    answers = {one["rule"]: one for one in json.loads(done.stdout)["answers"]}
    title = answers["iteration-time"]["title"]
    assert title == "phases of an iteration take 1.10 s (median)"
    assert "forward 30%" in answers["iteration-time"]["evidence"][0]

"""`ebbtide profile` on the example, end to end."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import ebbtide, ebbtide_in_process, slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SMALL = ("--layers", "1", "--width", "32", "--context", "32", "--batch", "2")


@pytest.mark.slow
def test_profile__records_the_example_for_summary_and_plot(tmp_path: Path) -> None:
    trace = tmp_path / "run.ebb"
    profiled = ebbtide(
        "profile", "-o", trace, "--", sys.executable, EXAMPLE, *SMALL, "--steps", "6", "--accumulate", "2"
    )
    assert profiled.returncode == 0, profiled.stderr
    assert len(re.findall(r"^step ", profiled.stdout, re.MULTILINE)) == 6
    assert f"trace: {trace}" in profiled.stderr

    summary = json.loads(ebbtide_in_process("summary", trace, "--json").stdout)
    assert summary["iterations"] == 6
    assert summary["warmup_iterations"] == 2
    counts = {phase["phase"]: phase["count"] for phase in summary["phases"]}
    assert counts == {"forward": 12, "backward": 12, "update": 6, "other": 6}
    assert summary["memory"]["pool"] == "heap"
    assert summary["memory"]["peak_bytes"] > 0
    assert summary["transfers"]["h2d"] == {"count": None, "bytes": None, "busy_ms": None}

    picture = tmp_path / "memory.png"
    assert ebbtide_in_process("plot", trace, "--iterations", "2:4", "-o", picture).returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("placeholder", slow(["{hostt}", "{rank}", "{}"], but=["{hostt}"]))
def test_profile__refuses_an_unknown_placeholder_before_the_job_starts(placeholder: str, tmp_path: Path) -> None:
    run = ebbtide("profile", "-o", f"run-{placeholder}.ebb", "--", "touch", "started", cwd=tmp_path)
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert f"unknown placeholder {placeholder} in -o run-{placeholder}.ebb; known: {{host}}" in line
    assert list(tmp_path.iterdir()) == []

"""The modules that reading a trace loads."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.conftest import run_process

TRACE = Path(__file__).parents[3] / "traces" / "h100-20b-blocking.ebb"
PROGRAM = f"""
import sys, ebbtide
trace = ebbtide.open_trace({str(TRACE)!r})
assert len(trace.phases(0))
print(*[name for name in sys.modules if name.partition(".")[0] == "ebbtide"])
"""


def test_open_trace__loads_the_format_alone(tmp_path: Path) -> None:
    run = run_process([sys.executable, "-c", PROGRAM], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    loaded = run.stdout.split()
    assert len(loaded) <= 16, loaded
    recorders = tuple(
        f"ebbtide.profiler.{part}"
        for part in ("agent", "sampler", "recording", "importers")
    )
    assert not [name for name in loaded if name.startswith(recorders)]

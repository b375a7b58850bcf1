"""`ebbtide summary` of traces with and without the state of the GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ebbtide.profiler.trace import TraceBuilder
from tests.conftest import run_process

MS = 10**6


def trained(path: Path, with_state: bool) -> Path:
    builder = TraceBuilder("recorded")
    rank = builder.rank(
        0, devices=[{"device": "cuda:0", "kind": "cuda"}], first_iteration_start_ns=0
    )
    rank.phase("forward", 0, 100 * MS, 0).phase("update", 100 * MS, 300 * MS, 0)
    if with_state:
        rank.kernel(MS, 2 * MS, name="gemm", launch_ns=0, stream=7)
        rank.gpu(0, utilization_percent=40, power_w=310.4, sm_clock_mhz=1980)
        rank.gpu(200 * MS, utilization_percent=96, power_w=698.5)
    return builder.write(path).path


@pytest.mark.parametrize(
    ("options", "words"),
    [(["-v"], "utilization"), (["--by", "activity"], "Kernels with most time")],
)
def test_summary__loads_no_pandas_which_would_take_half_of_its_time(
    tmp_path: Path, options: list[str], words: str
) -> None:
    script = (
        "import sys; from ebbtide.cli import run; run(sys.argv[1:]); print('pandas' in "
        "sys.modules, file=sys.stderr)"
    )
    run = run_process(
        [
            sys.executable,
            "-c",
            script,
            "summary",
            trained(tmp_path / "t.ebb", with_state=True),
            *options,
        ]
    )
    assert (run.returncode, run.stderr.strip()) == (0, "False")
    assert words in run.stdout

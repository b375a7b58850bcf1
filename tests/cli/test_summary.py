"""`ebbtide summary` of traces with and without the state of the GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ebbtide.profiler.trace import TraceBuilder
from tests.conftest import ebbtide_in_process, run_process

MS = 10**6


def trained(path: Path, with_state: bool) -> Path:
    builder = TraceBuilder("recorded")
    rank = builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}], first_iteration_start_ns=0)
    rank.phase("forward", 0, 100 * MS, 0).phase("update", 100 * MS, 300 * MS, 0)
    if with_state:
        rank.kernel(MS, 2 * MS, name="gemm", launch_ns=0, stream=7)
        rank.gpu(0, utilization_percent=40, power_w=310.4, sm_clock_mhz=1980)
        rank.gpu(200 * MS, utilization_percent=96, power_w=698.5)
    return builder.write(path).path


def words_of(line: str) -> str:
    return " ".join(line.split())


def test_summary__prints_smallest_mean_and_largest_value_per_phase(tmp_path: Path) -> None:
    run = ebbtide_in_process("summary", trained(tmp_path / "t.ebb", with_state=True), "-v")
    lines = [words_of(line) for line in run.stdout.splitlines()]
    start = lines.index("The GPU in each phase")
    assert lines[start + 1] == "quantity phase smallest mean largest"
    assert lines[start + 2 : start + 8] == [
        "utilization (%) forward 40 40 40",
        "utilization (%) update 40 68 96",
        "power (W) forward 310 310 310",
        "power (W) update 310 504 698",
        "SM clock (MHz) forward 1,980 1,980 1,980",
        "SM clock (MHz) update 1,980 1,980 1,980",
    ]
    assert any("NVML's own mean over 1/6 to 1 s" in line for line in lines)
    assert "temperature" not in run.stdout
    assert max(len(line) for line in run.stdout.splitlines() if not line.endswith(".")) <= 140


@pytest.mark.parametrize(
    ("options", "words"), [(["-v"], "utilization"), (["--by", "activity"], "Kernels with most time")]
)
def test_summary__loads_no_pandas_which_would_take_half_of_its_time(
    tmp_path: Path, options: list[str], words: str
) -> None:
    script = (
        "import sys; from ebbtide.cli import run; run(sys.argv[1:]); print('pandas' in sys.modules, file=sys.stderr)"
    )
    run = run_process([sys.executable, "-c", script, "summary", trained(tmp_path / "t.ebb", with_state=True), *options])
    assert (run.returncode, run.stderr.strip()) == (0, "False")
    assert words in run.stdout

"""Logs to which several runs were appended, and ranks that write to one stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.analysis.metrics.iterations import slowest_times
from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.source import SourceError
from tests.conftest import ebbtide_in_process

MEMORY = "MA 3.5 GB         Max_MA 3.58 GB         CA 3.83 GB         Max_CA 4 GB\n"


def megatron_line(number: int, ms: float, total: int = 4) -> str:
    return (
        f" iteration {number:8d}/{total:8d} | consumed samples: 16 | "
        f"elapsed time per iteration (ms): {ms:.1f} | lm loss: 1.2E+01 |\n"
    )


def megatron_run(ms: float, numbers: range = range(1, 5)) -> str:
    return "".join(megatron_line(number, ms) for number in numbers)


def deepspeed_run(forward_ms: float, steps: int = 4) -> str:
    return "".join(
        f"[Rank 0] step={step}, skipped=0, lr=[0.1]\n"
        f"[2026-03-16 10:00:{step:02d},000] [INFO] [Rank 0] time (ms) | "
        f"fwd: {forward_ms:.2f} | bwd: 20.00 | step: 5.00\n"
        for step in range(1, steps + 1)
    )


def iteration_ms(log: str, folder: Path, **options: int | str) -> list[float]:
    file = folder / "job.log"
    file.write_text(log)
    trace = import_trace([file], folder / "t.ebb", force=True, **options)
    return list(slowest_times(trace).columns["iteration"])


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (megatron_run(10) + megatron_run(20), 20),
        # The last one did not reach its last iteration.
        (megatron_run(10) + megatron_run(20, range(1, 3)), 10),
        # One that went on from a checkpoint.
        (
            megatron_run(10) + "using world size: 1\n" + megatron_run(20, range(5, 9)),
            20,
        ),
        (megatron_run(10) + megatron_run(20, range(3, 5)), 20),
        (megatron_run(10) + "using world size: 1\n", 10),
    ],
)
def test_import__takes_the_last_complete_run(
    tmp_path: Path, log: str, expected: int
) -> None:
    assert set(iteration_ms(log, tmp_path)) == {expected}


def test_import__chooses_runs_by_number_and_names_the_others(tmp_path: Path) -> None:
    log = megatron_run(10) + megatron_run(20) + megatron_run(30)
    assert set(iteration_ms(log, tmp_path, run=2)) == {20}
    assert iteration_ms(log, tmp_path, run="all") == [10] * 2 + [20] * 4 + [30] * 4
    with pytest.raises(SourceError, match=r"3 runs: there is no run 4"):
        iteration_ms(log, tmp_path, run=4)
    out = ["-o", tmp_path / "u.ebb"]
    run = ebbtide_in_process("import", tmp_path / "job.log", "--run", "1", *out)
    assert run.returncode == 0
    named = "3 runs: run 1 (lines 1 to 4), run 2 (lines 5 to 8), run 3 (lines 9 to 12)"
    assert named in run.stderr
    assert "is no run" in ebbtide_in_process("import", "x", "--run", "0", *out).stderr


@pytest.mark.parametrize("start", ["", "DeepSpeed info: version=0.19.8, git-hash=1\n"])
def test_import__tells_runs_of_deepspeed_apart(tmp_path: Path, start: str) -> None:
    file = tmp_path / "job.log"
    file.write_text(deepspeed_run(10) + start + deepspeed_run(30))
    phases = import_trace([file], tmp_path / "t.ebb").phases(0)
    forwards = phases[phases["phase"] == "forward"]
    assert (forwards["end_ns"] - forwards["start_ns"]).tolist() == [30_000_000] * 4


def test_import__reads_memory_of_the_start_as_no_timers_of_deepspeed(
    tmp_path: Path,
) -> None:
    log = "Before Building Model\n" + MEMORY + megatron_run(10)
    assert set(iteration_ms(log, tmp_path)) == {10}


@pytest.mark.parametrize("label", ["[default{}]:", "[rank{}]: ", "{}: ", ""])
def test_import__tells_ranks_on_one_stream_apart(tmp_path: Path, label: str) -> None:
    log = "".join(
        label.format(rank) + megatron_line(number, 10 if rank else 20)
        for number in range(1, 5)
        for rank in (1, 0)
    )
    assert iteration_ms(log, tmp_path) == [10] * 4


def test_import__refuses_runs_of_files_that_have_none(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("timestamp,index,memory.used\n1713142360000000000,0,5\n")
    with pytest.raises(SourceError, match="none of the files"):
        import_trace([file], tmp_path / "t.ebb", run=1)

"""`ebbtide dry-run`: the trace of an unmodified script, its exit statuses, and the
commands that read the trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli import run as run_command
from ebbtide.features.dryrun import child
from ebbtide.features.dryrun.errors import DryRunError
from ebbtide.features.dryrun.launch import split_command
from ebbtide.features.dryrun.result import print_dry_run
from ebbtide.features.dryrun.torch_2_13 import backend
from ebbtide.profiler.trace import TraceBuilder, open_trace
from tests.features.dryrun.forked import run_forked

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_gpt.py"
SIZES = ["--layers", "2", "--width", "64", "--context", "64"]
assert backend  # imported here, so that forked processes have it


def dry_run(
    output: Path, *job: str, capacity_bytes: int | None = None
) -> tuple[int, str]:
    """Run the process of a dry run in a fork. Returns its exit status and what it wrote
    to stderr."""
    settings = {
        "iterations": 2,
        "capacity_bytes": capacity_bytes,
        "device_name": "dry run",
        "machine": None,
        "force": False,
        "prints": True,
    }
    log = output.with_suffix(".log")

    def start() -> int:
        with open(log, "w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 2)
            sys.stderr = file
            return child.main([str(output), json.dumps(settings), *job])

    return run_forked(start), log.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of the example, with two micro-steps per iteration, on a device of 1
    GB."""
    path = tmp_path_factory.mktemp("dry") / "run.ebb"
    status, log = dry_run(
        path, str(EXAMPLE), *SIZES, "--accumulate", "2", capacity_bytes=10**9
    )
    assert status == 0, log
    assert f"next: ebbtide plan {path}" in log
    return path


def test_dry_run__ends_with_a_screen_that_says_whether_the_job_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    for capacity, code, verdict in (
        (
            2**20,
            0,
            "memory  fits: 0.59 of 1.00 MiB reserved at the peak, 0.40 to spare "
            "beside the CUDA context",
        ),
        (
            2**19,
            0,
            "memory  does not fit: 600.00 of 512.00 KiB reserved at the peak, 97.77 "
            "too much",
        ),
        (
            630_000,
            0,
            "memory  fits barely: 600.00 of 615.23 KiB reserved at the peak, 5.47 to "
            "spare",
        ),
        (
            2**19,
            130,
            "memory  incomplete, the job ended with status 130: 600.00 of 512.00 KiB "
            "reserved so far",
        ),
    ):
        prediction = {"context_bytes": 10_000, "reserved_bytes": [512_000, 614_400]}
        builder = TraceBuilder("predicted", exit={"code": code}, prediction=prediction)
        rank = builder.rank(
            0,
            devices=[{"device": "cuda:0", "kind": "cuda", "capacity_bytes": capacity}],
        )
        rank.memory(0, 614_400, "reserved")
        rank.memory(0, 600_000, "requested")
        builder.write(Path("run.ebb"), True)
        assert print_dry_run(Path("run.ebb")) == (capacity > 614_400)
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "run.ebb: predicted by a dry run, not measured"
        assert verdict in " ".join(map(str.strip, lines))
        assert (
            "500.00 to 600.00 KiB reserved, by what cuDNN takes for convolutions"
            in " ".join(map(str.strip, lines))
        )
        assert "time    not known: no optimizer stepped" in lines
        assert lines[-1] == "next: ebbtide plan run.ebb"
        assert max(map(len, lines)) <= 80


def test_dry_run__names_varying_batches_and_limits_of_the_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    host = {"all": [3 * 2**30, 2.0**31], "pinned": [2**30, None]}
    prediction = {
        "reserved_bytes": [2**20, 2**21],
        "batches": [[4, 121], [4, 512]],
        "host_bytes": host,
    }
    builder = TraceBuilder("predicted", prediction=prediction)
    builder.rank(
        0, devices=[{"device": "cuda:0", "kind": "cuda", "capacity_bytes": 2**22}]
    ).memory(0, 2**21, "reserved")
    builder.write(Path("run.ebb"))
    print_dry_run(Path("run.ebb"))
    text = " ".join(capsys.readouterr().err.split())
    assert "1.00 to 2.00 MiB reserved, by batches of 4 x 121 to 4 x 512" in text
    assert "host does not fit: 3.00 GiB of 2.00 GiB for this rank" in text
    assert "pinned" not in text


def test_dry_run__says_what_to_do_where_no_tensor_is_on_the_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    builder = TraceBuilder("predicted", prediction={})
    builder.rank(
        0, devices=[{"device": "cuda:0", "kind": "cuda", "capacity_bytes": 2**30}]
    )
    builder.write(Path("run.ebb"))
    assert print_dry_run(Path("run.ebb"))
    text = " ".join(capsys.readouterr().err.split())
    assert 'the job has no tensor on the GPU; move model and batches to "cuda"' in text
    assert "next:" not in text


def test_dry_run__writes_a_predicted_trace(trace: Path) -> None:
    run = open_trace(trace)
    assert (run.meta.source, run.meta.warmup_iterations, run.meta.exit.code) == (
        "predicted",
        1,
        0,
    )
    phases = run.phases(0)
    assert phases["iteration"].tolist() == [0] * 5 + [1] * 5
    assert phases["micro_step"].tolist() == [0, 0, 1, 1, 1] * 2
    memory = run.memory(0)
    peaks = memory.groupby("pool", observed=True)["bytes"].max()
    assert peaks["requested"] < peaks["allocated"] < peaks["reserved"]
    blocks = run.allocations(0)
    parameters = run.rank(0).model.bytes
    assert blocks.loc[blocks["category"] == "parameter", "bytes"].sum() == parameters
    # Blocks held at a time add up to the pool.
    peak = memory.loc[memory[memory["pool"] == "requested"]["bytes"].idxmax()]
    alive = (blocks["start_ns"] <= peak["t_ns"]) & (
        blocks["end_ns"].fillna(1 << 62) > peak["t_ns"]
    )
    assert blocks.loc[alive, "bytes"].sum() == peak["bytes"]
    tokens = 8 * 64 * 8
    assert (run.transfers(0)["bytes"] == tokens).sum() == 2 * 2 * 2


def test_dry_run__without_an_update_still_has_its_memory(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import torch; x = torch.ones(1000, 1000, device='cuda')"
    )
    assert dry_run(tmp_path / "run.ebb", str(tmp_path / "job.py"))[0] == 0
    run = open_trace(tmp_path / "run.ebb")
    assert run.memory(0)["bytes"].max() >= 4_000_000
    assert any("there are no iterations" in note for note in run.notes)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "train.py", "-x"], (sys.executable, [], ["train.py", "-x"])),
        (
            ["python3", "-u", "-X", "dev", "-m", "a", "b"],
            (sys.executable, ["-u", "-X", "dev"], ["-m", "a", "b"]),
        ),
        (["train.py", "1"], (sys.executable, [], ["train.py", "1"])),
    ],
)
def test_split_command__finds_interpreter_and_script(
    command: list[str], expected: Any
) -> None:
    assert split_command(command) == expected


@pytest.mark.parametrize(
    "command", [["ls"], ["python"], ["python", "-m"], ["/nowhere/python", "x.py"]]
)
def test_split_command__refuses_what_is_not_a_script(command: list[str]) -> None:
    with pytest.raises(DryRunError):
        split_command(command)


def test_dry_run__refuses_an_output_that_exists(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["dry-run", "-o", str(trace), "--", "python", "x.py"]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_dry_run__runs_from_the_command_line(tmp_path: Path) -> None:
    words = [
        "dry-run",
        "--gpu",
        "a100-40gb-published",
        "-o",
        "run.ebb",
        "--",
        "python",
        str(EXAMPLE),
        *SIZES,
    ]
    result = subprocess.run(
        [sys.executable, "-m", "ebbtide", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "on cuda" in result.stdout
    assert result.stdout.count("step") == 1
    capacity = open_trace(tmp_path / "run.ebb").rank(0).main_device.capacity_bytes
    assert capacity is not None
    assert capacity > 40e9

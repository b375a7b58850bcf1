"""`ebbtide sweep`: stopped, on this machine and on a cluster, for people and
programs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ebbtide.cli import run as command
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import TraceBuilder
from tests.cli.test_bad_input import contents
from tests.conftest import ebbtide, slow
from tests.interleave.job_files import MACHINE, write_files

FAST = (
    "--workload",
    "w.json",
    "--machine",
    "m.json",
    "--policy",
    "zero-offload",
    "--policy",
    "interleaved:2",
)
# Seconds of work, so that it can be stopped in the middle.
SLOW = (
    "--workload",
    "w.json",
    "--machine",
    "m.json",
    "--policy",
    "adaptive",
    "--subgroup-params",
    "6e7,8e7,1e8",
)
SLOW += ("--free-bytes", "0,2GB,4GB,8GB")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the rows of the slow sweep, computed by one process."""
    folder = tmp_path_factory.mktemp("serial")
    write_files(folder)
    done = ebbtide("sweep", *SLOW, "-o", "s.parquet", "--jobs", "1", cwd=folder)
    assert done.returncode == 0, done.stderr
    return rows(folder / "s.parquet")


Sweep = Callable[..., Any]
Refuses = Callable[..., str]


@pytest.fixture
def sweep(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Sweep:
    """Return a function that runs the command in this process and returns its
    output."""

    def run_sweep(*arguments: str) -> Any:
        monkeypatch.chdir(folder)
        status = command(["sweep", *arguments, "--jobs", "1"])
        output = capsys.readouterr()
        assert status == 0, output.err
        return output

    return run_sweep


@pytest.fixture
def refuses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refuses:
    """Return a function that runs the command with bad input and returns its error
    message."""

    def run_refused(*arguments: str) -> str:
        monkeypatch.chdir(folder)
        before = contents(folder)
        assert command(["sweep", *arguments]) == 2
        output = capsys.readouterr()
        assert contents(folder) == before
        (message,) = output.err.splitlines()
        assert output.out == ""
        return message

    return run_refused


def rows(path: Path) -> list[dict[str, Any]]:
    table_rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return table_rows


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a sweep in its own process group, as a foreground job of a terminal."""
    command_line = [
        sys.executable,
        "-m",
        "ebbtide",
        "sweep",
        *arguments,
        "-o",
        "s.parquet",
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command_line,
        cwd=folder,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    return [
        int(child)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip(
        "distributed", reason="dask.distributed is not installed"
    )
    with distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        dashboard_address=":0",
        silence_logs=50,
    ) as cluster:
        yield cluster


@pytest.mark.slow
def test_sweep__a_cluster_that_loses_a_worker_gives_the_same_rows(
    folder: Path, cluster: Any, expected: list[dict[str, Any]]
) -> None:
    from distributed import Client

    with Client(cluster) as client:
        pids = list(client.run(os.getpid).values())
        assert len(pids) == 2
        process = start(folder, *SLOW, "--scheduler", cluster.scheduler_address)
        wait_until(lambda: any(client.processing().values()), process)
    os.kill(pids[0], signal.SIGKILL)
    output = process.communicate()
    assert process.returncode == 0, output
    assert output[1] == "ebbtide: s.parquet\n"
    assert rows(folder / "s.parquet") == expected
    assert sorted(os.listdir(folder)) == ["m.json", "s.parquet", "w.json"]


def test_sweep__without_distributed_the_error_says_how_to_install_it(
    refuses: Refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    message = refuses(*FAST, "-o", "s.parquet", "--scheduler", "tcp://127.0.0.1:1")
    assert "pip install 'ebbtide[dask]'" in message


def test_sweep__no_answer_of_the_scheduler_is_one_line(refuses: Refuses) -> None:
    pytest.importorskip("distributed", reason="dask.distributed is not installed")
    message = refuses(*FAST, "-o", "s.parquet", "--scheduler", "nowhere")
    assert "no Dask scheduler answers at nowhere" in message


def test_sweep__prints_the_best_policies(folder: Path, sweep: Sweep) -> None:
    axes = ("--scale-params", "0.5,1", "--scale-params", "20", "--free-bytes", "0,40GB")
    short = sweep(
        *FAST, "--policy", "gpu-only", *axes, "-o", "s.parquet"
    ).out.splitlines()
    assert (
        short[0]
        == "interleaved:2 is the best of 3 policies in 2 of 6 cases; none fits in 2"
    )
    assert short[-1].startswith("next: --all (all 18 combinations)")
    output = sweep(
        *FAST, "--policy", "gpu-only", *axes, "-o", "s.parquet", "--all", "--force"
    )
    assert output.err == "ebbtide: s.parquet\n"
    assert "speed-up over zero-offload" in output.out
    best, combinations = (
        [re.split(" {2,}", row.strip()) for row in part.splitlines()]
        for part in output.out.split("All combinations")
    )
    assert best[1] == ["workload: job, machine: box"]
    # 40 G parameters do not fit the memory of this host.
    assert [
        (row[0], row[1], row[2]) for row in best if "yes" in row or "none fits" in row
    ] == [
        ("1 G", "0 B", "interleaved:2"),
        ("1 G", "37.25 GiB", "gpu-only"),
        ("2 G", "0 B", "interleaved:2"),
        ("2 G", "37.25 GiB", "gpu-only"),
        ("20 x", "0 B", "none fits"),
        ("20 x", "37.25 GiB", "none fits"),
    ]
    table_rows = rows(folder / "s.parquet")
    # Policy, iteration, device memory, host memory, traffic of storage, fits, exact.
    figures = [row[-7:] for row in combinations if row[-1] in ("yes", "no")]
    assert [(row[0], row[2], row[3], row[5]) for row in figures] == [
        (
            row["policy"],
            f"{row['peak_device_bytes'] / 2**30:.2f}",
            f"{row['host_bytes'] / 2**30:.2f}",
            "yes" if row["fits"] else "no",
        )
        for row in table_rows
    ]
    assert len(table_rows) == 18


def test_sweep__each_trace_goes_with_its_own_machine(
    folder: Path, sweep: Sweep
) -> None:
    for name, rate in (("a", 1e9), ("b", 4e9)):
        builder = TraceBuilder(
            "recorded",
            machine=MACHINE | {"name": name, "cpu_update_params_per_s": rate},
        )
        rank = builder.rank(0, optimizers=[{"params": 10**8}])
        for number in range(3):
            for index, phase in enumerate(PHASES):
                begin = (3 * number + index) * 10**7
                rank.phase(phase, begin, begin + 10**7, number)
        builder.write(folder / f"{name}.ebb")
    sweep("a.ebb", "b.ebb", "--policy", "pipelined", "-o", "s.parquet")
    slow, fast = rows(folder / "s.parquet")
    assert [(row["workload"], row["machine"]) for row in (slow, fast)] == [
        ("a", "a"),
        ("b", "b"),
    ]
    assert slow["update_ms"] > 2 * fast["update_ms"]


def test_sweep__a_trace_that_cannot_be_replayed_has_rows_with_the_reason(
    folder: Path, sweep: Sweep
) -> None:
    TraceBuilder("recorded").write(folder / "empty.ebb")
    (folder / "broken.ebb").mkdir()
    printed = sweep(
        "empty.ebb", "broken.ebb", *FAST, "-o", "s.parquet", "--plot", "s.svg"
    ).out
    done, failed = rows(folder / "s.parquet")[:2], rows(folder / "s.parquet")[2:]
    assert [row["error"] for row in done] == [None, None]
    assert [(row["workload"], row["machine"], row["policy"]) for row in failed] == [
        (trace, "box", policy)
        for trace in ("empty.ebb", "broken.ebb")
        for policy in ("zero-offload", "interleaved:2")
    ]
    assert all(row["error"] and row["iteration_ms"] is None for row in failed)
    assert (
        "interleaved:2 is the best of 2 policies in 1 of 3 cases; no result in 2"
        in printed
    )
    best = json.loads(sweep("empty.ebb", *FAST, "-o", "t.parquet", "--json").out)[
        "best"
    ]
    assert [bool(item["error"]) for item in best] == [False, True]


def test_sweep__refuses_traces_of_which_none_can_be_replayed(
    folder: Path, refuses: Refuses
) -> None:
    TraceBuilder("recorded").write(folder / "empty.ebb")
    assert "empty.ebb" in refuses(
        "empty.ebb", "empty.ebb", "--machine", "m.json", "-o", "s.parquet"
    )


@pytest.mark.parametrize("ending", slow(["png", "svg", "pdf"], but=["svg"]))
def test_sweep__writes_a_picture(folder: Path, sweep: Sweep, ending: str) -> None:
    sweep(*FAST, "-o", "s.parquet", "--plot", f"s.{ending}")
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert (folder / f"s.{ending}").read_bytes().startswith(start)


BOTH = "--workload w.json --machine m.json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "nothing to replay"),
        ("-o s.parquet", "nothing to replay"),
        ("-o s.parquet nowhere.ebb --machine m.json", "nowhere.ebb"),
        ("-o s.parquet --workload nowhere.json --machine m.json", "nowhere.json"),
        ("-o s.parquet --workload m.json --machine m.json", "has no params"),
        ("-o s.parquet --workload w.json --machine nosuch", "nosuch"),
        ("-o s.parquet --workload w.json", "--machine"),
        (f"-o s.parquet {BOTH} --policy nosuch", "nosuch"),
        (f"-o s.parquet {BOTH} --policy twin-flow", "none of the 1 combinations"),
        (f"-o s.parquet {BOTH} --scale-params 1,0", "--scale-params: '0'"),
        (f"-o s.parquet {BOTH} --scale-params nan", "--scale-params"),
        (f"-o s.parquet {BOTH} --scale-params 1,", "--scale-params"),
        (f"-o s.parquet {BOTH} --free-bytes much", "--free-bytes: 'much'"),
        (f"-o s.parquet {BOTH} --free-bytes -1", "--free-bytes"),
        (f"-o s.parquet {BOTH} --subgroup-params 0", "--subgroup-params"),
        (f"-o s.parquet {BOTH} --jobs 0", "--jobs"),
        (f"-o s.parquet {BOTH} --jobs 2 --scheduler a:1", "--scheduler"),
        (f"-o s.parquet {BOTH} --scheduler=", "--scheduler"),
        (f"-o s.parquet {BOTH} --plot s.gif", ".png, .svg, .pdf"),
        (f"-o m.json/s.parquet {BOTH}", "cannot write"),
        (f"-o s.parquet {BOTH} --plot m.json/s.png", "cannot write"),
        (f"-o s.png {BOTH} --plot s.png", "both outputs"),
    ],
)
def test_sweep__bad_input_is_one_line_and_changes_no_file(
    refuses: Refuses, arguments: str, message: str
) -> None:
    assert message in refuses(*arguments.split())


def test_sweep__refuses_too_many_combinations_at_once(refuses: Refuses) -> None:
    values = ",".join(str(number) for number in range(1, 400))
    assert "replay at most" in refuses(
        *FAST, "-o", "s.parquet", "--scale-params", values, "--subgroup-params", values
    )
    policies = [
        part
        for number in range(1, 26)
        for part in ("--policy", f"interleaved:{number}")
    ]
    assert "at most 24 policies" in refuses(
        *FAST, *policies, "-o", "s.parquet", "--plot", "s.png"
    )

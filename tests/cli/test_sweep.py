"""`ebbtide sweep`: stopped and gone on with, on this machine and on a cluster, for people and programs."""

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
from ebbtide.interleave.experiments.sweep import Journal, journal_path
from ebbtide.interleave.experiments.sweep.task import key_of, run
from ebbtide.profiler.trace import TraceBuilder
from tests.cli.test_bad_input import contents
from tests.conftest import ebbtide
from tests.interleave.experiments.sweep.sweeps import MACHINE, WORKLOAD, tasks, write_files

FAST = ("--workload", "w.json", "--machine", "m.json", "--policy", "zero-offload", "--policy", "interleaved:2")
# Seconds of work, so that it can be stopped in the middle.
SLOW = ("--workload", "w.json", "--machine", "m.json", "--policy", "adaptive", "--subgroup-params", "6e7,8e7,1e8")
SLOW += ("--free-bytes", "0,2GB,4GB,8GB")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_files(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of the slow sweep, computed one after the other."""
    place = tmp_path_factory.mktemp("serial")
    write_files(place)
    done = ebbtide("sweep", *SLOW, "-o", "s.parquet", "--jobs", "1", cwd=place)
    assert done.returncode == 0, done.stderr
    return rows(place / "s.parquet")


Sweep = Callable[..., Any]
Refuses = Callable[..., str]


@pytest.fixture
def sweep(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sweep:
    """Run the command in this process, where it has files, and return what it says."""

    def sweep(*arguments: str) -> Any:
        monkeypatch.chdir(place)
        status = command(["sweep", *arguments, "--jobs", "1"])
        said = capsys.readouterr()
        assert status == 0, said.err
        return said

    return sweep


@pytest.fixture
def refuses(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refuses:
    """The one line of a command that is refused, and leaves all as it was."""

    def refuses(*arguments: str) -> str:
        monkeypatch.chdir(place)
        before = contents(place)
        assert command(["sweep", *arguments]) == 2
        said = capsys.readouterr()
        assert contents(place) == before
        (line,) = said.err.splitlines()
        assert said.out == ""
        return line

    return refuses


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return found


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    """A sweep in a process group of its own, as a terminal's foreground job."""
    line = [sys.executable, "-m", "ebbtide", "sweep", *arguments, "-o", "s.parquet"]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, cwd=place, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def until(found: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not found():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def finished(place: Path) -> int:
    journal = journal_path(place / "s.parquet")
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_sweep_that_is_stopped_again_and_again_ends_as_one_that_was_not(
    place: Path, expected: list[dict[str, Any]]
) -> None:
    # Ctrl-C goes to the whole group.
    process = start(place, *SLOW, "--jobs", "2")
    until(lambda: finished(place) >= 2, process)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate()
    first = finished(place)
    assert process.returncode == 130
    assert said == ("", f"ebbtide: stopped: {first} of 12 combinations are kept, the same command goes on\n")
    assert not (place / "s.parquet").exists()

    process = start(place, *SLOW, "--jobs", "2")
    until(lambda: finished(place) >= first + 2, process)
    workers = children(process.pid)
    assert len(workers) >= 2
    process.kill()
    said = process.communicate()
    # The interpreter's own words on what was killed may follow.
    assert said[1].startswith(f"ebbtide: going on: {first} of 12 combinations were finished before\n")
    # Nobody is left to compute what nobody waits for.
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        time.sleep(0.01)
    second = finished(place)
    assert first + 2 <= second < 12

    last = ebbtide("sweep", *SLOW, "-o", "s.parquet", cwd=place)
    assert last.returncode == 0
    assert f"going on: {second} of 12" in last.stderr
    assert rows(place / "s.parquet") == expected
    assert sorted(os.listdir(place)) == ["m.json", "s.parquet", "w.json"]


def test_another_question_is_not_answered_by_what_was_finished(place: Path, sweep: Sweep) -> None:
    def keep_what_is_finished() -> None:
        with Journal(journal_path(place / "s.parquet")) as journal:
            for task in tasks(["zero-offload", "interleaved:2"]):
                journal.add(key_of(task), run(task) | {"limited_by": "from the journal"})

    keep_what_is_finished()
    assert "going on: 2 of 2" in sweep(*FAST, "-o", "s.parquet").err
    assert [row["limited_by"] for row in rows(place / "s.parquet")] == ["from the journal"] * 2

    keep_what_is_finished()
    (place / "w.json").write_text(json.dumps(WORKLOAD | {"params": 1e9}))
    assert "going on" not in sweep(*FAST, "-o", "s.parquet", "--force").err
    assert [row["params"] for row in rows(place / "s.parquet")] == [1_000_000_000] * 2
    assert sorted(os.listdir(place)) == ["m.json", "s.parquet", "w.json"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
    ) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_cluster_that_loses_a_worker_gives_the_same_rows(
    place: Path, cluster: Any, expected: list[dict[str, Any]]
) -> None:
    from distributed import Client

    with Client(cluster) as client:
        pids = list(client.run(os.getpid).values())
    assert len(pids) == 2
    process = start(place, *SLOW, "--scheduler", cluster.scheduler_address)
    until(lambda: finished(place) >= 3, process)
    os.kill(pids[0], signal.SIGKILL)
    left = 12 - finished(place)
    said = process.communicate()
    assert process.returncode == 0, said
    assert said[1] == "ebbtide: s.parquet\n"
    assert left >= 2
    assert rows(place / "s.parquet") == expected
    assert sorted(os.listdir(place)) == ["m.json", "s.parquet", "w.json"]


def test_without_distributed_a_line_says_how_to_get_it(refuses: Refuses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    line = refuses(*FAST, "-o", "s.parquet", "--scheduler", "tcp://127.0.0.1:1")
    assert "pip install 'ebbtide[dask]'" in line


def test_where_no_scheduler_answers_it_is_one_line(refuses: Refuses) -> None:
    pytest.importorskip("distributed", reason="dask.distributed is not installed")
    line = refuses(*FAST, "-o", "s.parquet", "--scheduler", "nowhere")
    assert "no Dask scheduler answers at nowhere" in line


def test_people_read_the_best_of_each(place: Path, sweep: Sweep) -> None:
    axes = ("--scale-params", "0.5,1", "--scale-params", "20", "--free-bytes", "0,40GB")
    said = sweep(*FAST, "--policy", "gpu-only", *axes, "-o", "s.parquet")
    assert said.err == "ebbtide: s.parquet\n"
    assert "speed-up over zero-offload" in said.out
    lines = [re.split(" {2,}", line.strip()) for line in said.out.splitlines()]
    assert lines[0] == ["workload: job, machine: box"]
    # 40 G parameters have no room on this host.
    assert [(line[0], line[1], line[3]) for line in lines if line[-1] == "yes" or "none fits" in line] == [
        ("1 G", "0 B", "interleaved:2"),
        ("1 G", "37.25 GiB", "gpu-only"),
        ("2 G", "0 B", "interleaved:2"),
        ("2 G", "37.25 GiB", "gpu-only"),
        ("20 x", "0 B", "none fits"),
        ("20 x", "37.25 GiB", "none fits"),
    ]
    assert len(rows(place / "s.parquet")) == 18


def test_programs_read_the_same(place: Path, sweep: Sweep) -> None:
    said = sweep(*FAST, "--policy", "twin-flow", "-o", "s.parquet", "--json")
    assert said.err == ""
    told = json.loads(said.out)
    first, second, third = rows(place / "s.parquet")
    assert (told["output"], told["rows"], told["errors"], told["baseline"]) == ("s.parquet", 3, 1, "zero-offload")
    (best,) = told["best"]
    assert (best["policy"], best["iteration_ms"]) == ("interleaved:2", second["iteration_ms"])
    assert best["speed_up"] == first["iteration_ms"] / second["iteration_ms"]
    assert "lacks the share" in third["error"]
    assert third["iteration_ms"] is None


def test_each_trace_goes_with_its_own_machine(place: Path, sweep: Sweep) -> None:
    for name, rate in (("a", 1e9), ("b", 4e9)):
        builder = TraceBuilder("recorded", machine=MACHINE | {"name": name, "cpu_update_params_per_s": rate})
        rank = builder.rank(0, optimizers=[{"params": 10**8}])
        for number in range(3):
            for at, phase in enumerate(("forward", "backward", "update")):
                begin = (3 * number + at) * 10**7
                rank.phase(phase, begin, begin + 10**7, number)
        builder.write(place / f"{name}.ebb")
    sweep("a.ebb", "b.ebb", "--policy", "pipelined", "-o", "s.parquet")
    slow, fast = rows(place / "s.parquet")
    assert [(row["workload"], row["machine"]) for row in (slow, fast)] == [("a", "a"), ("b", "b")]
    assert slow["update_ms"] > 2 * fast["update_ms"]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_picture_beside_the_table(place: Path, sweep: Sweep, ending: str) -> None:
    sweep(*FAST, "-o", "s.parquet", "--plot", f"s.{ending}")
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert (place / f"s.{ending}").read_bytes().startswith(start)


def test_what_stands_is_replaced_only_by_force(place: Path, sweep: Sweep, refuses: Refuses) -> None:
    for name in ("s.parquet", "s.png"):
        (place / name).write_text("kept")
        assert "--force" in refuses(*FAST, "-o", "s.parquet", "--plot", "s.png")
        sweep(*FAST, "-o", "s.parquet", "--plot", "s.png", "--force")
        assert len(rows(place / "s.parquet")) == 2
        (place / "s.parquet").unlink()


BOTH = "--workload w.json --machine m.json"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "-o"),
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
        (f"-o nowhere/s.parquet {BOTH}", "cannot write"),
        (f"-o s.parquet {BOTH} --plot nowhere/s.png", "cannot write"),
        (f"-o s.png {BOTH} --plot s.png", "two files"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(refuses: Refuses, line: str, says: str) -> None:
    assert says in refuses(*line.split())


def test_more_than_anybody_wants_is_refused_before_it_begins(refuses: Refuses) -> None:
    many = ",".join(str(number) for number in range(1, 400))
    assert "sweep at most" in refuses(*FAST, "-o", "s.parquet", "--scale-params", many, "--subgroup-params", many)
    policies = [part for number in range(1, 12) for part in ("--policy", f"interleaved:{number}")]
    assert "at most 8 policies" in refuses(*FAST, *policies, "-o", "s.parquet", "--plot", "s.png")

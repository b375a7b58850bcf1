"""Tasks in real processes, of which some die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import ebbtide
from ebbtide.errors import UserError
from ebbtide.interleave.experiments.sweep.workers import WorkerDied, on_cluster, on_this_machine


def double(number: int) -> int:
    return 2 * number


def die_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return double(number)


def die_once(path: str) -> str:
    """Dies where it leaves the first mark."""
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return path


def fail(number: int) -> int:
    raise ValueError(f"no {number}")


def wait_long(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_task_has_its_outcome(jobs: int) -> None:
    tasks = {str(number): number for number in range(20)}
    found = list(on_this_machine(double, tasks, jobs))
    assert len(found) == 20
    assert dict(found) == {key: 2 * number for key, number in tasks.items()}


def test_no_task_is_no_process() -> None:
    assert list(on_this_machine(double, {}, 2)) == []


def test_only_the_task_that_kills_its_worker_fails() -> None:
    tasks = {str(number): number for number in range(5)}
    found = dict(on_this_machine(die_at_three, tasks, 1))
    died = found.pop("3")
    assert isinstance(died, WorkerDied)
    assert found == {key: 2 * number for key, number in tasks.items() if number != 3}


def test_a_task_whose_worker_dies_is_tried_again(tmp_path: Path) -> None:
    tasks = {name: str(tmp_path / name) for name in "abc"}
    (tmp_path / "b").touch()
    assert dict(on_this_machine(die_once, tasks, 2)) == tasks


def test_what_the_work_raises_ends_it_and_its_processes() -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(ValueError, match="no 1"):
        list(on_this_machine(fail, {"a": 1}, 1))
    assert set(multiprocessing.active_children()) == before


def test_nothing_goes_on_when_nobody_waits_for_it(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    tasks = {"quick": str(tmp_path / "b"), "slow": str(mark)}
    (tmp_path / "b").touch()
    with closing(on_this_machine(quick_or_slow, tasks, 2)) as outcomes:
        assert next(outcomes)[0] == "quick"
    assert gone(int(mark.read_text()))


def quick_or_slow(path: str) -> str:
    """The quick one waits for the slow one to begin."""
    if not path.endswith("pid"):
        while not Path(path).with_name("pid").exists() or not Path(path).with_name("pid").read_text():
            time.sleep(0.01)
        return path
    wait_long(path)
    return path


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """The address of a cluster that gives a task up when its first worker dies."""
    dask = pytest.importorskip("dask", reason="dask.distributed is not installed")
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0", silence_logs=50) as cluster,
    ):
        yield cluster.scheduler_address


def test_workers_with_another_version_are_refused(scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = ebbtide.__version__
    monkeypatch.setattr(ebbtide, "__version__", "another")
    with pytest.raises(UserError, match=rf"lack ebbtide another: install it there \({there}\)"):
        list(on_cluster(double, {"1": 1}, scheduler))


def test_a_cluster_gives_up_a_task_that_kills_its_workers(scheduler: str) -> None:
    ((key, died),) = on_cluster(die_at_three, {"3": 3}, scheduler)
    assert key == "3"
    assert isinstance(died, WorkerDied)
    assert list(on_cluster(die_at_three, {"2": 2}, scheduler)) == [("2", 4)]

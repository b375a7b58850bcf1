"""Tasks in real processes, some of which die."""

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
from ebbtide.workers import WorkerDied, run_locally, run_on_cluster


def double(number: int) -> int:
    return 2 * number


def die_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return double(number)


def die_once(path: str) -> str:
    """Kill the process unless the file exists already."""
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return path


def fail(number: int) -> int:
    raise ValueError(f"no {number}")


def wait_long(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_run_locally__every_task_has_its_outcome(jobs: int) -> None:
    tasks = {str(number): number for number in range(20)}
    outcomes = list(run_locally(double, tasks, jobs))
    assert len(outcomes) == 20
    assert dict(outcomes) == {key: 2 * number for key, number in tasks.items()}


def test_run_locally__no_task() -> None:
    assert list(run_locally(double, {}, 2)) == []


def test_run_locally__only_the_task_that_kills_its_worker_fails() -> None:
    tasks = {str(number): number for number in (2, 3, 4)}
    outcomes = dict(run_locally(die_at_three, tasks, 1))
    died = outcomes.pop("3")
    assert isinstance(died, WorkerDied)
    assert outcomes == {key: 2 * number for key, number in tasks.items() if number != 3}


@pytest.mark.slow
def test_run_locally__repeats_a_task_whose_worker_dies(tmp_path: Path) -> None:
    tasks = {name: str(tmp_path / name) for name in "ab"}
    (tmp_path / "b").touch()
    assert dict(run_locally(die_once, tasks, 2)) == tasks


def test_run_locally__an_error_ends_all_processes() -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(ValueError, match="no 1"):
        list(run_locally(fail, {"a": 1}, 1))
    assert set(multiprocessing.active_children()) == before


def test_run_locally__closing_it_ends_all_processes(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    tasks = {"quick": str(tmp_path / "b"), "slow": str(mark)}
    (tmp_path / "b").touch()
    with closing(run_locally(quick_or_slow, tasks, 2)) as outcomes:
        assert next(outcomes)[0] == "quick"
    assert has_ended(int(mark.read_text()))


def quick_or_slow(path: str) -> str:
    """Run for ever as the slow task; as the quick one only wait until the slow one has
    started."""
    if not path.endswith("pid"):
        while (
            not Path(path).with_name("pid").exists()
            or not Path(path).with_name("pid").read_text()
        ):
            time.sleep(0.01)
        return path
    wait_long(path)
    return path


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """Start a cluster that gives up a task when its first worker dies; return its
    address."""
    dask = pytest.importorskip("dask", reason="dask.distributed is not installed")
    distributed = pytest.importorskip(
        "distributed", reason="dask.distributed is not installed"
    )
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, dashboard_address=":0", silence_logs=50
        ) as cluster,
    ):
        yield cluster.scheduler_address


def test_run_on_cluster__refuses_workers_of_another_version(
    scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_version = ebbtide.__version__
    monkeypatch.setattr(ebbtide, "__version__", "another")
    with pytest.raises(
        UserError, match=rf"lack ebbtide another: install it there \({worker_version}\)"
    ):
        list(run_on_cluster(double, {"1": 1}, scheduler))


@pytest.mark.slow
def test_run_on_cluster__gives_up_a_task_that_kills_its_workers(scheduler: str) -> None:
    ((key, died),) = run_on_cluster(die_at_three, {"3": 3}, scheduler)
    assert key == "3"
    assert isinstance(died, WorkerDied)
    assert list(run_on_cluster(die_at_three, {"2": 2}, scheduler)) == [("2", 4)]

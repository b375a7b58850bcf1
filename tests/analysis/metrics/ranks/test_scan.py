"""Figures of ranks are the same whether this process, others or a cluster compute
them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ebbtide.analysis.findings import find
from ebbtide.analysis.metrics.ranks.scan import ScanTask, scan_ranks
from ebbtide.analysis.metrics.summary import summarize
from ebbtide.errors import TraceError, UserError
from ebbtide.profiler.trace import Trace, open_trace
from ebbtide.workers import WorkerDied, run_locally, run_on_cluster
from tests.analysis.metrics.ranks.fleets import GIB, fleet, write_fleet


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet")
    made = fleet(
        6, 6, {2: {"link": 0.5}, 3: {"bytes": 4 * GIB}}, noise=0.01, ranks_per_host=3
    )
    write_fleet(made, folder / "fleet.ebb")
    return folder / "fleet.ebb"


def in_turn(work: Any, tasks: Mapping[str, ScanTask]) -> Iterator[tuple[str, Any]]:
    """Run tasks one after the other in this process, with what processes would
    exchange."""
    for key, task in tasks.items():
        yield key, pickle.loads(pickle.dumps(work(pickle.loads(pickle.dumps(task)))))


def figures(trace: Trace) -> list[str]:
    return [repr(summarize(trace)), repr(find(trace))]


def test_scan_ranks__keeps_figures_equal_to_those_computed_here(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = figures(open_trace(path))
    scanned = open_trace(path)
    steps: list[tuple[int, int]] = []
    scan_ranks(scanned, find, in_turn, lambda done, total: steps.append((done, total)))
    assert steps == [(0, 6), (4, 6), (6, 6)]

    def read(rank: int, table: str) -> Any:
        # What summary and findings need of memory has been computed.
        assert table != "memory", f"{table} of rank {rank} is read again"
        return opened.table(rank, table)

    opened = open_trace(path)
    monkeypatch.setattr(scanned, "_load", read)
    monkeypatch.setattr(scanned, "_tables", type(scanned._tables)())
    assert figures(scanned) == expected


@pytest.mark.slow
@pytest.mark.parametrize("where", ["processes", "cluster"])
def test_scan_ranks__runs_elsewhere(where: str, path: Path) -> None:
    scanned = open_trace(path)
    if where == "processes":
        scan_ranks(scanned, find, lambda work, tasks: run_locally(work, tasks, 2))
    else:
        distributed = pytest.importorskip(
            "distributed", reason="dask.distributed is not installed"
        )
        options = {
            "n_workers": 1,
            "threads_per_worker": 1,
            "dashboard_address": ":0",
            "silence_logs": 50,
        }
        with distributed.LocalCluster(**options) as cluster:
            address = cluster.scheduler_address
            scan_ranks(
                scanned, find, lambda work, tasks: run_on_cluster(work, tasks, address)
            )
    assert figures(scanned) == figures(open_trace(path))


def test_scan_ranks__raises_errors_of_workers(path: Path, tmp_path: Path) -> None:
    def dead(_: Any, tasks: Any) -> Any:
        return ((key, WorkerDied("its worker died, 4 times")) for key in tasks)

    with pytest.raises(
        UserError,
        match="ranks 0 and following could not be read: its worker died, 4 times",
    ):
        scan_ranks(open_trace(path), summarize, dead)
    damaged = tmp_path / "damaged.ebb"
    write_fleet(fleet(2, 6), damaged)
    (damaged / "rank-1" / "memory.parquet").write_bytes(b"no table")
    with pytest.raises(TraceError, match=r"memory.parquet of rank 1 cannot be read"):
        scan_ranks(open_trace(damaged), summarize, in_turn)

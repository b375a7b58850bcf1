"""`import`, `findings` and `summary` on a Dask cluster of two workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.analysis.metrics.ranks.scan import ScanTask, scan
from ebbtide.errors import TraceError
from tests.analysis.metrics.ranks.fleets import fleet, write_fleet
from tests.conftest import ebbtide_in_process
from tests.features.importers.kineto.made_kineto import iteration, span, write_trace


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=50
    ) as cluster:
        yield cluster


def contents(folder: Path) -> dict[Path, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file.relative_to(folder): file.read_bytes() for file in files}


@pytest.mark.slow
def test_import__of_two_workers_has_the_same_bytes(
    tmp_path: Path, cluster: Any
) -> None:
    files = [
        write_trace(
            tmp_path / f"rank{rank}.json",
            [*iteration(1, 0), span("aten::mm", 11, 13 + rank)],
        )
        for rank in range(6)
    ]
    for name, options in (
        ("alone.ebb", []),
        ("spread.ebb", ["--scheduler", cluster.scheduler_address]),
    ):
        run = ebbtide_in_process("import", *files, "-o", tmp_path / name, *options)
        assert run.returncode == 0, run.stderr
    assert contents(tmp_path / "alone.ebb") == contents(tmp_path / "spread.ebb")
    files[3].write_text("{")
    run = ebbtide_in_process(
        "import", *files, "-o", tmp_path / "no.ebb", "--format", "kineto",
        "--scheduler", cluster.scheduler_address,
    )  # fmt: skip
    assert run.returncode == 2
    assert f"{files[3]} is damaged" in run.stderr
    assert not (tmp_path / "no.ebb").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["findings", "summary"])
def test_commands__print_the_same_of_two_workers(
    command: str, tmp_path: Path, cluster: Any
) -> None:
    path = tmp_path / "fleet.ebb"
    write_fleet(fleet(9, 6, {2: {"link": 0.5}}, noise=0.002, ranks_per_host=3), path)
    alone = ebbtide_in_process(command, path)
    spread = ebbtide_in_process(command, path, "--scheduler", cluster.scheduler_address)
    assert (spread.returncode, spread.stdout) == (0, alone.stdout), spread.stderr


def test_import__without_a_scheduler_that_answers_writes_nothing(
    tmp_path: Path,
) -> None:
    files = [write_trace(tmp_path / f"rank{n}.json", iteration(1, 0)) for n in (0, 1)]
    run = ebbtide_in_process(
        "import", *files, "-o", tmp_path / "run.ebb", "--scheduler", "nowhere"
    )
    assert run.returncode == 2
    assert "no Dask scheduler answers at nowhere" in run.stderr
    assert not (tmp_path / "run.ebb").exists()


def test_scan__refuses_a_folder_that_a_worker_does_not_have(tmp_path: Path) -> None:
    task = ScanTask(tmp_path / "run.ebb", {"ranks": []}, (0,), str, {})
    with pytest.raises(TraceError, match=r"run\.ebb is not on the worker"):
        scan(task)

"""Bytes that commands move of a trace of 512 ranks on an S3 server."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import fs

from ebbtide.profiler.trace import TraceBuilder
from tests.conftest import ebbtide_in_process
from tests.features.remote.servers import BUCKET, Connection

RANKS, ITERATIONS, KERNELS = 512, 6, 40_000
MS = 10**6


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace whose ranks have many kernels, with times of their own."""
    import numpy as np

    path = tmp_path_factory.mktemp("fleet") / "fleet.ebb"
    made = TraceBuilder()
    random = np.random.default_rng(0)
    for rank in range(RANKS):
        card = {"device": "cuda:0", "kind": "cuda", "name": None}
        entry = made.rank(rank, devices=[card], transfers_recorded=True)
        for number in range(ITERATIONS):
            start = 100 * MS * number
            for part, phase in enumerate(("forward", "backward", "update")):
                begin = start + 30 * MS * part
                entry.phase(phase, begin, begin + 29 * MS, number)
        starts = np.sort(random.integers(0, 600 * MS, KERNELS))
        entry.extend(
            "kernels",
            start_ns=starts,
            end_ns=starts + random.integers(1000, 9000, KERNELS),
            device="cuda:0",
            kind="compute",
            name="gemm",
            launch_ns=starts - random.integers(0, 9000, KERNELS),
        )
    made.write(path)
    return path


@pytest.mark.slow
def test_summary__moves_a_twentieth(fleet: Path, connection: Connection) -> None:
    store = fs.S3FileSystem(
        endpoint_override=f"127.0.0.1:{connection.port}", scheme="http"
    )
    fs.copy_files(str(fleet), f"{BUCKET}/fleet.ebb", destination_filesystem=store)
    stored = sum(file.stat().st_size for file in fleet.rglob("*") if file.is_file())
    before = connection.sent_bytes
    url = f"s3://{BUCKET}/fleet.ebb"
    run = ebbtide_in_process("summary", url, "--jobs", "1")
    assert run.returncode == 0, run.stderr
    assert connection.sent_bytes - before <= 0.05 * stored
    alone = ebbtide_in_process("summary", fleet, "--jobs", "1")
    assert run.stdout.replace(url, "RUN") == alone.stdout.replace(str(fleet), "RUN")

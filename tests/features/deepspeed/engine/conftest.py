import gc
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import shared_folder, torch_on_one_thread

from .rank_jobs import QUICK, run_ranks
from .training import import_muon

one_thread = pytest.fixture(scope="package", autouse=True)(torch_on_one_thread)


@pytest.fixture(scope="package", autouse=True)
def no_collections() -> Iterator[None]:
    """Let DeepSpeed collect no garbage: it does so twice for each engine, for half a
    second each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)
        yield


ResultsOfRanks = Callable[[str], list[dict[str, Any]]]
_NAMES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(scope="session")
def _deepspeed(deepspeed_extensions: None) -> Any:
    """Initialize DeepSpeed once, with the process groups that it keeps until the
    process ends."""
    import deepspeed as module

    with socket.socket() as probe, pytest.MonkeyPatch.context() as patch:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        for name, value in {**_NAMES, "MASTER_PORT": str(port)}.items():
            patch.setitem(os.environ, name, value)
        module.init_distributed("gloo", verbose=False)
    import_muon()
    return module


@pytest.fixture
def deepspeed(_deepspeed: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return DeepSpeed with one rank in this process, on its CPU accelerator."""
    for name, value in _NAMES.items():
        monkeypatch.setitem(os.environ, name, value)
    return _deepspeed


@pytest.fixture(scope="session")
def results_of_ranks(
    deepspeed_extensions: None, tmp_path_factory: pytest.TempPathFactory
) -> ResultsOfRanks:
    """Return a function that returns the results of a job of `rank_jobs` by rank."""

    def results_of(job: str) -> list[dict[str, Any]]:
        def run(folder: Path) -> None:
            run_ranks(folder, *jobs)

        jobs = QUICK if job in QUICK else (job,)
        folder = shared_folder(tmp_path_factory, f"deepspeed {jobs[0]}", run)
        return [
            json.loads((folder / f"{job}-{rank}.json").read_text()) for rank in (0, 1)
        ]

    return results_of

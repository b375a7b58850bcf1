"""Runs jobs of tests on two ranks, one after the other: the start of the ranks takes
longer than a job."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from pathlib import Path

from tests.conftest import run_process

ROOT = Path(__file__).parents[4]
# They run in one start: each the name of a job, and its variant.
QUICK = ("policies few",)


def run_ranks(folder: Path, *jobs: str) -> None:
    """Run jobs; rank N writes the results of a job to "JOB-N.json" of the folder."""
    done = run_process([sys.executable, "-m", __name__, folder, *jobs], cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]


def main(folder: Path, *jobs: str) -> None:
    import deepspeed
    import pytest
    import torch._dynamo  # noqa: F401

    from tests.features.deepspeed.engine import test_muon, test_ranks
    from tests.features.deepspeed.engine.training import import_muon
    from tests.interleave.engine.compile_once import compile_once
    from tests.interleave.quick_plans import plan_quickly

    import_muon()
    compile_once()
    plan_quickly(pytest.MonkeyPatch())
    kinds = {"muon": test_muon.job, "policies": test_ranks.job}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(probe.getsockname()[1]),
            WORLD_SIZE="2",
        )
    # DeepSpeed collects garbage twice for each engine, for half a second each.
    gc.collect = lambda *_: 0
    # Each rank would import DeepSpeed, and the compiler that torch's optimizers import,
    # in a process of its own.
    child = os.fork()
    rank = 0 if child else 1
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed("gloo", verbose=False)
    for job in jobs:
        kind, variant = job.split()
        (folder / f"{job}-{rank}.json").write_text(
            json.dumps(kinds[kind](folder, variant))
        )
    deepspeed.comm.destroy_process_group()
    status = os.waitpid(child, 0)[1] if child else 0
    sys.stderr.flush()
    # Threads of gloo that still run at the end of the process would abort it, seldom
    # even without groups.
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

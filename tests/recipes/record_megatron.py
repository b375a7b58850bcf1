"""Record Megatron-core's own schedules on the CPU, its calls of CUDA answered by the
host, and compare the phases.

    python -m tests.recipes.record_megatron FOLDER

Fails where an iteration has other phases than its schedule runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

from ebbtide.profiler.trace import open_trace

_SIZES = (
    "--tensor-model-parallel-size 1 --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 32"
)
_STEPS = 4
_F, _B, _U = "forward", "backward", "update"
# Name -> (stages, phases of an iteration by stage); four micro-batches.
_SCHEDULES: dict[str, tuple[int, list[list[str]]]] = {
    "no pipelining": (1, [[_F, _B] * 4]),
    # The first stage runs a forward ahead.
    "1F1B": (2, [[_F, *[_F, _B] * 3, _B], [_F, _B] * 4]),
}


def record(trace: Path, stages: int) -> list[list[list[str]]]:
    """Record a job. Returns the phases of each iteration of each rank."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(stages),
    ]
    job = (
        f"tests/recipes/jobs/megatron_gpt.py {_SIZES} --pipeline-model-parallel-size "
        f"{stages} --micro-batches 4"
    )
    run = [sys.executable, *launcher, "-m", "tests.recipes.without_cuda", *job.split()]
    command = [
        sys.executable,
        "-m",
        "ebbtide",
        "profile",
        "--force",
        "-o",
        str(trace),
        "--",
        *run,
    ]
    subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    recorded = open_trace(trace)
    return [_phases_by_iteration(recorded.phases(rank)) for rank in range(stages)]


def _phases_by_iteration(phases: object) -> list[list[str]]:
    rows = phases[["iteration", "phase"]].itertuples(index=False)  # type: ignore[index]
    return [
        [phase for _, phase in iteration]
        for _, iteration in groupby(rows, lambda row: row[0])
    ]


def main(folder: Path) -> int:
    failed = 0
    for name, (stages, phases) in _SCHEDULES.items():
        recorded = record(folder / "megatron.ebb", stages)
        expected = [[[*of_stage, _U]] * _STEPS for of_stage in phases]
        print(
            f"{name:24}{'as expected' if recorded == expected else f'FAILED: {recorded}'}",
            flush=True,
        )
        failed += recorded != expected
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

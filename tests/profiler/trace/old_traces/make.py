"""Make the traces of the current version: one recorded, one cut off, one simulated.

python -m tests.profiler.trace.old_traces.make 0.2.0
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from contextlib import chdir
from pathlib import Path

from tests.conftest import ebbtide, running_process

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[3]
JOB = """
import sys, time
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False)
for step in range(5):
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", flush=True)
time.sleep(float(sys.argv[1]))
"""
# The recorder writes its spools at least once a second.
SPOOLS_WRITTEN_S = 4


def record(folder: Path) -> Path:
    """Record the job to its end."""
    run = ebbtide(
        "profile",
        "-o",
        "recorded.ebb",
        "--",
        sys.executable,
        "train.py",
        "0",
        cwd=folder,
    )
    assert run.returncode == 0, run.stderr
    return folder / "recorded.ebb"


def cut_off(folder: Path) -> Path:
    """Copy the trace of a job that still runs, without the lock."""
    words = [
        sys.executable,
        "-m",
        "ebbtide",
        "profile",
        "-o",
        folder / "running.ebb",
        "--",
    ]
    command = [*map(str, words), sys.executable, str(folder / "train.py"), "60"]
    with chdir(folder), running_process(command) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "trained\n"
        time.sleep(SPOOLS_WRITTEN_S)
        shutil.copytree(
            folder / "running.ebb",
            folder / "cut-off.ebb",
            ignore=shutil.ignore_patterns("*.lock"),
        )
    return folder / "cut-off.ebb"


def simulate(folder: Path) -> Path:
    """Simulate the update of a job of 13 billion parameters."""
    workload = [
        "--workload",
        ROOT / "examples" / "workload-13b.json",
        "--machine",
        "a100-40gb-published",
    ]
    run = ebbtide(
        "replay",
        *workload,
        "--policy",
        "zero-offload",
        "--save",
        "simulated",
        cwd=folder,
    )
    assert run.returncode == 0, run.stderr
    return folder / "simulated" / "zero-offload.ebb"


def keep(trace: Path, name: str) -> None:
    """Copy a trace into this folder, and what `summary` prints for it."""
    target = FOLDER / f"{name}.ebb"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(trace, target)
    for file in target.rglob("*.json"):
        file.write_text(
            file.read_text()
            .replace(sys.executable, "python")
            .replace(str(trace.parent), "/tmp/job")
        )
    (FOLDER / f"{name}.json").write_text(ebbtide("summary", target, "--json").stdout)


def main(version: str) -> None:
    """Make the traces of the current version."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(JOB)
        for trace, kind in (
            (record(folder), "recorded"),
            (cut_off(folder), "cut-off"),
            (simulate(folder), "simulated"),
        ):
            keep(trace, f"{version}-{kind}")


if __name__ == "__main__":
    main(sys.argv[1])

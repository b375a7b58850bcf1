"""Jobs whose threads train, load data and save while processes are forked: same losses
and exit codes as unrecorded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import examples
from tests.profiler.harm.programs import job_lines, run_bare, run_profiled

JOB = """
import os, queue, sys, threading
import torch
from torch import nn
from torch.nn import functional as F

EPOCHS, STEPS = 4, 40

def load(number, batches):
    generator = torch.Generator().manual_seed(number)
    for _ in range(EPOCHS * STEPS):
        pair = torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)
        batches.put(tuple(tensor.clone() for tensor in pair))

def save(snapshot, path):
    torch.save(snapshot, path)

def train(number, model, optimizer, batches, losses, codes):
    for epoch in range(EPOCHS):
        for _ in range(STEPS):
            x, y = batches.get()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
        snapshot = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        saving = threading.Thread(target=save, args=(snapshot, f"{number}-{epoch}.pt"))
        saving.start()
        if number == 0:
            child = os.fork()
            if child == 0:
                os._exit(10 + epoch)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        saving.join()

torch.manual_seed(0)
codes, losses, threads = [], [[], []], []
for number in range(2):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    batches = queue.Queue(4)
    threads.append(threading.Thread(target=load, args=(number, batches)))
    threads.append(threading.Thread(target=train, args=(number, model, optimizer, batches, losses[number], codes)))
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(codes, losses)
sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_profile__does_not_change_a_job_of_many_threads_and_forks(
    tmp_path: Path,
) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    bare = run_bare(sys.executable, job, cwd=tmp_path)
    assert (bare.returncode, bare.stderr) == (3, "")
    for number in range(examples(25, by_default=1)):
        run = run_profiled(sys.executable, job, cwd=tmp_path, output=f"run{number}.ebb")
        assert (run.returncode, run.stdout, job_lines(run.stderr)) == (
            3,
            bare.stdout,
            [],
        ), (number, run.stderr)

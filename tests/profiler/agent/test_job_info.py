"""The description of a job: its optimizers, and its file where several threads
write."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch

from ebbtide.profiler.agent.job_info import JobInfo, describe_optimizers

NOTES = 150


def test_job_info__is_whole_where_several_threads_write(tmp_path: Path) -> None:
    info = JobInfo(torch, str(tmp_path))
    info.begin("job")
    file = tmp_path / "facts-job.json"

    def note(thread: int) -> None:
        for number in range(NOTES):
            info.note(f"{thread} {number}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=note, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            json.loads(file.read_text())
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(json.loads(file.read_text())["notes"]) == 3 * NOTES


def test_describe_optimizers__leaves_out_parameters_that_are_frozen_from_the_start() -> (
    None
):
    frozen, trained, later_frozen = (
        torch.nn.Parameter(torch.ones(size)) for size in (8, 4, 2)
    )
    frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW([frozen, trained, later_frozen])
    (trained.sum() + later_frozen.sum()).backward()
    optimizer.step()
    later_frozen.requires_grad_(False)
    assert describe_optimizers([optimizer])[0]["params"] == 6


def test_describe_optimizers__leaves_step_counts_on_the_cpu_out_of_its_devices() -> (
    None
):
    parameter = torch.nn.Parameter(torch.zeros(4, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.zeros(4, device="meta"))
    optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    assert describe_optimizers([optimizer])[0]["state_devices"] == ["nvme"]
    optimizer.state[parameter] = {"step": torch.tensor(1.0)}
    assert describe_optimizers([optimizer])[0]["state_devices"] == ["cpu"]

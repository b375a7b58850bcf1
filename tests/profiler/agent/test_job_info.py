"""The description of a job, written by several threads."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch

from ebbtide.profiler.agent.job_info import JobInfo

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

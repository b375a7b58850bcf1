"""`ebbtide explain` on what torch's own allocator prints on the stand-in."""

import json
from pathlib import Path
from typing import Any

from tests.cuda_runtime.conftest import OnStandIn

CAPACITY = 128 << 20
JOB = """
import json, torch
kept = [torch.ones(1 << 20, device="cuda") for _ in range(8)]
del kept[::2]
statistics = torch.cuda.memory_stats()
print(torch.cuda.memory_summary())
print(json.dumps(statistics, indent=1))
reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
try:
    torch.ones(1 << 25, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)
print("figures", json.dumps([allocated, reserved, torch.cuda.memory_reserved()]))
"""


def figures_of(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record["figures"] for record in records if record["kind"] == kind]


def test_explain__has_the_figures_of_torch(
    on_stand_in: OnStandIn, tmp_path: Path
) -> None:
    job, text = tmp_path / "job.py", tmp_path / "output.txt"
    job.write_text(JOB)
    done = on_stand_in([str(job)], bytes=CAPACITY)
    text.write_text(done.stdout)
    allocated, reserved, reserved_at_error = json.loads(
        done.stdout.rpartition("figures")[2]
    )
    shown = on_stand_in(["-m", "ebbtide", "explain", str(text), "--json"])
    records = json.loads(shown.stdout)["records"]
    summary, statistics = figures_of(records, "AllocatorFigures")
    assert statistics["current_bytes"]["allocated"] == allocated
    assert statistics["current_bytes"]["reserved"] == reserved
    # A summary rounds to whole units.
    assert abs(summary["current_bytes"]["allocated"] - allocated) < 1 << 20
    (message,) = figures_of(records, "OutOfMemoryMessage")
    assert message["requested_bytes"] == 128 << 20
    assert message["capacity_bytes"] == CAPACITY
    assert abs(message["allocated_bytes"] - allocated) < 1 << 15
    assert abs(message["reserved_bytes"] - reserved_at_error) < 1 << 15

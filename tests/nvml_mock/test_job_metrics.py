"""`ebbtide.metrics` in a job on a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ebbtide.analysis.metrics.iterations import durations_ms, intervals
from ebbtide.analysis.metrics.phases import phase_bytes
from tests.nvml_mock.cards import H100, cuda_device, write_description
from tests.nvml_mock.conftest import Drivers
from tests.profiler.agent.timed_jobs import Record

# Calls `ebbtide.metrics` until the samples of an iteration of the second half have been
# written.
GPU_JOB = """
import json, sys, time, torch, ebbtide
from tests.nvml_mock.job import stand_in_for_cuda
stand_in_for_cuda(sys.argv[1])
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows, until = [], time.monotonic() + 60
while time.monotonic() < until and not (len(rows) > 20 and "ebbtide/link_bytes/h2d" in rows[-1]):
    loss = model(torch.ones(4, 8)).square().mean()
    time.sleep(0.05)
    loss.backward()
    time.sleep(0.05)
    optimizer.step()
    optimizer.zero_grad()
    rows.append(ebbtide.metrics())
json.dump(rows, open("rows.json", "w"))
"""


@pytest.mark.slow
def test_metrics__have_device_times_and_samples_of_a_gpu(
    record: Record, drivers: Drivers, tmp_path: Path
) -> None:
    environment = {
        "LD_LIBRARY_PATH": str(drivers.current),
        "NVML_MOCK": str(write_description(tmp_path / "nvml.txt", [H100])),
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    recorded = record(GPU_JOB, env=environment, arguments=[cuda_device(H100)])
    assert recorded.run.returncode == 0, recorded.run.stderr
    row = json.loads(recorded.path.with_name("rows.json").read_text())[-1]
    trace = recorded.trace
    seconds = durations_ms(intervals(trace, 0)).frame / 1e3
    number = row["ebbtide/iteration"]
    assert row["ebbtide/phase_seconds/backward"] == pytest.approx(
        seconds.loc[number, "backward"], abs=1e-6
    )
    assert row["ebbtide/iteration_seconds"] == pytest.approx(
        seconds.loc[number, "iteration"], abs=1e-6
    )
    assert row["ebbtide/capacity_bytes"] == H100.total
    assert row["ebbtide/peak_bytes/device"] in (H100.used, H100.used_high)
    assert row["ebbtide/free_bytes"] == H100.total - row["ebbtide/peak_bytes/device"]
    assert row["ebbtide/peak_bytes/reserved"] == 10**9
    for direction in ("h2d", "d2h"):
        # Of one of the iterations of the last second.
        table = phase_bytes(trace, 0, direction)
        assert table is not None
        moved = table.frame.sum(axis=1)
        assert any(
            row[f"ebbtide/link_bytes/{direction}"] == pytest.approx(value, rel=0.02)
            for value in moved
        )

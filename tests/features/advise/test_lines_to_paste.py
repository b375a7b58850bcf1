"""The lines to paste of `ebbtide plan` where state is in storage."""

from __future__ import annotations

import pytest

from ebbtide.features.advise.choice import PolicyChoice
from ebbtide.features.advise.job.training_job import TunableSettings
from ebbtide.features.advise.lines.setups import PasteContext, lines_to_paste
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.recorded_job import RecordedJob
from ebbtide.interleave.simulation.simulator import simulate_steps
from tests.interleave.job_files import machine, workload


@pytest.mark.parametrize(
    ("zero", "call"),
    [
        ({"stage": 3}, "enable("),
        # enable() refuses it.
        (
            {"stage": 3, "offload_param": {"device": "cpu"}},
            "optimizer = InterleavedAdamW(",
        ),
        (None, "optimizer = InterleavedAdamW("),
    ],
)
def test_lines_to_paste__put_state_into_storage(
    zero: dict[str, object] | None, call: str
) -> None:
    job = workload()
    short = machine(
        host_memory_bytes=20e9,
        storage=[{"read_bytes_per_s": 6e9, "write_bytes_per_s": 5e9}],
    )
    choice = PolicyChoice(
        simulate_steps(make_plan("pipelined", job, short), job, short)
    )
    recorded = (
        RecordedJob() if zero is None else RecordedJob({"zero_optimization": zero}, 3)
    )
    settings = TunableSettings(
        ranks=1, micro_batch=None, checkpointing=False, offload=True
    )
    lines = lines_to_paste(
        choice, PasteContext(recorded, short, "box.json"), settings
    ).python
    assert f"\n{call}\n" in lines
    assert (
        "    storage=...,  # fill in: a folder on each drive\n    "
        "host_memory_budget=20_000_000_000,\n" in lines
    )

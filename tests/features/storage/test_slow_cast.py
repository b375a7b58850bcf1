"""Steps with storage whose conversions of masters are slow: no read into their buffer
comes before they end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.interleave.engine.runtime.store import Store
from tests.interleave.engine.training import (
    MACHINE,
    MODES,
    Job,
    ReferenceOptimizer,
    run,
)

QUICK = {("zero-offload", "kept"), ("pipelined", "streamed")}


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        pytest.param(
            policy, mode, marks=() if (policy, mode) in QUICK else pytest.mark.slow
        )
        for policy in ("twin-flow:0.5", "zero-offload", "pipelined")
        for mode in MODES
    ],
)
def test_step__converts_masters_before_their_buffer_is_read_into(
    policy: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Job(torch.bfloat16)
    expected = run(reference, ReferenceOptimizer(reference.net.parameters()), 4)
    cast = Store.cast_master

    def slow_cast(store: Store, subgroup: int) -> None:
        time.sleep(0.005)
        cast(store, subgroup)

    monkeypatch.setattr(Store, "cast_master", slow_cast)
    job = Job(torch.bfloat16)
    optimizer = InterleavedAdamW(
        job.net.parameters(),
        policy=policy,
        gradients=mode,  # type: ignore[arg-type]
        subgroup_params=100,
        machine=MACHINE,
        storage=tmp_path,
        host_memory_budget=3e4,
    )
    assert run(job, optimizer, 4) == expected

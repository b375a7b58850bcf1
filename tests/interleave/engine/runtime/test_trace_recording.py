"""Trace recording: a recorded job with InterleavedAdamW has its measured schedules in
the trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from ebbtide.analysis.timeline.boxes import substep_lanes
from ebbtide.interleave import InterleavedAdamW
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.machines.machine import StoragePath
from ebbtide.profiler import Tracer
from ebbtide.profiler.trace import Trace
from tests.interleave.engine.training import MACHINE

STEPS = 3


def recorded(
    folder: Path, overlap: str = "none", **options: Any
) -> tuple[Trace, list[Schedule]]:
    """Return the trace of a recorded job, and the schedules that its optimizer has
    measured."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 3)).to(
        torch.bfloat16
    )
    optimizer = InterleavedAdamW(
        model.parameters(),
        subgroup_params=500,
        overlap=overlap,
        model=model if overlap != "none" else None,
        **options,
    )
    schedules: list[Schedule] = []
    with Tracer(folder / "run.ebb") as tracer:
        for _ in range(STEPS):
            model(
                torch.ones(4, 40, dtype=torch.bfloat16)
            ).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            # Late updates and writes end with it.
            optimizer.synchronize()
            assert optimizer.last_schedule is not None
            schedules.append(optimizer.last_schedule)
    optimizer.close()
    assert tracer.trace is not None
    return tracer.trace, schedules


def check_rows(rows: pd.DataFrame, schedule: Schedule) -> None:
    expected = sorted(
        (op.kind, op.resource, max(op.subgroup, -1), round(op.nbytes))
        for op in schedule.plan.ops
    )
    columns = zip(
        rows["name"],
        rows["resource"],
        rows["subgroup"].fillna(-1),
        rows["bytes"].fillna(0),
        strict=True,
    )
    assert (
        sorted(
            (name, resource, int(subgroup), int(size))
            for name, resource, subgroup, size in columns
        )
        == expected
    )


def test_record_operations__writes_the_measured_schedules(tmp_path: Path) -> None:
    trace, schedules = recorded(tmp_path, policy="interleaved:2")
    ops, phases = trace.ops(0), trace.phases(0)
    for iteration, schedule in enumerate(schedules):
        rows = ops[ops["iteration"] == iteration]
        check_rows(rows, schedule)
        update = phases[
            (phases["iteration"] == iteration) & (phases["phase"] == "update")
        ].iloc[0]
        updates = rows[rows["name"] == "update"]
        assert (updates["start_ns"] >= update["start_ns"]).all()
        assert (updates["end_ns"] <= update["end_ns"]).all()


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_record_operations__writes_reads_and_writes_of_each_path_of_the_storage(
    tmp_path: Path, overlap: str
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    machine = replace(
        MACHINE,
        storage=tuple(StoragePath(1e8, 1e8, path=str(folder)) for folder in folders),
    )
    options = {
        "policy": "pipelined",
        "machine": machine,
        "storage": folders,
        "host_memory_budget": 26e3,
    }
    trace, schedules = recorded(tmp_path, overlap, **options)
    ops = trace.ops(0)
    for rows, schedule in zip(
        (ops[ops["iteration"] == number] for number in range(STEPS)),
        schedules,
        strict=True,
    ):
        check_rows(rows, schedule)
        assert {
            "storage_read",
            "storage_write",
            "storage_read 1",
            "storage_write 1",
        } <= set(rows["resource"])
    lanes = [name for name, _ in substep_lanes(trace, 0)]
    assert lanes[-4:] == [
        "storage_read",
        "storage_read 1",
        "storage_write",
        "storage_write 1",
    ]

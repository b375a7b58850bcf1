"""Trace recording: a recorded job with InterleavedAdamW has its measured schedules in the trace."""

from pathlib import Path

import torch

from ebbtide.interleave import InterleavedAdamW
from ebbtide.profiler import Tracer


def test_record_operations__writes_the_measured_schedules(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 3)).to(torch.bfloat16)
    optimizer = InterleavedAdamW(model.parameters(), policy="interleaved:2", subgroup_params=500)
    schedules = []
    with Tracer(tmp_path / "run.ebb") as tracer:
        for _ in range(3):
            model(torch.ones(4, 40, dtype=torch.bfloat16)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedules.append(optimizer.last_schedule)
    optimizer.close()
    assert tracer.trace is not None
    ops, phases = tracer.trace.ops(0), tracer.trace.phases(0)
    for iteration, schedule in enumerate(schedules):
        rows = ops[ops["iteration"] == iteration]
        assert schedule is not None
        expected = sorted((op.kind, op.resource, max(op.subgroup, -1)) for op in schedule.plan.ops)
        recorded = zip(rows["name"], rows["resource"], rows["subgroup"].fillna(-1), strict=True)
        assert sorted((name, resource, int(subgroup)) for name, resource, subgroup in recorded) == expected
        update = phases[(phases["iteration"] == iteration) & (phases["phase"] == "update")].iloc[0]
        updates = rows[rows["name"] == "update"]
        assert (updates["start_ns"] >= update["start_ns"]).all()
        assert (updates["end_ns"] <= update["end_ns"]).all()

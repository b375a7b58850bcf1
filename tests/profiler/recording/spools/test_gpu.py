"""The table `gpu`, from the records of a sampler."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.spool import (
    GPU_QUANTITIES,
    GPU_STATE,
    MEMORY,
    MISSING,
    Spool,
)
from ebbtide.profiler.recording.spools.records import RECORD, Records, read_records
from ebbtide.profiler.recording.spools.recovery import recover
from ebbtide.profiler.recording.spools.tables import gpu_table
from ebbtide.profiler.trace.schema import TABLES

NAMES = {3: "cuda:0", 5: "cuda:1"}
LATE = 2**60 + 1  # a time that no float holds


def records_of(*rows: tuple[str, int, int, int]) -> Records:
    """Return records of (quantity, NVML number, time, value)."""
    records = np.zeros(len(rows), RECORD)
    for record, (quantity, number, t_ns, value) in zip(records, rows, strict=True):
        record["kind"], record["code"] = GPU_STATE, GPU_QUANTITIES.index(quantity)
        record["small"], record["x"], record["y"] = number, t_ns, value
    return records


def test_gpu_table__has_a_row_per_device_and_time() -> None:
    table = gpu_table(
        records_of(
            ("utilization", 3, LATE, 99),
            ("power", 3, LATE, 402_500),
            ("utilization", 5, LATE, 7),
            ("utilization", 3, LATE + 1, 0),
            ("throttle_reasons", 3, LATE + 1, 2**62 + 1),
            ("utilization", 4, LATE, 55),  # a card of another job
        ),
        NAMES,
    )
    assert [(c.name) for c in TABLES["gpu"]] == list(table.columns)
    recorded = table.sort_values(["device", "t_ns"])[
        ["t_ns", "device", "utilization_percent", "power_w", "throttle_reasons"]
    ]
    assert [
        [None if pd.isna(v) else v for v in row] for row in recorded.values.tolist()
    ] == [
        [LATE, "cuda:0", 99.0, 402.5, None],
        [LATE + 1, "cuda:0", 0.0, None, 2**62 + 1],
        [LATE, "cuda:1", 7.0, None, None],
    ]
    assert table["temperature_celsius"].isna().all()


def test_gpu_table__is_empty_without_records() -> None:
    others = np.zeros(2, RECORD)
    others["kind"] = MEMORY
    for records in (
        others,
        others[:0],
        records_of(("power", 4, 1, 2)),
        records_of(("power", 3, 1, MISSING)),
    ):
        assert len(gpu_table(records, NAMES)) == 0


def test_gpu_table__takes_the_last_of_two_values_of_one_time() -> None:
    table = gpu_table(records_of(("power", 3, 1, 5000), ("power", 3, 1, 7000)), NAMES)
    assert table["power_w"].tolist() == [7.0]


def test_read_records__drops_unknown_quantities(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "sampler-here-8.spool"))
    spool.put_header(0, 0, 0)
    spool.put(GPU_STATE, len(kinds.GPU_QUANTITIES), 3, x=1, y=1)
    spool.put(GPU_STATE, len(kinds.GPU_QUANTITIES) - 1, 3, x=1, y=1)
    spool.close()
    notes: list[str] = []
    records = read_records(tmp_path / "sampler-here-8.spool", notes)
    assert records is not None
    assert records["kind"].tolist() == [kinds.HEADER, GPU_STATE]
    assert notes == []


def test_recover__keeps_the_state_of_the_recorded_iterations(tmp_path: Path) -> None:
    agent = Spool(str(tmp_path / "agent-here-7.spool"))
    agent.put_header(0, 1, 0)
    for number in range(4):
        agent.put(kinds.PHASE, 2, a=number + 1, x=100 * number, y=100 * number + 90)
        agent.put(kinds.ITERATION, a=number, b=number + 1, x=100 * number + 90)
    agent.put(kinds.START, a=1, x=90)
    agent.close()
    (tmp_path / "facts-here-7.json").write_text(
        '{"devices": [{"device": "cuda:0", "kind": "cuda", "uuid": "GPU-a"}]}'
    )
    sampler = Spool(str(tmp_path / "sampler-here-8.spool"))
    sampler.put_header(0, 0, 0)
    for t_ns in range(0, 400, 50):
        sampler.put(GPU_STATE, GPU_QUANTITIES.index("power"), 3, x=t_ns, y=1000 * t_ns)
    sampler.close()
    host = {
        "name": "here",
        "cpu": {"device": "cpu"},
        "gpus": [{"index": 3, "uuid": "GPU-a"}],
    }
    ((rank,),) = (
        training.ranks
        for training in recover(
            tmp_path, {"host": host, "options": {"iterations": [1, 3]}}
        )
    )
    assert rank.tables["gpu"]["power_w"].tolist() == [100.0, 150.0, 200.0, 250.0]
    ((rank,),) = (training.ranks for training in recover(tmp_path, {"host": host}))
    assert rank.tables["gpu"]["t_ns"].tolist() == list(range(0, 400, 50))

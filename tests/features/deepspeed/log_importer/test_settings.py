"""Configuration and model of the job, read from a log."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from ebbtide.features.deepspeed.setup import deepspeed_of
from ebbtide.interleave.replay.inputs import ranks_on_host
from ebbtide.profiler.trace.metadata import ModelInfo
from tests.features.deepspeed.log_importer.made_logs import (
    CONFIG,
    import_log,
    log_line,
    step_lines,
)


@pytest.mark.parametrize("prefix", ["", "worker-1: ", "[default0]:"])
def test_settings_reader__reads_a_configuration_between_lines_of_other_ranks(
    tmp_path: Path, prefix: str
) -> None:
    own = [prefix + text for text in log_line(0, CONFIG).splitlines()]
    other = (
        ["[default1]: }", "worker-2: }"]
        if prefix
        else [log_line(0, "Warning }"), "a warning of rank 1: {'a': 1}"]
    )
    lines = [text for pair in zip(own, other * 4, strict=False) for text in pair]
    trace = import_log(
        tmp_path, [*lines, f"{prefix}{log_line(1, 'dist_world_size=2')}", *step_lines()]
    )
    assert deepspeed_of(trace).info.config == {
        "zero_optimization": {"stage": 3, "sub_group_size": 1e8},
        "wall_clock_breakdown": True,
    }
    assert trace.ranks == [0, 1]


WORLD = base64.b64encode(
    json.dumps({"worker-1": [0, 1, 2, 3], "worker-2": [0, 1, 2, 3]}).encode()
).decode()
LAUNCHED = "python -u -m deepspeed.launcher.launch"


@pytest.mark.parametrize(
    "lines",
    [
        [
            log_line(
                0,
                f"cmd = pdsh -S -w worker-1,worker-2 {LAUNCHED} --world_info={WORLD} "
                "--node_rank=%n job.py",
            )
        ],
        [log_line(0, "nnodes=2, num_local_procs=4, node_rank=0")],
        [
            log_line(
                0, "cmd = torchrun --nnodes 2 --nproc_per_node=4 --node_rank 0 job.py"
            )
        ],
        ["NNODES=2 NODE_RANK=0 LOCAL_WORLD_SIZE=4"],
        ["worker-1 slots=4", "worker-2 slots=4"],
        [log_line(0, "Setting CUDA_VISIBLE_DEVICES=0,1,2,3")],
    ],
)
def test_settings_reader__knows_the_ranks_of_each_host(
    tmp_path: Path, lines: list[str]
) -> None:
    trace = import_log(
        tmp_path,
        [*lines, log_line(0, "dist_world_size=8"), log_line(0, CONFIG), *step_lines()],
    )
    entries = [trace.rank(rank) for rank in trace.ranks]
    hosts = [entry.host for entry in entries]
    assert len(set(hosts)) == 2
    assert hosts == [hosts[0]] * 4 + [hosts[4]] * 4
    assert [entry.local_rank for entry in entries] == [0, 1, 2, 3] * 2
    assert [entry.main_device.device for entry in entries] == [
        f"cuda:{number}" for number in (0, 1, 2, 3)
    ] * 2
    assert ranks_on_host(trace) == 4


@pytest.mark.parametrize(
    "info",
    ["e30=", "bm90IGpzb24=", "!", "W10=", base64.b64encode(b'{"a": 3}').decode()],
)
def test_settings_reader__takes_damaged_hosts_for_none(
    tmp_path: Path, info: str
) -> None:
    lines = [
        log_line(0, f"cmd = {LAUNCHED} --world_info={info} job.py"),
        log_line(0, "dist_world_size=8"),
    ]
    trace = import_log(tmp_path, [*lines, log_line(0, CONFIG), *step_lines()])
    assert {trace.rank(rank).host for rank in trace.ranks} == {None}
    assert ranks_on_host(trace) == 8


def test_settings_reader__adds_up_the_parts_of_the_model(tmp_path: Path) -> None:
    part_lines = [
        f" > number of parameters on (tensor, pipeline) model parallel rank ({n}, 0): "
        f"{10 + n}"
        for n in (0, 1, 0)
    ]
    lines = [
        *part_lines,
        log_line(0, "dist_world_size=4"),
        log_line(0, CONFIG),
        *step_lines(),
    ]
    assert import_log(tmp_path, lines).rank(0).model == ModelInfo(
        total_params=21, params=6
    )
    rounded = log_line(
        0, "finished initializing model - num_params = 283, num_elems = 11.32B"
    )
    assert (
        import_log(tmp_path, [rounded, *step_lines()]).rank(0).model.total_params
        == 11_320_000_000
    )

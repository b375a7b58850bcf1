"""Configuration and model of the job, read from a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.profiler.trace.metadata import ModelInfo
from tests.profiler.importers.deepspeed.made_logs import CONFIG, import_log, log_line, step_lines


@pytest.mark.parametrize("prefix", ["", "worker-1: ", "[default0]:"])
def test_settings_reader__reads_a_configuration_between_lines_of_other_ranks(tmp_path: Path, prefix: str) -> None:
    own = [prefix + text for text in log_line(0, CONFIG).splitlines()]
    other = ["[default1]: }", "worker-2: }"] if prefix else [log_line(0, "Warning }"), "a warning of rank 1: {'a': 1}"]
    lines = [text for pair in zip(own, other * 4, strict=False) for text in pair]
    trace = import_log(tmp_path, [*lines, f"{prefix}{log_line(1, 'dist_world_size=2')}", *step_lines()])
    assert trace.meta.deepspeed.config == {
        "zero_optimization": {"stage": 3, "sub_group_size": 1e8},
        "wall_clock_breakdown": True,
    }
    assert trace.ranks == [0, 1]


def test_settings_reader__adds_up_the_parts_of_the_model(tmp_path: Path) -> None:
    part_lines = [
        f" > number of parameters on (tensor, pipeline) model parallel rank ({n}, 0): {10 + n}" for n in (0, 1, 0)
    ]
    lines = [*part_lines, log_line(0, "dist_world_size=4"), log_line(0, CONFIG), *step_lines()]
    assert import_log(tmp_path, lines).rank(0).model == ModelInfo(total_params=21, params=6)
    rounded = log_line(0, "finished initializing model - num_params = 283, num_elems = 11.32B")
    assert import_log(tmp_path, [rounded, *step_lines()]).rank(0).model.total_params == 11_320_000_000

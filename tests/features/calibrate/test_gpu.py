"""Calibration on a real GPU. Without one only the arithmetic of link.py, gpu.py and
counters.py is tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ebbtide

pytestmark = pytest.mark.gpu
DIRECTIONS = ("h2d", "d2h")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("gpu") / "machine.json"
    run = ebbtide("calibrate", "--seconds", "12", "--json", "-o", path)
    assert run.returncode == 0, run.stderr
    machine: dict[str, Any] = json.loads(run.stdout)
    return machine


def test_calibrate__measures_every_rate(measured: dict[str, Any]) -> None:
    keys = [key for key in measured if key.endswith(("_per_s", "_bytes", "_s"))]
    rates = [key for key in keys if key != "pinned_memory_bytes"]
    assert [key for key in rates if not measured[key]] == []
    described = {key for key in measured["measured"] if not key.startswith("gpu.")}
    shares = {"cpu_out_of_place_share", "cpu_remainder_ratio"}
    assert set(rates) - {"working_set_bytes"} | shares == described


@pytest.mark.real_gpu
def test_calibrate__measures_the_gpu(measured: dict[str, Any]) -> None:
    gpu = measured["gpu"]
    assert gpu["flops_per_s"]["float16"] > gpu["flops_per_s"]["float32"]
    assert gpu["memory_bytes_per_s"] > measured["host_memory_bytes_per_s"]


@pytest.mark.real_gpu
def test_calibrate__rates_of_copies_are_plausible(measured: dict[str, Any]) -> None:
    rates = [measured[f"{direction}_bytes_per_s"] for direction in DIRECTIONS]
    assert max(rates) * 0.8 < measured["duplex_bytes_per_s"] < sum(rates) * 1.05
    for direction in DIRECTIONS:
        assert (
            measured[f"{direction}_pageable_bytes_per_s"]
            < 1.1 * measured[f"{direction}_bytes_per_s"]
        )


@pytest.mark.real_gpu
def test_calibrate__pinned_copies_stay_below_the_peak_of_pcie(
    measured: dict[str, Any],
) -> None:
    import torch

    from ebbtide.profiler.sampler.gpu import open_gpus
    from ebbtide.profiler.sampler.nvml import Nvml

    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    nvml = Nvml()
    card = next(
        description
        for gpu in open_gpus(nvml).gpus
        if (description := gpu.describe())["uuid"] == uuid
    )
    nvml.close()
    peak = card["link"]["peak_bytes_per_s"]
    if peak is None:
        pytest.skip("the card does not report its link")
    for direction in DIRECTIONS:
        assert 0.2 * peak < measured[f"{direction}_bytes_per_s"] <= peak


@pytest.mark.real_gpu
def test_calibrate__the_gpu_updates_faster_than_the_cpu(
    measured: dict[str, Any],
) -> None:
    assert measured["gpu_update_params_per_s"] > measured["cpu_update_params_per_s"]


@pytest.mark.real_gpu
def test_calibrate__the_gpu_casts_faster_than_the_cpu_and_than_it_updates(
    measured: dict[str, Any],
) -> None:
    assert measured["gpu_cast_params_per_s"] > measured["cpu_cast_params_per_s"]
    assert measured["gpu_cast_params_per_s"] > measured["gpu_update_params_per_s"]
    assert "on the GPU" in measured["measured"]["operation_s"]["how"]


def test_calibrate__the_machine_suffices_for_every_policy(
    measured: dict[str, Any], tmp_path: Path
) -> None:
    machine, workload = tmp_path / "machine.json", tmp_path / "workload.json"
    machine.write_text(json.dumps(measured))
    job = {
        "params": 1e9,
        "subgroup_params": 1e8,
        "forward_s": 0.2,
        "backward_s": 0.4,
        "gpu_free_bytes": 8e9,
    }
    workload.write_text(json.dumps(job))
    run = ebbtide("replay", "--workload", workload, "--machine", machine, "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["skipped"] == {}

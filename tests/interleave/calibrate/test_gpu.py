"""A calibration on a real card. Of link.py, gpu.py and counters.py nothing but the arithmetic runs without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ebbtide

pytestmark = pytest.mark.gpu
WAYS = ("h2d", "d2h")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("gpu") / "machine.json"
    run = ebbtide("calibrate", "--seconds", "12", "--json", "-o", path)
    assert run.returncode == 0, run.stderr
    machine: dict[str, Any] = json.loads(run.stdout)
    return machine


def test_every_rate_is_measured(measured: dict[str, Any]) -> None:
    rates = [key for key in measured if key.endswith(("_per_s", "_bytes", "_s"))]
    assert [key for key in rates if not measured[key]] == []
    assert set(rates) - {"working_set_bytes"} == set(measured["measured"])


def test_copies_keep_to_what_a_link_can_do(measured: dict[str, Any]) -> None:
    ways = [measured[f"{way}_bytes_per_s"] for way in WAYS]
    assert max(ways) * 0.8 < measured["duplex_bytes_per_s"] < sum(ways) * 1.05
    for way in WAYS:
        assert measured[f"{way}_pageable_bytes_per_s"] < 1.1 * measured[f"{way}_bytes_per_s"]


def test_pinned_copies_keep_below_the_peak_of_pcie(measured: dict[str, Any]) -> None:
    import torch

    from ebbtide.profiler.sampler.nvml import Nvml

    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    nvml = Nvml()
    card = next(facts for gpu in nvml.gpus() if (facts := gpu.describe())["uuid"] == uuid)
    nvml.close()
    peak = card["link"]["peak_bytes_per_s"]
    if peak is None:
        pytest.skip("the card does not tell its link")
    for way in WAYS:
        assert 0.2 * peak < measured[f"{way}_bytes_per_s"] <= peak


def test_the_gpu_updates_faster_than_the_cpu(measured: dict[str, Any]) -> None:
    assert measured["gpu_update_params_per_s"] > measured["cpu_update_params_per_s"]


def test_update_and_copies_slow_each_other_or_not_at_all(measured: dict[str, Any]) -> None:
    shared = measured["contention"]
    assert shared["copies"] == "pinned copies both ways"
    for share in ("update_share", "copy_share", "fluid_share"):
        assert 0.1 < shared[share] < 1.2, shared


def test_one_source_at_least_counts_what_was_copied(measured: dict[str, Any]) -> None:
    sources = measured["counters"]
    assert list(sources) == ["nvml-counters", "gpm", "nvml-throughput"]
    judged = [source for source in sources.values() if "refused" not in source]
    if not judged:
        pytest.skip(f"no source on this card: {sources}")
    assert any(
        0.8 < source[way]["scale"] < 1.3 for source in judged for way in WAYS if source[way]["scale"] is not None
    )


def test_the_machine_suffices_for_every_policy(measured: dict[str, Any], tmp_path: Path) -> None:
    machine, workload = tmp_path / "machine.json", tmp_path / "workload.json"
    machine.write_text(json.dumps(measured))
    job = {"params": 1e9, "subgroup_params": 1e8, "forward_s": 0.2, "backward_s": 0.4, "gpu_free_bytes": 8e9}
    workload.write_text(json.dumps(job))
    run = ebbtide("replay", "--workload", workload, "--machine", machine, "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["skipped"] == {}

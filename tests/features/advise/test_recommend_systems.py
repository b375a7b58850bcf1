"""Tests of other systems in a recommendation: which are named, and the lines for
them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ebbtide.features.advise.lines.setups import PasteContext
from ebbtide.features.advise.lines.systems import (
    SystemSetup,
    other_systems,
    zero_infinity_config,
)
from ebbtide.features.advise.recommendation import recommend
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import as_policy, make_plan
from ebbtide.interleave.replay.recorded_job import RecordedJob
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import StoragePath
from tests.features.advise.filled import filled
from tests.features.overlap.test_speculation import BOX, JOB

HOUR_S = 3600.0
FULL_BOX = replace(
    BOX,
    gpu_update_params_per_s=1e12,
    cpu_cast_params_per_s=1e12,
    h2d_pageable_bytes_per_s=50e9,
    d2h_pageable_bytes_per_s=50e9,
    gpu_memory_bytes=80e9,
    h2d_bytes_per_s=50e9,
    d2h_bytes_per_s=50e9,
)
# State of 48 GB has left the device after 1 s.
TIGHT = replace(JOB, gpu_free=((0.0, 80e9), (2.0, 15e9), (12.0, 80e9)))


def systems(
    best_s: float = HOUR_S, clipping: bool = True, job: Workload = TIGHT
) -> dict[str, SystemSetup]:
    setups = other_systems(
        replace(job, clipping=clipping), PasteContext(RecordedJob(), FULL_BOX), best_s
    )
    return {setup.policy: setup for setup in setups}


def test_other_systems__are_exact_ones_first() -> None:
    setups = list(systems().values())
    assert [setup.exact for setup in setups] == sorted(
        (setup.exact for setup in setups), reverse=True
    )
    assert {setup.policy for setup in setups if not setup.exact} == {
        "zenflow:0.1,rule=deepspeed",
        "prime-rl",
        "torchao",
    }
    assert all((setup.note is None) is setup.exact for setup in setups)
    # Without clipping those that do not clip are exact.
    # torchao keeps no fp32 master.
    assert [
        name for name, setup in systems(clipping=False).items() if not setup.exact
    ] == [
        "zenflow:0.1,rule=deepspeed",
        "torchao",
    ]


def test_other_systems__are_named_where_they_win() -> None:
    hybrid = "megatron-hybrid:0.75,overlap=copies"
    assert list(systems(best_s=12.0)) == [hybrid]
    assert not systems(best_s=12.0)[hybrid].is_faster
    assert systems()[hybrid].is_faster
    # One subgroup of 12 GB fits into the 15 GB that are always free: smaller fractions
    # do not.
    assert "--optimizer-offload-fraction 0.75\n" in systems()[hybrid].lines


def test_other_systems__give_configurations_of_deepspeed() -> None:
    # The state of a subgroup has 12 GB, and its fp32 gradients 4 GB.
    setups = systems(
        job=replace(TIGHT, gpu_free=((0.0, 80e9), (2.0, 17e9), (12.0, 80e9)))
    )
    superoffload = json.loads(setups["superoffload,rule=deepspeed"].lines)[
        "zero_optimization"
    ]["offload_optimizer"]
    assert superoffload["super_offload"] is True
    # One of four subgroups stays on the GPU.
    assert int((1 - superoffload["ratio"]) * 4) == 1
    zenflow = json.loads(setups["zenflow:0.1,rule=deepspeed"].lines)[
        "zero_optimization"
    ]
    assert zenflow["stage"] == 2
    assert zenflow["zenflow"]["topk_ratio"] == 0.1
    deepcompile = json.loads(setups["deepcompile"].lines)
    assert deepcompile["compile"] == {"deepcompile": True, "offload_opt_states": True}


def test_recommend__never_takes_another_system() -> None:
    advice = recommend(TIGHT, FULL_BOX)
    assert as_policy(advice.policy).name == "adaptive"
    assert {setup.policy for setup in advice.setups}.isdisjoint(
        system.policy for system in advice.systems
    )
    assert (
        json.loads(json.dumps(advice.as_json()))["systems"][0].keys()
        == SystemSetup.__dataclass_fields__.keys()
    )


@pytest.mark.parametrize("free", [None, ((0.0, 1e12),)])
def test_recommend__names_no_system_that_is_not_known_to_fit_or_needed(
    free: tuple[tuple[float, float], ...],
) -> None:
    advice = recommend(replace(TIGHT, gpu_free=free), FULL_BOX)
    needed = [
        system
        for system in advice.systems
        if system.policy != "megatron-hybrid:1,overlap=copies"
    ]
    assert (advice.policy == "gpu-only") is (free is not None)
    assert free is None or not needed


def stored_systems() -> dict[str, SystemSetup]:
    """Return the systems for a job whose state host memory does not hold, on a machine
    with two paths of storage."""
    drives = (StoragePath(3e9, 3e9, path="/nvme"), StoragePath(1e9, 1e9))
    box = replace(
        FULL_BOX,
        storage=drives,
        cpu_cast_params_per_s=1e12,
        h2d_pageable_bytes_per_s=10e9,
    )
    # 16 GB of copies, and 20 of 48 GB of state. Gradients of 16 GB in fp32 do not fit
    # on the device.
    job = replace(
        JOB, subgroup_params=10**8, gpu_free=((0.0, 0.0),), host_free_bytes=16e9 + 20e9
    )
    return {
        setup.policy: setup
        for setup in other_systems(job, PasteContext(RecordedJob(), box), HOUR_S)
    }


def test_other_systems__name_storage_where_host_memory_is_too_small() -> None:
    setups = stored_systems()
    assert list(setups) == [
        "mlp-offload",
        "zero-infinity:12,pipeline_read=true,pipeline_write=true",
    ]
    assert all(setup.exact and setup.note is None for setup in setups.values())
    offload = json.loads(setups["mlp-offload"].lines)["zero_optimization"][
        "offload_optimizer"
    ]
    assert offload["nvme_path"] == "/nvme;fill in: a folder on the drive"
    assert "MLP-Offload" in setups["mlp-offload"].place


def test_zero_infinity_config__is_read_by_deepspeed(deepspeed_extensions: None) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

    box = replace(
        FULL_BOX,
        storage=(StoragePath(3e9, 3e9, path="/nvme"),),
        cpu_cast_params_per_s=1e12,
    )
    box = replace(box, h2d_pageable_bytes_per_s=10e9)
    for gradients, block_bytes in (("storage", 2 * 2**20), ("device", 4 * 10**9)):
        policy = f"zero-infinity:12,pipeline_read=true,pipeline_write=true,gradients={gradients}"
        schedule, context = (
            simulate(make_plan(policy, JOB, box), JOB, box),
            PasteContext(RecordedJob(), box),
        )
        values = json.loads(
            filled(
                json.dumps(zero_infinity_config(schedule, as_policy(policy), context))
            )
        )
        offload = DeepSpeedConfig(values).zero_config.offload_optimizer
        assert (str(offload.device), str(offload.nvme_path), offload.buffer_count) == (
            "nvme",
            "/nvme",
            12,
        )
        assert offload.pipeline_read
        assert offload.pipeline_write
        assert get_aio_config(values)["block_size"] == block_bytes

"""The match between GPUs as torch names them and those that the sampler has read."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.profiler.recording.spools.devices import (
    device_names,
    note_on_unused_gpus,
    notes_on_devices,
    nvml_info,
    sampled_gpu,
)

CARD = {"index": 0, "uuid": "GPU-aaaa-01", "link": {"generation": 5}, "driver": "580"}
MIG = [
    {
        "index": 256 + number,
        "uuid": f"MIG-bbbb-0{number}",
        "parent_uuid": "GPU-cccc-01",
        "link_missing": "MIG",
    }
    for number in (1, 2)
]
CPU = {"device": "cpu", "kind": "cpu"}


def cuda(uuid: str | None) -> dict[str, Any]:
    return {"device": "cuda:0", "kind": "cuda", "uuid": uuid}


@pytest.mark.parametrize(
    ("uuid", "gpu"),
    [
        ("GPU-aaaa-01", CARD),
        ("GPU-AAAA-01", CARD),
        # The agent writes a MIG device's UUID with the prefix of cards.
        ("GPU-bbbb-01", MIG[0]),
        ("MIG-bbbb-02", MIG[1]),
        ("GPU-dddd-01", None),
        (None, None),
    ],
)
def test_sampled_gpu__compares_uuids_without_their_prefix(
    uuid: str | None, gpu: dict[str, Any] | None
) -> None:
    assert sampled_gpu(cuda(uuid), [CARD, *MIG]) == gpu
    assert device_names([cuda(uuid)], [CARD, *MIG]) == (
        {gpu["index"]: "cuda:0"} if gpu else {}
    )
    assert bool(notes_on_devices([cuda(uuid)], {"gpus": [CARD, *MIG]})) == (gpu is None)


def test_sampled_gpu__takes_the_only_mig_device_of_a_card() -> None:
    assert sampled_gpu(cuda("GPU-cccc-01"), [CARD, MIG[1]]) == MIG[1]
    assert sampled_gpu(cuda("GPU-cccc-01"), [CARD, *MIG]) is None


def test_nvml_info__has_what_was_reported() -> None:
    assert nvml_info(cuda("GPU-aaaa-01"), [CARD]) == {
        "link": {"generation": 5},
        "driver": "580",
    }
    assert nvml_info(cuda("GPU-bbbb-01"), MIG) == {
        "parent_uuid": "GPU-cccc-01",
        "link_missing": "MIG",
    }
    assert nvml_info(cuda("GPU-dddd-01"), MIG) == nvml_info(CPU, MIG) == {}


@pytest.mark.parametrize(
    ("host", "uuid", "reason"),
    [
        ({"nvml": "Driver Not Loaded", "gpus": []}, "GPU-aaaa-01", "Driver Not Loaded"),
        ({"gpus": [CARD]}, "GPU-dddd-01", "NVML shows no GPU with its UUID, GPU-dddd-01"),
        ({"gpus": [CARD]}, None, "NVML shows no GPU with its UUID, which CUDA did not give"),
        ({"gpus": MIG}, "GPU-cccc-01", "CUDA gave the UUID of its card, which has several MIG devices; "
         "set CUDA_VISIBLE_DEVICES to one of them"),
    ],
)  # fmt: skip
def test_notes_on_devices__name_the_reason(
    host: dict[str, Any], uuid: str | None, reason: str
) -> None:
    assert notes_on_devices([cuda(uuid), CPU], host) == [
        f"cuda:0 was not sampled: {reason}"
    ]


def test_note_on_unused_gpus__is_for_jobs_on_the_cpu_of_a_host_with_gpus() -> None:
    note = (
        "no recorded process used a GPU: the samples of the 2 GPUs of this host are "
        "not in the trace"
    )
    assert note_on_unused_gpus([[CPU], [CPU]], {"gpus": MIG}) == note
    assert note_on_unused_gpus([[CPU], [cuda("GPU-aaaa-01")]], {"gpus": MIG}) is None
    assert note_on_unused_gpus([[CPU]], {"gpus": []}) is None
    assert note_on_unused_gpus([], {"gpus": MIG}) is None

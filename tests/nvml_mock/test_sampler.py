"""The sampler on cards of a mock of NVML: what it records and what it says."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pynvml
import pytest

from ebbtide.profiler.recording.spools.recovery import recover
from ebbtide.profiler.sampler.sampler import Sampler
from ebbtide.profiler.trace.metadata import RankInfo
from tests.nvml_mock.build import loaded
from tests.nvml_mock.cards import (
    A100,
    H100,
    MIG,
    VGPU,
    MockCard,
    card_uuid,
    write_description,
)
from tests.nvml_mock.conftest import Drivers
from tests.profiler.sampler.test_sampler import write_agent_files


@pytest.mark.parametrize(
    "code",
    [
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_NOT_READY,  # pynvml asks the library for its text
    ],
)
def test_sampler__describes_why_nvml_does_not_answer(
    drivers: Drivers, tmp_path: Path, code: int
) -> None:
    description = write_description(tmp_path / "nvml.txt", [A100], init_error=code)
    with loaded(drivers.current, description):
        sampler = Sampler(tmp_path)
        sampler.start()
        sampler.stop()
        assert sampler.host["nvml"] == str(pynvml.NVMLError(code))
    assert sampler.host["gpus"] == []


def test_sampler__names_cards_that_lack_the_same_in_one_line(
    drivers: Drivers, tmp_path: Path
) -> None:
    cards = [replace(VGPU, uuid=card_uuid(number)) for number in range(3)]
    with loaded(drivers.current, write_description(tmp_path / "nvml.txt", cards)):
        sampler = Sampler(tmp_path)
        sampler.start()
        sampler.stop()
    assert [line for line in sampler.notes if "link" in line] == [
        "no link use of GPU 0, GPU 1, GPU 2: nvml-counters: Not Supported; gpm: not on "
        "this card; "
        "nvml-throughput: Not Supported"
    ]


def recover_rank(folder: Path, uuid: str) -> tuple[Sampler, RankInfo, list[str]]:
    """Run the sampler beside a job on a GPU; return it, the rank of the job, and the
    notes on GPUs not sampled."""
    sampler = Sampler(folder)
    write_agent_files(
        folder, sampler.host["name"], f"GPU-{uuid.partition('-')[2]}", os.getpid()
    )
    sampler.start()
    sampler.stop()
    (training,) = recover(folder, {"host": sampler.host, "options": {}})
    notes = [note for note in training.notes if "sampled" in note]
    return sampler, msgspec.convert(training.ranks[0].meta, RankInfo), notes


@pytest.mark.parametrize(
    ("card", "uuid", "settings", "reason"),
    [
        (
            A100,
            A100.uuid,
            {"init_error": pynvml.NVML_ERROR_DRIVER_NOT_LOADED},
            "Driver Not Loaded",
        ),
        (A100, H100.uuid, {}, f"NVML shows no GPU with its UUID, {H100.uuid}"),
        (
            MIG,
            MIG.uuid,
            {},
            "CUDA gave the UUID of its card, which has several MIG devices; set "
            "CUDA_VISIBLE_DEVICES to one of them",
        ),
    ],
)
def test_sampler__names_the_reason_if_the_gpu_of_the_job_was_not_sampled(
    drivers: Drivers,
    tmp_path: Path,
    card: MockCard,
    uuid: str,
    settings: dict[str, int],
    reason: str,
) -> None:
    with loaded(
        drivers.current, write_description(tmp_path / "nvml.txt", [card], **settings)
    ):
        _, rank, notes = recover_rank(tmp_path, uuid)
    assert rank.main_device.pci_bus_id is None
    assert notes == [f"rank 0: cuda:0 was not sampled: {reason}"]


@pytest.mark.parametrize(
    ("visible", "uuid"),
    [(True, MIG.uuid), (True, MIG.mig_devices[1].uuid), (False, "second")],
)
def test_sampler__finds_the_mig_device_of_the_job(
    drivers: Drivers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: bool,
    uuid: str,
) -> None:
    """CUDA may give the UUID of the card: it is enough where the job sees one MIG
    device of it."""
    ours = MIG.mig_devices[1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ours.uuid if visible else "")
    with loaded(drivers.current, write_description(tmp_path / "nvml.txt", [H100, MIG])):
        sampler, rank, notes = recover_rank(
            tmp_path, ours.uuid if uuid == "second" else uuid
        )
    device = rank.main_device
    assert (device.parent_uuid, device.pci_bus_id) == (MIG.uuid, "00000000:19:00.0")
    assert (
        device.link_missing
        == "PCIe counters are those of the whole card, not of a MIG device"
    )
    assert notes == []
    assert len(sampler.host["gpus"]) == (1 if visible else 3)

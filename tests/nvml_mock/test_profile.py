"""`ebbtide profile` and the commands that read its trace, over every kind of card and
failure of NVML."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ebbtide.profiler.trace import Trace, open_trace
from tests.conftest import Run, ebbtide, ebbtide_in_process, shared_folder
from tests.nvml_mock.cards import (
    A100,
    CARDS,
    FORBIDDEN,
    GB200,
    H100,
    H200,
    LOST,
    MIG,
    RTX_4090,
    SECOND_NS,
    VGPU,
    WRAPPING,
    MockCard,
    cuda_device,
    write_description,
)
from tests.nvml_mock.conftest import Drivers

JOB = Path(__file__).with_name("job.py")
JOB_S = 0.8
SOURCES = {
    A100: "nvml-throughput",
    H100: "nvml-counters",
    H200: "gpm",
    RTX_4090: "nvml-counters",
    WRAPPING: "nvml-counters",
}
WITHOUT_LINK = {
    GB200: "copies go over NVLink-C2C, which PCIe counters do not count",
    MIG: "PCIe counters are those of the whole card, not of a MIG device",
    VGPU: (
        "nvml-counters: Not Supported; gpm: not on this card; nvml-throughput: Not "
        "Supported"
    ),
    FORBIDDEN: "nvml-counters: Insufficient Permissions; gpm: not on this card; "
    "nvml-throughput: Insufficient Permissions",
}
NAMES = {card: card.name for card in CARDS}


def record(
    folder: Path,
    library: Path,
    cards: Sequence[MockCard],
    devices: Sequence[str],
    env: dict[str, str],
    **settings: Any,
) -> Run:
    """Profile the job into `folder/run.ebb`, one rank per device, on a machine with the
    cards."""
    variables = {
        "LD_LIBRARY_PATH": str(library),
        "NVML_MOCK": str(write_description(folder / "nvml.txt", cards, **settings)),
        **env,
    }
    options = ("--allocator-iterations", "0")
    job = (sys.executable, JOB, str(JOB_S), *devices)
    run = ebbtide(
        "profile",
        "-o",
        folder / "run.ebb",
        *options,
        "--",
        *job,
        cwd=folder,
        env={**os.environ, **variables},
    )
    assert run.returncode == 0, run.stderr
    return run


class RecordedBox:
    """The trace of a job on a machine with one card of each kind; rank n runs on card
    n.

    Attributes:
        lines: The lines that `ebbtide profile` printed, without the prefix.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.ebb"
        self.trace = open_trace(self.path)
        self.lines = read_lines((folder / "stderr").read_text())

    def rank(self, card: MockCard) -> int:
        return CARDS.index(card)

    def link(self, card: MockCard) -> pd.DataFrame:
        return self.trace.link(self.rank(card))

    def device_memory(self, card: MockCard) -> pd.DataFrame:
        return device_memory(self.trace, self.rank(card))

    def lines_on(self, card: MockCard) -> list[str]:
        number = self.rank(card)
        names = (
            f"GPU {number}:",
            f"GPU {number} ",
            f"GPU {number},",
            f"rank {number}:",
        )
        return [line for line in self.lines if any(name in line for name in names)]


def read_lines(stderr: str) -> list[str]:
    return [
        line.removeprefix("ebbtide: ")
        for line in stderr.splitlines()
        if line.startswith("ebbtide: ")
    ]


def device_memory(trace: Trace, rank: int = 0) -> pd.DataFrame:
    memory = trace.memory(rank)
    return memory[memory["pool"] == "device"]


def read_json(command: str, path: Path) -> Any:
    run = ebbtide_in_process(*command.split(), path, "--json")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="session")
def box(drivers: Drivers, tmp_path_factory: pytest.TempPathFactory) -> RecordedBox:
    def fill(folder: Path) -> None:
        run = record(
            folder, drivers.current, CARDS, [cuda_device(card) for card in CARDS], {}
        )
        (folder / "stderr").write_text(run.stderr)

    return RecordedBox(shared_folder(tmp_path_factory, "nvml-box", fill))


@pytest.mark.parametrize("card", SOURCES, ids=NAMES.get)
def test_profile__records_the_rates_of_the_link(
    box: RecordedBox, card: MockCard
) -> None:
    link = box.link(card)
    assert len(link) >= 3
    assert set(link["device"]) == {"cuda:0"}
    assert set(link["source"]) == {SOURCES[card]}
    assert (set(link["generation"]), set(link["width"])) == (
        {card.generation},
        {card.width},
    )
    for direction in ("h2d", "d2h"):
        rates = link[f"{direction}_bytes_per_s"]
        # A single window may be off by the time between the reading and the look at the
        # clock.
        assert rates.median() == pytest.approx(getattr(card, direction), rel=0.03)
        assert np.average(rates, weights=link["window_ns"]) == pytest.approx(
            getattr(card, direction), rel=0.1
        )
    assert [line for line in box.lines_on(card) if "link" in line] == []


@pytest.mark.parametrize("card", WITHOUT_LINK, ids=NAMES.get)
def test_profile__leaves_the_link_missing_with_the_reason(
    box: RecordedBox, card: MockCard
) -> None:
    assert len(box.link(card)) == 0
    device = box.trace.rank(box.rank(card)).main_device
    assert device.link_missing == WITHOUT_LINK[card]
    (line,) = [line for line in box.lines_on(card) if "link" in line]
    assert line.startswith("no link use of GPU ")
    assert line.endswith(f": {WITHOUT_LINK[card]}")


def test_profile__gives_nvlink_c2c_no_peak_of_pcie(box: RecordedBox) -> None:
    links = {
        card: box.trace.rank(box.rank(card)).main_device.link for card in (GB200, H100)
    }
    assert (links[GB200].generation, links[GB200].peak_bytes_per_s) == (6, None)
    assert links[H100].peak_bytes_per_s == pytest.approx(63e9, rel=1e-3)


@pytest.mark.parametrize(
    "card", [A100, H200, GB200, RTX_4090, WRAPPING, VGPU], ids=NAMES.get
)
def test_profile__records_the_memory_of_the_card(
    box: RecordedBox, card: MockCard
) -> None:
    rows = box.device_memory(card)
    assert len(rows) >= 10
    assert set(rows["device"]) == {"cuda:0"}
    assert set(rows["bytes"]) == {card.used}


def test_profile__records_changes_of_memory(box: RecordedBox) -> None:
    rows = box.device_memory(H100)
    assert H100.wave_ns is not None
    high = rows["t_ns"] % H100.wave_ns >= H100.wave_ns / 2
    expected = np.where(high, H100.used_high, H100.used)
    assert set(rows["bytes"]) == {H100.used, H100.used_high}
    # A reading close to a change may be on either side of it.
    assert (rows["bytes"] == expected).mean() > 0.9


@pytest.mark.parametrize(
    "card", [A100, H100, GB200, RTX_4090, MIG, VGPU, FORBIDDEN], ids=NAMES.get
)
def test_profile__records_the_state_of_the_card(
    box: RecordedBox, card: MockCard
) -> None:
    table = box.trace.gpu(box.rank(card))
    assert len(table) >= 3
    (row,) = table.drop(columns="t_ns").drop_duplicates().to_dict("records")
    power = (
        card.instant_power_mw if card.instant_power_mw is not None else card.power_mw
    )
    expected = {
        "device": "cuda:0",
        "utilization_percent": card.utilization,
        "memory_utilization_percent": card.memory_utilization
        if card.utilization is not None
        else None,
        "power_w": None if power is None or card is FORBIDDEN else power / 1e3,
        "sm_clock_mhz": card.sm_clock_mhz,
        "memory_clock_mhz": card.memory_clock_mhz,
        "temperature_celsius": card.temperature_celsius,
        "throttle_reasons": card.throttle_reasons,
    }
    assert {
        name: None if pd.isna(value) else value for name, value in row.items()
    } == expected
    missing = {
        "utilization": card.utilization,
        "power": expected["power_w"],
        "temperature": card.temperature_celsius,
    }
    lines = [line for line in box.lines_on(card) if line.startswith("not reported by")]
    assert len(lines) == any(value is None for value in missing.values())
    for name, value in missing.items():
        assert all((name in line) == (value is None) for line in lines)


def test_profile__records_a_mig_device_and_names_its_card(box: RecordedBox) -> None:
    ours = MIG.mig_devices[1]
    rows = box.device_memory(MIG)
    assert len(rows) >= 10
    assert set(rows["bytes"]) == {ours.used}
    device = box.trace.rank(box.rank(MIG)).main_device
    assert (device.parent_uuid, device.pci_bus_id) == (
        MIG.uuid,
        f"00000000:{0x18 + box.rank(MIG):02X}:00.0",
    )
    sampled = {gpu.uuid: gpu for gpu in box.trace.meta.host.gpus}
    assert MIG.uuid not in sampled
    assert [
        (sampled[mig.uuid].name, sampled[mig.uuid].capacity_bytes)
        for mig in MIG.mig_devices
    ] == [(mig.name, mig.total) for mig in MIG.mig_devices]


def test_profile__ends_the_samples_of_a_lost_card_with_one_line(
    box: RecordedBox,
) -> None:
    (line,) = box.lines_on(LOST)
    assert line.startswith(f"sampling GPU {box.rank(LOST)} stopped after ")
    assert line.endswith(": GPU is lost")
    rows, others = box.device_memory(LOST), box.device_memory(A100)
    assert LOST.lost_ns is not None
    assert 0 < len(rows) < len(others)
    # NVML was initialised before the first sample; a time is taken after its reading.
    assert rows["t_ns"].max() <= others["t_ns"].min() + LOST.lost_ns + SECOND_NS
    assert rows["t_ns"].max() < others["t_ns"].max()


def test_profile__has_one_line_for_memory_without_permission(box: RecordedBox) -> None:
    assert len(box.device_memory(FORBIDDEN)) == 0
    (line,) = [line for line in box.lines_on(FORBIDDEN) if "memory" in line]
    assert line.startswith(f"sampling the memory of GPU {box.rank(FORBIDDEN)} stopped")
    assert line.endswith("Insufficient Permissions")


def test_link__gives_rates_or_the_reason_for_none(box: RecordedBox) -> None:
    printed = read_json("summary --by link", box.path)
    ranks = {CARDS[entry["rank"]]: entry for entry in printed["ranks"]}
    assert {card: ranks[card]["source"] for card in SOURCES} == SOURCES
    assert {
        card: (ranks[card]["source"], ranks[card]["missing"]) for card in WITHOUT_LINK
    } == {card: (None, reason) for card, reason in WITHOUT_LINK.items()}
    for card in SOURCES:
        uses = [
            use
            for use in printed["phases"]
            if use["rank"] == box.rank(card) and use["phase"] == "other"
        ]
        rates = {use["direction"]: use["mean_bytes_per_s"] for use in uses}
        assert rates == {
            name: pytest.approx(getattr(card, name), rel=0.05)
            for name in ("h2d", "d2h")
        }
    for card, reason in WITHOUT_LINK.items():
        shown = ebbtide_in_process(
            "summary", "--by", "link", box.path, "--rank", box.rank(card)
        ).stdout
        assert f"no GPU link was recorded: {reason}; " in " ".join(shown.split())
    silent = {box.rank(card) for card in WITHOUT_LINK}
    assert [
        use
        for use in printed["phases"]
        if use["rank"] in silent and use["bytes"] is not None
    ] == []


Alone = Callable[..., tuple[Trace, list[str]]]


@pytest.fixture
def record_alone(drivers: Drivers, tmp_path: Path) -> Alone:
    """Return a function that records a job on one card, and returns the trace and the
    lines before its summary."""

    def run(
        card: MockCard,
        *devices: str,
        env: dict[str, str] | None = None,
        library: Path = drivers.current,
        **settings: Any,
    ) -> tuple[Trace, list[str]]:
        recorded = record(tmp_path, library, [card], devices, env or {}, **settings)
        for command in ("summary", "summary --by link", "windows"):
            read_json(command, tmp_path / "run.ebb")
        lines = read_lines(recorded.stderr)
        summary = [line.partition(":")[0] for line in lines[-3:]]
        assert summary == ["trace", "recorded", "next"]
        return open_trace(tmp_path / "run.ebb"), lines[:-3]

    return run


@pytest.mark.slow
def test_profile__says_that_a_job_on_the_cpu_used_no_gpu(record_alone: Alone) -> None:
    trace, lines = record_alone(A100)
    assert lines == [
        "no recorded process used a GPU: the samples of the GPU of this host are not "
        "in the trace"
    ]
    assert trace.rank(0).main_device.kind == "cpu"
    assert len(trace.link(0)) == 0


@pytest.mark.slow
def test_profile__falls_back_under_an_old_driver(
    record_alone: Alone, drivers: Drivers
) -> None:
    card = replace(H200, instant_power_mw=None)
    trace, lines = record_alone(
        card, cuda_device(card), library=drivers.old, driver="470.256.02"
    )
    assert set(trace.link(0)["source"]) == {"nvml-throughput"}
    assert len(trace.gpu(0)) >= 1
    assert trace.gpu(0)["throttle_reasons"].notna().all()
    assert not lines

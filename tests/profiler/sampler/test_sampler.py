"""The sampler over fake cards, from its threads through the spool to the tables of a
rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pynvml
import pytest

from ebbtide.profiler.agent.spool import (
    HOST,
    LINK,
    LINK_SOURCES,
    MEMORY,
    MISSING,
    POOLS,
    Spool,
)
from ebbtide.profiler.recording.spools.recovery import recover
from ebbtide.profiler.recording.spools.trainings import RankData
from ebbtide.profiler.sampler.sampler import Sampler
from tests.profiler.sampler.fake_nvml import GIB, FakeCard, FakeNvml, counting, hopper

MEMORY_CALL = "nvmlDeviceGetMemoryInfo"
STATE_CALL = "nvmlDeviceGetUtilizationRates"
STATE_CALLS = (
    STATE_CALL,
    "instant power",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)


class Sampled:
    """The result of one run of the sampler: its description of the host, its notes, and
    the tables of the one rank."""

    def __init__(self, sampler: Sampler, rank: RankData) -> None:
        self.host = sampler.host
        self.notes = sampler.notes
        self.rank = rank
        self.link = rank.tables["link"]

    def pool(self, name: str) -> pd.DataFrame:
        memory = self.rank.tables["memory"]
        return memory[memory["pool"] == name]


Sample = Callable[..., Sampled]


def write_agent_files(directory: Path, host: str, uuid: str, pid: int) -> None:
    """Write the spool and the facts of a process that trains on the card `uuid` and
    calls it cuda:0."""
    device = {
        "device": "cuda:0",
        "kind": "cuda",
        "name": "Fake",
        "capacity_bytes": 80 * GIB,
        "uuid": uuid,
    }
    (directory / f"facts-{host}-{pid}.json").write_text(
        json.dumps({"host": host, "devices": [device]})
    )
    spool = Spool(str(directory / f"agent-{host}-{pid}.spool"))
    spool.put_header(0, 1, 0)
    spool.put(MEMORY, POOLS.index("allocated"), 0, x=time.monotonic_ns(), y=1234)
    spool.close()


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    """Return a function that runs the sampler over `library` until `enough`, with a job
    on the card `uuid`."""

    def run(
        library: FakeNvml,
        enough: Callable[[], bool],
        uuid: str = "GPU-a",
        patience_s: float = 5.0,
    ) -> Sampled:
        sampler = Sampler(tmp_path, memory_ms=2.0, library=library)
        write_agent_files(tmp_path, sampler.host["name"], uuid, os.getpid())
        deadline = time.monotonic() + patience_s
        try:
            sampler.start()
            while not enough() and time.monotonic() < deadline:
                time.sleep(0.005)
        finally:
            sampler.stop()
        (training,) = recover(tmp_path, {"host": sampler.host, "options": {}})
        assert len(training.ranks) == 1
        assert [note for note in training.notes if "sampler" in note] == []
        return Sampled(sampler, training.ranks[0])

    return run


def reads(
    card: FakeCard, count: int, function: str = MEMORY_CALL
) -> Callable[[], bool]:
    return lambda: card.calls[function] >= count


def test_sampler__spaces_gpm_samples_as_nvml_requires(sample: Sample) -> None:
    link = sample(FakeNvml(card := hopper()), reads(card, 2, "nvmlGpmMetricsGet")).link
    assert link["window_ns"].min() >= 100_000_000


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION]
)
def test_sampler__continues_with_the_link_if_memory_is_unsupported(
    sample: Sample, code: int
) -> None:
    card = counting().fail(MEMORY_CALL, code)
    sampled = sample(FakeNvml(card), reads(card, 6, "nvmlDeviceGetFieldValues"))
    assert len(sampled.pool("device")) == 0
    assert len(sampled.link) >= 2
    assert sampled.host["gpus"][0]["capacity_bytes"] is None
    assert card.calls[MEMORY_CALL] == 2  # once for the description, once to fail
    (note,) = sampled.notes
    assert note.startswith("sampling the memory of GPU 0 stopped after ")
    assert note.endswith(str(pynvml.NVMLError(code)))


def test_sampler__stops_sampling_a_state_that_is_refused_altogether_with_one_note(
    sample: Sample,
) -> None:
    card = counting()
    for function in STATE_CALLS:
        card.fail(function, pynvml.NVML_ERROR_NOT_SUPPORTED)
    sampled = sample(FakeNvml(card), reads(card, 20))
    assert len(sampled.rank.tables["gpu"]) == 0
    assert len(sampled.pool("device")) >= 3
    assert len(sampled.link) >= 1
    (note,) = sampled.notes
    assert note.startswith("sampling the state of GPU 0 stopped after ")
    assert note.endswith("temperature, throttle reasons (Not Supported)")
    # two clocks by one function
    assert {card.calls[function] for function in STATE_CALLS} == {1, 2}


@pytest.mark.parametrize("first", [2, 4])  # 1: it can still be opened
def test_sampler__leaves_out_a_card_lost_while_it_is_described(
    sample: Sample, first: int
) -> None:
    lost, ours = FakeCard(uuid="GPU-a").lose(first), counting(uuid="GPU-b")
    sampled = sample(FakeNvml(lost, ours), reads(ours, 5), uuid="GPU-b")
    assert "GPU-b" in [gpu["uuid"] for gpu in sampled.host["gpus"]]
    assert set(sampled.pool("device")["device"]) == {"cuda:0"}


def test_sampler__leaves_a_gap_for_a_passing_error(sample: Sample) -> None:
    card = FakeCard().fail(MEMORY_CALL, pynvml.NVML_ERROR_TIMEOUT, first=4, last=9)
    sampled = sample(FakeNvml(card), reads(card, 15))
    assert set(sampled.pool("device")["bytes"]) == {3 * GIB}
    # one was for the description
    assert len(sampled.pool("device")) == card.calls[MEMORY_CALL] - 6 - 1
    assert [note for note in sampled.notes if "memory of GPU" in note] == []


def test_sampler__stops_after_ten_errors_in_a_row(sample: Sample) -> None:
    card = FakeCard().fail(MEMORY_CALL, pynvml.NVML_ERROR_UNKNOWN, first=4)
    sampled = sample(FakeNvml(card), lambda: reads(card, 13)() and not time.sleep(0.05))
    assert card.calls[MEMORY_CALL] == 13  # ten failures
    assert len(sampled.pool("device")) == 2
    assert [note for note in sampled.notes if note.endswith("Unknown Error")] != []


def test_sampler__uses_throughput_if_gpm_does_not_count_the_link(
    sample: Sample,
) -> None:
    refused = {pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: pynvml.NVML_ERROR_NOT_SUPPORTED}
    card = hopper(returns=refused, throughput=(1000, 10), throughput_s=0.005)
    sampled = sample(
        FakeNvml(card), reads(card, 6, "nvmlDeviceGetPcieThroughput"), patience_s=1.0
    )
    assert "nvml-throughput" in set(sampled.link["source"])


def test_sampler__closes_nvml(sample: Sample) -> None:
    library = FakeNvml(card := counting())
    sampled = sample(library, reads(card, 3))
    calls = card.calls["*"]
    time.sleep(0.05)
    assert not library.open
    assert card.calls["*"] == calls
    assert sampled.notes == []


def test_recover__keeps_missing_values_missing(tmp_path: Path) -> None:
    write_agent_files(tmp_path, "here", "GPU-a", 7)
    spool = Spool(str(tmp_path / "sampler-here-8.spool"))
    spool.put_header(0, 0, 0)
    spool.put(LINK, LINK_SOURCES.index("gpm"), 3, a=0, b=8, w=5, x=100, y=MISSING, z=6)
    spool.put(MEMORY, POOLS.index("device"), 3, x=100, y=MISSING)
    spool.put(MEMORY, POOLS.index("rss"), HOST, a=os.getpid(), x=100, y=9)
    spool.put(MEMORY, POOLS.index("rss"), HOST, a=os.getpid() + 1, x=100, y=10)
    spool.close()
    host: dict[str, Any] = {
        "name": "here",
        "cpu": {"device": "cpu"},
        "gpus": [{"index": 3, "uuid": "GPU-a"}],
    }
    (rank,) = recover(tmp_path, {"host": host})[0].ranks
    (row,) = rank.tables["link"].to_dict("records")
    assert (row["source"], row["window_ns"], row["width"], row["d2h_bytes_per_s"]) == (
        "gpm",
        5,
        8,
        6.0,
    )
    assert pd.isna(row["h2d_bytes_per_s"])
    assert pd.isna(row["generation"])
    memory = rank.tables["memory"]
    assert sorted(zip(memory["pool"], memory["bytes"], strict=True)) == [
        ("allocated", 1234),
        ("rss", 9),
    ]

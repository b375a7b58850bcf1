"""Texts that real programs have written, with what those knew (made by
benchmarks/pasted_texts.py)."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from ebbtide.features.explain.pasted import read_pasted
from ebbtide.features.explain.readers.configurations import Configuration
from ebbtide.features.explain.readers.host_tables import HostMemoryTable, HostMessage
from ebbtide.features.explain.readers.out_of_memory import OutOfMemoryMessage
from ebbtide.features.explain.readers.step_logs import StepLog
from ebbtide.features.explain.readers.update_times import UpdateTimes
from ebbtide.features.explain.record import Record, read_records

FOLDER = Path(__file__).parent / "texts" / "made"
EXPECTED: dict[str, dict[str, float]] = json.loads((FOLDER / "known.json").read_text())


def records_of(name: str) -> list[Record]:
    return list(read_records(read_pasted(FOLDER / f"{name}.txt")))


def names_with(*figures: str) -> list[str]:
    return [name for name, truth in EXPECTED.items() if truth.keys() >= {*figures}]


def logs_of(name: str) -> list[StepLog]:
    return [record for record in records_of(name) if isinstance(record, StepLog)]


def test_texts__are_all_there_and_hold_something() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(EXPECTED)
    assert len(EXPECTED) >= 35
    assert all(records_of(name) for name in EXPECTED)


@pytest.mark.parametrize("name", names_with("mean_step_s"))
def test_trainers__have_the_mean_time_of_a_step(name: str) -> None:
    means = [log.values("mean_step_s") for log in logs_of(name)]
    (mean_s,) = (values[-1] for values in means if len(values))
    assert mean_s == pytest.approx(EXPECTED[name]["mean_step_s"])


@pytest.mark.parametrize("name", names_with("steps", "mean_step_s"))
def test_bars_of_trainers__have_all_steps(name: str) -> None:
    bars = [log for log in logs_of(name) if log.program == "a progress bar"]
    totals = {log.total_steps: log.values("step")[-1] for log in bars}
    steps = EXPECTED[name]["steps"]
    assert totals.get(int(steps), steps) == steps
    assert bars or name == "trainer-quiet"


@pytest.mark.parametrize("name", names_with("step_s"))
def test_loops__have_the_time_of_a_step(name: str) -> None:
    (log,) = logs_of(name)
    # Bars print hundredths, smoothed.
    assert median(log.values("step_s")) == pytest.approx(
        EXPECTED[name]["step_s"], rel=0.03
    )
    count = EXPECTED[name].get("steps", EXPECTED[name].get("last_step"))
    assert len(log.steps) == count


@pytest.mark.parametrize("name", names_with("last_step", "longest_s"))
def test_bars_of_lightning__have_the_last_step(name: str) -> None:
    (log,) = logs_of(name)
    assert log.values("step")[-1] == EXPECTED[name]["last_step"]
    # It waits 0.2 s in each.
    assert 0.2 <= median(log.values("step_s")) <= EXPECTED[name]["longest_s"]


@pytest.mark.parametrize("name", names_with("sigkill"))
def test_launchers__name_the_kill(name: str) -> None:
    kinds = {one.kind for one in records_of(name) if isinstance(one, HostMessage)}
    assert kinds == {"sigkill"}


@pytest.mark.parametrize("name", names_with("requested_bytes"))
def test_errors_of_the_cpu__have_the_size(name: str) -> None:
    (message,) = records_of(name)
    assert isinstance(message, OutOfMemoryMessage)
    assert message.requested_bytes == EXPECTED[name]["requested_bytes"]


@pytest.mark.parametrize("name", names_with("total"))
def test_tables_of_the_host__have_its_sizes(name: str) -> None:
    (memory,) = records_of(name)
    assert isinstance(memory, HostMemoryTable)
    # `free -h` prints whole GiB, and time has passed since the sizes were known.
    rounding = {"free-human": 0.05, "free-mib": 1e-4}.get(name, 1e-9)
    assert memory.sizes["total"] == pytest.approx(EXPECTED[name]["total"], rel=rounding)
    assert memory.sizes["available"] == pytest.approx(
        EXPECTED[name]["available"], rel=0.06
    )


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (name, setting)
        for setting in ("per_device_train_batch_size", "num_machines")
        for name in names_with(setting)
    ],
)
def test_settings__have_their_values(name: str, setting: str) -> None:
    (record,) = records_of(name)
    assert isinstance(record, Configuration)
    assert record.settings[setting] == str(int(EXPECTED[name][setting]))


def test_deepspeed__has_all_its_updates_and_usages() -> None:
    (times,) = (
        one for one in records_of("deepspeed-timers") if isinstance(one, UpdateTimes)
    )
    assert times.steps == EXPECTED["deepspeed-timers"]["updates"]
    (log,) = logs_of("deepspeed-memory")
    assert len(log.steps) == EXPECTED["deepspeed-memory"]["usages"]

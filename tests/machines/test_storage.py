"""Storage in machine files, and in the output of `ebbtide replay`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import MachineError
from ebbtide.machines.machine import (
    Box,
    Machine,
    StoragePath,
    load_machine,
    machine_from,
)
from tests.conftest import ebbtide_in_process

ROOT = Path(__file__).parents[2]
DESKTOP = ROOT / "examples" / "machine-desktop-nvme.json"
JOB = (
    "--params",
    "1e9",
    "--forward-ms",
    "500",
    "--backward-ms",
    "1000",
    "--host-free-bytes",
    "10GB",
)
POLICIES = ("--policy", "pipelined", "--policy", "pipelined,overlap=both")


def test_machine_from__reads_the_storage_that_it_wrote() -> None:
    machine = Machine(
        storage=(
            StoragePath(2e9, 1e9),
            StoragePath(5e9, 4e9, 1e12, 6e9, 6e14, "/scratch"),
        )
    )
    assert machine_from(machine.as_json(), "m") == machine
    assert machine_from({"storage": None}, "m").storage == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "it must be a list"),
        ([3], "storage.0. is 3; it must be an object"),
        ([{"read_bytes_per_s": 1e9}], "storage.0. has no write_bytes_per_s"),
        (
            [{"read_bytes_per_s": 1e9, "write_bytes_per_s": 2.0}],
            "write_bytes_per_s is 2; it must be a number from",
        ),
        ([{"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9}] * 65, "at most 64"),
    ],
)
def test_machine_from__refuses_wrong_storage(value: Any, message: str) -> None:
    with pytest.raises(MachineError, match=message):
        machine_from({"storage": value}, "m")


def test_for_ranks__divides_storage() -> None:
    machine = Machine(box=Box(2), storage=(StoragePath(4e9, 2e9, 1e12, 5e9),))
    (path,) = machine.for_ranks(4).storage
    assert path == StoragePath(2e9, 1e9, 0.5e12, 2.5e9)
    assert machine.for_ranks(2).storage == machine.storage


def test_replay__says_what_is_read_and_written_and_what_it_wears(
    tmp_path: Path,
) -> None:
    picture = tmp_path / "schedules.png"
    run = ebbtide_in_process(
        "replay", *JOB, "--machine", DESKTOP, *POLICIES, "--plot-schedules", picture
    )
    assert run.returncode == 0, run.stderr
    assert "subgroups (" in run.stdout
    assert "drive writes per day" in run.stdout
    assert "the rated 1,200 TB last" in run.stdout
    assert picture.stat().st_size > 10_000
    answer = json.loads(
        ebbtide_in_process(
            "replay", *JOB, "--machine", DESKTOP, *POLICIES, "--json"
        ).stdout
    )
    for result in answer["results"]:
        assert (
            result["storage_read_bytes"]
            == result["storage_written_bytes"]
            == result["stored_subgroups"] * 1.2e9
            > 0
        )
        per_day = (
            result["storage_written_bytes"] / (result["iteration_ms"] / 1e3) * 86400
        )
        assert result["storage_written_bytes_per_day"] == pytest.approx(per_day)
        assert result["fits"]
        assert result["host_bytes"] <= 10e9
        assert set(result["busy"]) == {
            "cpu",
            "gpu",
            "h2d",
            "d2h",
            "storage_read",
            "storage_write",
        }
        assert [set(path) for path in result["storage_busy"]] == [
            {"storage_read", "storage_write"}
        ]
    # Late writes are not late updates.
    assert answer["bound"]["overlap"] == "both"
    alone = ebbtide_in_process(
        "replay", *JOB, "--machine", DESKTOP, *POLICIES[:2], "--explain", "--json"
    )
    assert json.loads(alone.stdout)["bound"]["overlap"] == "none"
    last = json.loads(alone.stdout)["explain"][-1]
    assert (last["mechanism"], last["gain_ms"] > 0) == (
        "host memory for all state, instead of storage",
        True,
    )


def test_replay__without_storage_reads_and_writes_none(tmp_path: Path) -> None:
    replace(load_machine(DESKTOP), storage=()).save(tmp_path / "m.json")
    run = ebbtide_in_process(
        "replay", *JOB, "--machine", tmp_path / "m.json", *POLICIES[:2], "--json"
    )
    (result,) = json.loads(run.stdout)["results"]
    assert (result["storage_read_bytes"], result["storage_busy"], result["fits"]) == (
        0,
        [],
        False,
    )

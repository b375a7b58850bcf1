"""docs/formats.md names the keys that files and `--json` have."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from ebbtide.cli import run
from ebbtide.features.sweep.best import SCHEMA
from ebbtide.interleave.model.workload import ActivationForm, Layer, Workload
from ebbtide.machines.machine import Machine
from tests.docs.run_page import ROOT

TRACE = str(ROOT / "traces" / "a100-13b-async.ebb")
WITH_LINK = str(ROOT / "traces" / "h100-20b-blocking.ebb")
COMMANDS = {
    "summary": [TRACE],
    "windows": [TRACE],
    "findings": [TRACE],
    "memory": [TRACE],
    "summary --by iteration": [TRACE],
    "summary --by link": [WITH_LINK],
    "summary --by substep": [WITH_LINK],
    "diff": [WITH_LINK, TRACE],
    "summary --by activity": [
        str(ROOT / "traces" / "a100-torch-profiler.ebb"),
        "--critical-path",
    ],
    "replay": [TRACE, "--machine", "a100-40gb-published", "--policy", "pipelined"],
}
QUICK = ("windows", "memory", "summary --by iteration")


def rows(heading: str, page: str = "formats.md") -> list[list[str]]:
    """Return the cells of the first table below a heading of a page, without its
    head."""
    text = (ROOT / "docs" / page).read_text()
    section = re.split(r"^#+ ", text, flags=re.MULTILINE)
    (own,) = (part for part in section if part.startswith(f"{heading}\n"))
    table, *_ = (part for part in own.split("\n\n") if part.startswith("| "))
    return [
        line.strip("| ").split(" | ")
        for line in table.splitlines()
        if line.startswith("| `")
    ]


def keys(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_machine_file__has_the_keys_of_machines() -> None:
    written = {field.name for field in dataclasses.fields(Machine)} - {"extra"}
    assert {key for row in rows("Machine file") for key in keys(row[0])} == written


def test_workload_file__has_the_keys_of_workloads() -> None:
    layer = Layer("layer", 1, 1.0, 1.0, (ActivationForm("kept", 1.0, 0.0),))
    written = set(Workload("job", 1, 1, 1.0, 1.0, layers=(layer,)).as_json())
    assert {key for row in rows("Workload file") for key in keys(row[0])} == written


def test_sweep__has_the_columns_of_the_page() -> None:
    assert [
        key for row in rows("Columns", "sweep.md") for key in keys(row[0])
    ] == SCHEMA.names


@pytest.mark.parametrize(
    "command",
    [
        *QUICK,
        *(
            pytest.param(command, marks=pytest.mark.slow)
            for command in COMMANDS
            if command not in QUICK
        ),
    ],
)
def test_json__has_the_keys_of_the_page(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command.split(), *COMMANDS[command], "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    table = rows(f"ebbtide {command} --json")
    assert {key for row in table for key in keys(row[0])} == set(printed), (
        "describe new keys in docs/formats.md"
    )
    for row in table:
        value = printed[keys(row[0])[0]]
        entry = value[0] if isinstance(value, list) and value else value
        if len(row) > 2 and keys(row[2]) and isinstance(entry, dict):
            assert keys(row[2]) == list(entry)

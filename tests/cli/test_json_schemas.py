"""The JSON schemas in docs/schemas: what every command with --json prints fits its own,
and has no other key."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ebbtide.cli.command import find_commands
from tests.conftest import ebbtide_in_process, needs_all_features, slow
from tests.interleave import job_files

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "docs" / "schemas"
TRACES = sorted(path.stem for path in (ROOT / "traces").glob("*.ebb"))
QUICK = ("a100-torch-profiler", "h100-20b-ratio0.5-interleaved-2")
# Command -> its schema.
OF_A_TRACE = {
    "cycles": "cycles",
    "findings": "findings",
    "memory": "memory",
    "memory --at oom": "memory",
    "memory --at peak": "memory",
    "summary": "summary",
    "summary --by activity": "summary-by-activity",
    "summary --by activity --critical-path": "summary-by-activity",
    "summary --by iteration": "summary-by-iteration",
    "summary --by link": "summary-by-link",
    "summary --by rank": "summary-by-iteration",
    "summary --by substep": "summary-by-substep",
    "windows": "windows",
}
MACHINE = {
    "host_memory_bytes_per_s": 1e10,
    "cpu_update_params_per_s": 5e8,
    "cpu_cast_params_per_s": 1e9,
}
OTHERS = {
    "doctor": "doctor",
    "explain examples/pastes/torchtitan.txt examples/pastes/out-of-memory.txt": (
        "explain"
    ),
    "machines": "machines",
    "diff traces/a100-13b-async.ebb traces/a100-torch-profiler.ebb": "diff",
    "replay traces/a100-13b-async.ebb --policy pipelined --recommend --explain": (
        "replay"
    ),
    "replay traces/a100-13b-async.ebb --policy pipelined": "replay",
    "replay --workload {folder}/w.json --machine {folder}/box.json --policy pipelined --recommend --explain": (
        "replay"
    ),
    "replay --params 1e9 --machine h100-80gb --policy pipelined": "replay",
    "sweep traces/a100-13b-async.ebb --machine a100-40gb-published --policy pipelined -o {folder}/s.parquet": (
        "sweep"
    ),
    "plan --params 1e9 --machine rtx4090": "plan",
    "plan --model Qwen/Qwen3-8B --machine rtx4090 --frontier": "plan-levers",
    "plan --model Qwen/Qwen3-32B --machine rtx3060": "plan-levers",
    "calibrate --from-trace traces/a100-13b-async.ebb -o {folder}/fitted.json": (
        "calibrate"
    ),
    "compare --params 2e5 --steps 3 --emulate-link 500MB --machine {folder}/m.json --policy pipelined": (
        "compare"
    ),
    "compare --layers --params 2e5 --steps 6 --forward-ms 5 --emulate-link 40MB": (
        "compare-layers"
    ),
}


def schema(name: str) -> dict[str, Any]:
    printed: dict[str, Any] = json.loads((SCHEMAS / f"{name}.json").read_text())
    return printed


def strict(part: Any) -> Any:
    """Return a schema whose objects with named keys have no others."""
    if isinstance(part, list):
        return [strict(entry) for entry in part]
    if not isinstance(part, dict):
        return part
    closed = (
        {"additionalProperties": False}
        if isinstance(part.get("properties"), dict)
        else {}
    )
    return closed | {key: strict(value) for key, value in part.items()}


def check(words: list[str], name: str) -> None:
    run = ebbtide_in_process(*words, "--json", cwd=ROOT)
    assert run.returncode == 0, run.stderr
    errors = Draft202012Validator(strict(schema(name))).iter_errors(
        json.loads(run.stdout)
    )
    assert [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
        for error in errors
    ] == []


@needs_all_features
def test_schemas__are_there_for_every_command_with_json() -> None:
    with_json = {
        c.name
        for c in find_commands(None)
        if "as_json" in inspect.signature(c.run).parameters
    }
    names = {path.stem for path in SCHEMAS.glob("*.json")}
    assert names == {*OF_A_TRACE.values(), *OTHERS.values()}
    assert {name.split("-")[0] for name in names} == with_json
    for name in names:
        Draft202012Validator.check_schema(schema(name))


@pytest.mark.parametrize("trace", slow(TRACES, but=QUICK))
def test_schemas__fit_what_commands_print_of_a_trace(trace: str) -> None:
    for command, name in OF_A_TRACE.items():
        check([*command.split(), f"traces/{trace}.ebb"], name)


@pytest.mark.parametrize(
    "command",
    slow(
        OTHERS,
        but=[
            one
            for one in OTHERS
            if not re.search("--layers|replay (traces.*pipelined|--params)|^diff", one)
        ],
    ),
    ids=lambda command: command.split()[0],
)
def test_schemas__fit_what_other_commands_print(command: str, tmp_path: Path) -> None:
    for name, content in (
        ("m", MACHINE),
        ("box", job_files.MACHINE),
        ("w", job_files.WORKLOAD | {"subgroup_params": 1e9}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    check(command.format(folder=tmp_path).split(), OTHERS[command])


def test_schemas__name_former_keys_as_such() -> None:
    recommend = schema("replay")["properties"]["recommend"]["properties"]
    assert recommend["deepspeed"]["deprecated"]
    assert "deprecated" not in recommend["deepspeed_config"]


def test_strict__refuses_a_key_that_is_not_documented() -> None:
    closed = Draft202012Validator(strict(schema("machines")))
    assert not closed.is_valid({"machines": [], "more": 1})
    assert Draft202012Validator(schema("machines")).is_valid(
        {"machines": [], "more": 1}
    )

"""Traces that earlier versions wrote: they open, and have the figures that their own
version printed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import ebbtide
from ebbtide.profiler.trace.schema import SCHEMA
from tests.conftest import ebbtide_in_process, slow_case

TRACES = sorted((Path(__file__).parent / "old_traces").glob("*.ebb"))
MAX_BYTES = 100_000
KEYS = ("activity", "iteration", "link", "rank", "substep")
# Sentences for people: their wording may change.
TEXTS = {"remarks", "notes"}
# Of versions before 0.3.0, whose shares were of the median iteration, and which counted
# the heap of jobs on the CPU.
DEFINED_ANEW = {"share", "free_pool", "min_free_bytes", "always_free_bytes"}


def lost(before: Any, now: Any, ignored: set[str], place: str = "") -> list[str]:
    """The figures of `before` that `now` lacks or has otherwise; keys may be added."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = before.keys() - ignored
        return [
            text
            for key in sorted(keys)
            for text in lost(before[key], now.get(key), ignored, f"{place}.{key}")
        ]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [
            text
            for n in range(len(now))
            for text in lost(before[n], now[n], ignored, f"{place}[{n}]")
        ]
    return [] if before == now else [f"{place}: {before} then, {now} now"]


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.stem)
def test_old_trace__has_the_figures_that_its_own_version_printed(
    trace: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(trace, tmp_path / trace.name)
    run = ebbtide_in_process("summary", copy, "--json")
    assert run.returncode == 0, run.stderr
    before = json.loads(trace.with_suffix(".json").read_text())
    ignored = TEXTS | (
        DEFINED_ANEW if trace.name < "0.3" or trace.name > "2" else set()
    )
    assert lost(before, json.loads(run.stdout), ignored) == []


@pytest.mark.parametrize(
    "command",
    ["windows", "memory", "findings", *(f"summary --by {key}" for key in KEYS)],
)
@pytest.mark.parametrize(
    "trace", [TRACES[0], slow_case(TRACES[-1])], ids=lambda path: path.stem
)
def test_old_trace__is_read_by_every_command_that_explains_it(
    command: str, trace: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(trace, tmp_path / trace.name)
    run = ebbtide_in_process(*command.split(), copy, "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)


def test_old_traces__are_of_every_schema_and_of_this_version_and_small() -> None:
    assert f"{ebbtide.__version__}-recorded" in {trace.stem for trace in TRACES}
    schemas = {
        json.loads((trace / "meta.json").read_text())["schema"] for trace in TRACES
    }
    assert schemas == set(range(1, SCHEMA + 1))
    for trace in TRACES:
        assert (
            sum(file.stat().st_size for file in trace.rglob("*") if file.is_file())
            < MAX_BYTES
        )

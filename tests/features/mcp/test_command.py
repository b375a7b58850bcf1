"""`ebbtide mcp`: a real client of the package mcp starts the server and calls its
tools."""

from __future__ import annotations

import asyncio
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_bad_input import refused
from tests.conftest import ebbtide_in_process

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")
ROOT = Path(__file__).parents[3]
TRACE = str(ROOT / "traces" / "h100-20b-async.ebb")
CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("summary", {"trace": TRACE}, "update"),
    ("findings", {"trace": TRACE}, "next: ebbtide"),
    ("windows", {"trace": TRACE, "min_bytes": "4GiB"}, "free"),
    (
        "replay",
        {"trace": TRACE, "machine": "h100-80gb", "policies": ["pipelined", "adaptive"]},
        "adaptive",
    ),
    ("plan", {"params": "1e9", "machines": ["rtx4090"]}, "rtx4090"),
    ("summary", {"trace": TRACE, "by": "iteration"}, "iteration"),
]


def ask(
    folder: Path, calls: list[tuple[str, dict[str, Any]]]
) -> tuple[set[str], list[tuple[bool, str]]]:
    """Return the names of the tools, and of each call whether it failed, and its
    text."""

    # Takes 2 s, also in workers that do not run these tests.
    from mcp import Client, StdioServerParameters

    async def run() -> tuple[set[str], list[tuple[bool, str]]]:
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "ebbtide", "mcp", "--folder", str(folder)],
        )
        async with Client(server) as client:
            names = {tool.name for tool in (await client.list_tools()).tools}
            results = [
                await client.call_tool(name, arguments) for name, arguments in calls
            ]
            texts = [
                "".join(getattr(part, "text", "") for part in result.content)
                for result in results
            ]
            return names, [
                (bool(result.is_error), text)
                for result, text in zip(results, texts, strict=True)
            ]

    return asyncio.run(run())


def tokens(text: str) -> int:
    """Return more tokens than tokenizers make of a text: one for every four letters,
    three digits, or other sign."""
    return len(re.findall(r"[^\W\d]{1,4}|\d{1,3}|[^\w\s]", text))


def test_mcp__answers_a_client(tmp_path: Path) -> None:
    names, ((failed, text), (refused_, message)) = ask(
        tmp_path, [("summary", {"trace": TRACE}), ("findings", {"trace": "--jobs.ebb"})]
    )
    assert names == {"summary", "findings", "windows", "replay", "plan", "dry_run"}
    assert not failed
    assert "backward" in text
    assert refused_
    assert "--jobs.ebb does not exist" in message


@pytest.mark.slow
def test_mcp__answers_are_short_and_a_dry_run_makes_a_trace(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import torch\ntorch.nn.Linear(8, 8, device='cuda')\n"
    )
    dry_run = ("dry_run", {"command": "python job.py", "output": "run.ebb"})
    calls = [
        *((name, arguments) for name, arguments, _ in CALLS),
        dry_run,
        ("summary", {"trace": "run.ebb"}),
    ]
    _, answers = ask(tmp_path, calls)
    for (name, _), (failed, text), expected in zip(
        calls,
        answers,
        [*(expected for *_, expected in CALLS), "predicted", "predicted"],
        strict=True,
    ):
        assert not failed, (name, text)
        assert expected in text, name
        assert tokens(text) < 2000, name


def test_mcp__refuses_a_folder_that_is_none(tmp_path: Path) -> None:
    assert "nowhere is not a folder" in refused(
        ebbtide_in_process("mcp", "--folder", "nowhere", cwd=tmp_path)
    )

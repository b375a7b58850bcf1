"""`ebbtide memory --at`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebbtide.cli import run
from ebbtide.profiler.trace import TraceBuilder

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}])
    stack = (
        "main (/job/train.py:9)\n_call_impl "
        "(/env/site-packages/torch/nn/modules/module.py:1)\nforward (/job/m.py:3)"
    )
    for start_ns, end_ns, size in ((0, None, 600), (5_000_000, None, 400)):
        rank.add(
            "allocations",
            start_ns=start_ns,
            end_ns=end_ns,
            device="cuda:0",
            bytes=size,
            stack=stack,
        )
    rank.memory(0, 600, "requested").memory(5_000_000, 1000, "requested")
    return builder.write(tmp_path / "run.ebb").path


def test_memory_at__json_has_the_keys_of_the_contract(
    trace: Path, capsys: Printed
) -> None:
    assert run(["memory", str(trace), "--at", "peak", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    holder = {
        "category": "activation",
        "module": None,
        "site": "forward (/job/m.py:3)",
        "bytes": 1000,
    }
    assert answer == {
        "rank": 0,
        "pool": "requested",
        "device": "cuda:0",
        "t_ms": 5.0,
        "bytes": 1000,
        "holders": [holder],
    }


@pytest.mark.parametrize(("at", "size"), [("4", 600), ("5ms", 1000), ("0.0095s", 1000)])
def test_memory_at__takes_a_time(
    trace: Path, capsys: Printed, at: str, size: int
) -> None:
    assert run(["memory", str(trace), "--at", at, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == size


def test_memory_at__prints_categories_and_holders(trace: Path, capsys: Printed) -> None:
    assert run(["memory", str(trace), "--at", "peak"]) == 0
    text = capsys.readouterr().out
    assert "at its peak, 5.00 ms after the start" in text
    assert "(pool `requested`)" in text
    assert "forward (/job/m.py:3)" in text
    assert " 100.0\n" in text


@pytest.mark.parametrize(
    "arguments", [["--at", "noon"], ["--at", "-5"], ["--device", "cuda:0"]]
)
def test_memory_at__refuses_bad_options_in_one_line(
    trace: Path, capsys: Printed, arguments: list[str]
) -> None:
    assert run(["memory", str(trace), *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_memory_at__without_memory_is_not_known(
    tmp_path: Path, capsys: Printed
) -> None:
    builder = TraceBuilder()
    builder.rank(0).phase("forward", 0, 5)
    path = builder.write(tmp_path / "run.ebb").path
    assert run(["memory", str(path), "--at", "peak", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["pool"], answer["bytes"], answer["holders"]) == (None, None, [])
    assert run(["memory", str(path), "--at", "peak"]) == 0
    assert "no memory of a device was recorded" in capsys.readouterr().out

"""Answers of commands that have to agree with each other, and with what the machine can
do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ebbtide.features.advise.changes import SYSTEM_SHARE
from ebbtide.interleave.replay.inputs import NETWORK_NOTE
from ebbtide.profiler.trace import TraceBuilder
from tests.conftest import ebbtide_in_process

ROOT = Path(__file__).parents[2]
BLOCKING, ASYNC = (
    ROOT / "traces" / f"{name}.ebb" for name in ("h100-20b-blocking", "a100-13b-async")
)
# Too large for one card even with adapters on weights of 4 bits.
SIZE = ("--params", "60B", "--machine", "rtx4090")


@pytest.fixture(autouse=True)
def _on_a_wide_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.mark.slow
def test_replay__budgets_nothing_that_a_smaller_gpu_does_not_have() -> None:
    printed = ebbtide_in_process(
        "replay", ASYNC, "--recommend", "--machine", "rtx4090"
    ).stdout
    assert (
        "recorded on a GPU of 40.00 GiB, not 23.64 GiB; forward and backward: of"
        in printed
    )
    assert NETWORK_NOTE in printed
    budgets = [
        int(size.replace("_", ""))
        for size in re.findall(r"\"(?:forward|backward|update)\": ([\d_]+)", printed)
    ]
    # 21 of 40 GiB were in use at the peak.
    assert len(budgets) == 3
    assert max(budgets) < 23.64 * 2**30
    assert min(budgets) < (23.65 - 20.9) * 2**30


def test_replay__says_why_a_policy_does_not_fit() -> None:
    policies = ("--policy", "zero-offload", "--policy", "gpu-only")
    printed = ebbtide_in_process(
        "replay", ASYNC, *policies, "--machine", "rtx4090", "--ranks-per-host", "4"
    ).stdout
    assert re.search(
        r"^zero-offload does not fit: it needs [\d.]+ GiB of host memory, and a rank "
        r"has",
        printed,
        re.M,
    )
    assert re.search(
        r"^gpu-only does not fit: it needs [\d.]+ GiB of device memory, more than is "
        r"free",
        printed,
        re.M,
    )


def test_plan__gives_one_answer_by_the_number_of_gpus() -> None:
    (plan,) = json.loads(
        ebbtide_in_process("plan", *SIZE, "--policy", "zero-offload", "--json").stdout
    )["plans"]
    assert plan["cheapest"]["ranks"] == plan["change"]["ranks"] == 8
    assert plan["action"]["settings"]["torchrun"] == {"nproc_per_node": 1, "nnodes": 8}
    assert plan["host_bytes"] <= (1 - SYSTEM_SHARE) * plan["host_capacity_bytes"]
    assert plan["host_capacity_bytes"] == 128 * 2**30
    alone = {tuple(change["levers"]): change for change in plan["alone"]}
    assert alone["ranks",]["action"]["settings"]["torchrun"]["nproc_per_node"] == 1


@pytest.mark.slow
def test_plan__shows_what_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = ebbtide_in_process("plan", *SIZE).stdout
    assert "not on one card, whatever else is changed: on 8" in printed
    assert "smallest machine that fits it with changes" not in printed
    assert " ".join(printed.split()).count(NETWORK_NOTE) == 1
    assert "5 % stays for the system" in printed
    assert re.search(r"^rtx4090 .* \d+/128 ", printed, re.M)


@pytest.mark.slow
def test_plan__code_has_checkpointing_for_deepspeed_and_one_set_of_changes() -> None:
    printed = ebbtide_in_process("plan", *SIZE, "--code", "rtx4090").stdout
    deepspeed, script = printed.split("Without DeepSpeed")
    for block in (deepspeed, script):
        assert "checkpoint(layer)" in block
    assert deepspeed.index("checkpoint(layer)") < deepspeed.index("enable(")
    assert "Cheapest" not in printed


def test_plan__refuses_a_recording_of_the_cpu(tmp_path: Path) -> None:
    builder = TraceBuilder(command=["python", "train.py", "--steps", "3"])
    rank = builder.rank(
        0, devices=[{"device": "cpu", "kind": "cpu", "capacity_bytes": 2**34}]
    )
    for number, phase in enumerate(("forward", "backward", "update")):
        rank.phase(phase, number * 10**6, (number + 1) * 10**6, 0).memory(
            number * 10**6, 2**20, "heap", "cpu"
        )
    builder.write(tmp_path / "cpu.ebb")
    done = ebbtide_in_process("plan", tmp_path / "cpu.ebb", "--machine", "a10")
    assert done.returncode == 2
    assert "was recorded on a CPU" in done.stderr
    assert (
        "ebbtide dry-run --gpu h100-80gb -o predicted.ebb -- python train.py --steps 3"
        in done.stderr
    )
    assert done.stderr.count("\n") == 1


def test_free_memory__is_one_figure_on_all_screens() -> None:
    for command in ("findings", "summary", "windows", "memory"):
        assert "57.99 GiB" in ebbtide_in_process(command, BLOCKING).stdout, command

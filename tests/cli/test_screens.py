"""The default output of each command at 80 columns, on the traces of the repository."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ebbtide_in_process, slow_case

TRACES = sorted(Path("traces").resolve().glob("*.ebb"))
QUICK = ("a100-torch-profiler", "h100-20b-blocking")
SCREENS = {
    "cycles": (),
    "diff": ("traces/h100-20b-blocking.ebb",),
    "findings": (),
    "memory": (),
    "memory at the peak": ("--at", "peak"),
    "memory out": ("--at", "oom"),
    "plan": (),
    "replay": (),
    "replay recommend": ("--recommend",),
    "sweep on two machines": ("--machine", "h100-80gb", "--machine", "a100-80gb-sxm"),
    "summary": (),
    **{
        f"summary by {key}": ("--by", key)
        for key in ("activity", "iteration", "link", "rank", "substep")
    },
    "windows": (),
}
QUICK_SCREENS = SCREENS.keys() - {"plan", "replay", "sweep on two machines"}
SHORT = (
    "diff",
    "findings",
    "memory",
    "memory at the peak",
    "memory out",
    "sweep on two machines",
    "replay recommend",
    "summary",
)
# A number at the end of a line whose unit is on the next one.
SPLIT = re.compile(r"\d\n\s*(ms|us|s|%|[kMGT]i?B|[kMGT]B/s)\b")

each_trace = pytest.mark.parametrize(
    "trace",
    [
        pytest.param(trace, marks=() if trace.stem in QUICK else pytest.mark.slow)
        for trace in TRACES
    ],
    ids=lambda trace: trace.stem,
)


@pytest.mark.parametrize(
    "names",
    [QUICK_SCREENS, slow_case(set(SCREENS) - QUICK_SCREENS)],
    ids=["quick", "others"],
)
@each_trace
def test_screens__fit_80_columns_and_say_how_to_go_on(
    trace: Path, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(trace.parents[1])
    for name in sorted(names):
        options = SCREENS[name]
        result = ebbtide_in_process(name.split()[0], *options, f"traces/{trace.name}")
        if result.returncode:
            # A trace of a job without an update cannot be replayed.
            assert result.returncode == 2
            assert name.startswith(("replay", "sweep", "plan"))
            continue
        lines = result.stdout.splitlines()
        assert [line for line in lines if len(line) > 80] == [], name
        assert "…" not in result.stdout, name
        assert not SPLIT.search(result.stdout), name
        assert len(lines) <= 24 or name not in SHORT, name
        # A trace that lacks what a command reads says what to record.
        assert any(mark in result.stdout for mark in ("next: ", "--all", "record")), (
            name
        )


def test_screens__sweeps_of_many_traces_are_one_screen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(TRACES[0].parents[1])
    traces = [
        f"traces/{trace.name}"
        for trace in TRACES[1::6]
        if trace.stem != "a100-torch-profiler"
    ]
    machines = ("--machine", "h100-80gb-sxm-published", "--machine", "a100-80gb-sxm")
    result = ebbtide_in_process(
        "sweep", *traces, *machines, "--policy", "zero-offload", "--policy", "pipelined"
    )
    lines = result.stdout.splitlines()
    assert "is the best of" in lines[0]
    assert any(line.startswith("next: ") for line in lines[-2:])
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24


def actions(trace: Path) -> list[dict[str, Any]]:
    """Return the actions of the findings of a trace, and of its recommendation, that
    were simulated."""
    findings = json.loads(ebbtide_in_process("findings", trace, "--json").stdout)[
        "findings"
    ]
    simulated = [
        finding["action"] for finding in findings if finding["action"] is not None
    ]
    recommended = ebbtide_in_process("replay", trace, "--recommend", "--json")
    if not recommended.returncode:
        recommendation = json.loads(recommended.stdout)["recommend"]
        assert recommendation["advice"] == recommendation["action"]
        simulated += (
            [recommendation["action"]] if recommendation["action"] is not None else []
        )
    return [action for action in simulated if action["iteration_ms"] is not None]


def policy_of_action(action: dict[str, Any]) -> str:
    """Return the policy that simulates the `action` of a finding or recommendation."""
    settings = action["settings"]
    if action["kind"] == "policy":
        overlap = settings.get("overlap", "none")
        policy: str = settings["policy"]
        return policy if overlap == "none" else f"{policy},overlap={overlap}"
    offload = settings["offload_optimizer"]
    return (
        "gpu-only"
        if offload.get("device") == "none"
        else f"twin-flow:{offload['ratio']:g}"
    )


@each_trace
def test_actions__give_the_gain_that_they_state(trace: Path) -> None:
    for action in actions(trace):
        replayed = ebbtide_in_process(
            "replay", trace, "--policy", policy_of_action(action), "--json"
        )
        (result,) = json.loads(replayed.stdout)["results"]
        assert result["iteration_ms"] == pytest.approx(action["iteration_ms"], rel=0.01)
        assert action["simulated_ms"] == action["iteration_ms"] < action["present_ms"]
        assert action["iteration_ms"] < (action["recorded_ms"] or math.inf)
        assert result["fits"] is not False

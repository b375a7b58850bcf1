"""benchmarks/gpu: its runner with steps made up here, its report from results written down here, and a rehearsal."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ebbtide.profiler.trace import Trace, TraceBuilder

GPU = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "gpu"
# What every step begins with: where its figures go.
TELL = """
import json, os, pathlib, subprocess, sys, time
out = pathlib.Path(sys.argv[1])
def tell(**figures):
    pathlib.Path(sys.argv[sys.argv.index("--figures") + 1]).write_text(json.dumps(figures))
"""
COUNT = "tell(runs=len(list(out.glob('ran*'))) + 1)\n(out / f'ran{time.monotonic_ns()}').touch()\n"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of benchmarks/gpu, or of its steps."""
    monkeypatch.syspath_prepend(GPU / "steps")
    monkeypatch.syspath_prepend(GPU)
    return importlib.import_module


@pytest.fixture
def step(tmp_path: Path, module: Callable[[str], Any]) -> Callable[..., Any]:
    """A step of some lines of Python."""

    def make(name: str, lines: str, **more: Any) -> Any:
        script = tmp_path / f"{name}.py"
        script.write_text(TELL + textwrap.dedent(lines))
        return module("listing").Step(name, f"about {name}", str(script), **{"needs_s": 1, "limit_s": 30, **more})

    return make


@pytest.fixture
def run(tmp_path: Path, module: Callable[[str], Any]) -> Callable[..., dict[str, Any]]:
    """Run steps into one folder; their results by name."""

    def all_of(*steps: Any, seconds: float = 60, **more: Any) -> dict[str, Any]:
        running = module("runner").Run(tmp_path / "out", time.monotonic() + seconds, **more)
        return {result["name"]: result for result in running.all(steps)}

    return all_of


def test_what_is_done_is_not_run_again_and_what_failed_is(step: Any, run: Any, tmp_path: Path) -> None:
    good, bad = step("good", COUNT), step("bad", COUNT + "sys.exit('it broke')")
    first, second = run(good, bad), run(good, bad)
    assert [second[name]["figures"]["runs"] for name in ("good", "bad")] == [1, 3]
    assert second["good"] == first["good"]
    assert second["bad"]["status"] == "failed"
    assert json.loads((tmp_path / "out" / "bad.json").read_text()) == second["bad"]


def test_a_rehearsal_does_not_count_as_done(step: Any, run: Any) -> None:
    good = step("good", COUNT)
    rehearsed = run(good, rehearse=True)["good"]
    assert "--rehearse" in rehearsed["command"]
    assert "--rehearse" not in run(good)["good"]["command"]


def test_a_step_that_fails_stops_no_other(step: Any, run: Any) -> None:
    found = run(step("bad", "tell(half=1)\nprint('much')\nsys.exit('it broke')"), step("good", "tell(whole=2)"))
    assert found["bad"]["why"] == "it broke"
    assert found["bad"]["tail"] == "much\nit broke\n"
    assert found["bad"]["figures"] == {"half": 1}
    assert found["good"]["status"] == "done"
    assert found["good"]["figures"] == {"whole": 2}


def test_a_limit_ends_the_whole_group_and_keeps_what_was_told(step: Any, run: Any, tmp_path: Path) -> None:
    lines = """
        child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
        process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
        process.stdout.readline()
        (out / "trace.ebb").mkdir()
        tell(child=process.pid)
        time.sleep(99)
    """
    found = run(step("slow", lines, limit_s=2.0))["slow"]
    assert found["status"] == "timed out"
    assert found["why"].startswith("stopped after ")
    assert _ended(found["figures"]["child"])
    assert (tmp_path / "out" / "trace.ebb.tar.gz").exists()
    assert not (tmp_path / "out" / "trace.ebb").exists()


def _ended(pid: int) -> bool:
    """Also where nobody has collected it yet."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def test_what_a_step_leaves_running_is_ended(step: Any, run: Any) -> None:
    lines = "tell(child=subprocess.Popen(['sleep', '99'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
    assert _ended(run(step("leaves", lines))["leaves"]["figures"]["child"])


def test_a_step_is_not_begun_with_too_little_time(step: Any, run: Any) -> None:
    found = run(step("long", "tell()", needs_s=100), step("short", "tell()"), seconds=30)
    assert found["long"]["status"] == "skipped"
    assert found["long"]["why"] == "30 s are left, and it needs about 100"
    assert found["short"]["status"] == "done"


def test_a_step_waits_for_what_it_reads(step: Any, run: Any) -> None:
    second = step("second", "tell()", after=("first",))
    assert run(second)["second"]["why"] == "it needs what first makes, which is not done"
    assert run(step("first", "tell()"), second)["second"]["status"] == "done"


def test_the_archive_holds_what_can_be_carried(
    step: Any, run: Any, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module("runner"), "MOST_BYTES", 20_000)
    archive = tmp_path / "back" / "gpu.tar.gz"
    run(step("big", "tell()\n(out / 'big.bin').write_bytes(os.urandom(20_000))"), pack=archive)
    with tarfile.open(archive) as tar:
        assert tar.getnames() == ["big.json"]


def test_the_steps_are_there_and_fit_their_calls(module: Any) -> None:
    steps = module("listing").ALL
    assert all(Path(one.command[0]).is_file() for one in steps)
    assert len({one.name for one in steps}) == len(steps)
    assert all(one.needs_s < one.limit_s < 9.5 * 60 for one in steps)
    names = [one.name for one in steps]
    assert all(names.index(name) < names.index(one.name) for one in steps for name in one.after)
    needs = {one.name: one.needs_s for one in steps}
    first = sum(one.needs_s for one in steps[: names.index("windows")])
    assert first < 9.5 * 60
    assert needs["windows"] + needs["deepspeed"] + needs["torchao"] < 9.5 * 60
    assert needs["cost"] + needs["policies-4b"] < 9.5 * 60


def _recorded(tmp_path: Path, told: dict[str, Any]) -> Trace:
    """The trace of a job on a GPU that did what it told."""
    ms = 1_000_000
    builder = TraceBuilder("recorded")
    rank = builder.rank(0)
    for number in range(6):
        at = number * 100 * ms
        for phase, begin, length in (("forward", 0, 20), ("backward", 20, 40), ("update", 60, 10)):
            start, end = at + begin * ms, at + (begin + length) * ms
            rank.phase(phase, start, start + ms, number, gpu_start_ns=start, gpu_end_ns=end)
    for copy in told["copies"]:
        length = (copy["end_ns"] - copy["start_ns"]) // copy["count"]
        for number in range(copy["count"]):
            start = copy["start_ns"] + number * length
            rank.transfer(
                copy["way"], start, start + length, copy["bytes"], host_memory="pinned", stream=7, name="copy"
            )
    for t in range(0, 3000, 10):
        rates = dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s"), 0.0)
        for copy in told["copies"]:
            if copy["start_ns"] < t * ms <= copy["end_ns"]:
                seconds = (copy["end_ns"] - copy["start_ns"]) / 1e9
                rates[f"{copy['way']}_bytes_per_s"] = copy["bytes"] * copy["count"] / seconds
        rank.link(t * ms, 10 * ms, "gpm", **rates)
    for pool, size in (("requested", 900), ("allocated", 950), ("reserved", 1000), ("device", 1500)):
        rank.memory(0, size, pool)
    return builder.write(tmp_path / "run.ebb")


TOLD = {
    "params": 10,
    "phases_ms": {"forward": [20.0] * 6, "backward": [40.0] * 6, "update": [10.0] * 6},
    "copies": [
        {"way": "h2d", "bytes": 1 << 28, "count": 5, "start_ns": 1_000_000_000, "end_ns": 1_200_000_000},
        {"way": "d2h", "bytes": 1 << 28, "count": 5, "start_ns": 2_000_000_000, "end_ns": 2_200_000_000},
    ],
    "peaks": {"requested": 900, "allocated": 950, "reserved": 1000},
}


def _judged(module: Any, tmp_path: Path, told: dict[str, Any]) -> dict[str, Any]:
    step = module("step").Step(tmp_path, False, tmp_path / "figures.json")
    module("recorded").compare(step, _recorded(tmp_path, TOLD), told)
    figures: dict[str, Any] = json.loads(step.file.read_text())
    return figures


def test_a_recording_of_a_gpu_that_agrees(module: Any, tmp_path: Path) -> None:
    figures = _judged(module, tmp_path, TOLD)
    assert set(figures["checks"].values()) == {True}
    assert figures["phases"]["forward"]["on_device"]
    assert figures["copies"][0]["bytes_by_counters"] == pytest.approx(5 * (1 << 28))


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"phases_ms": {**TOLD["phases_ms"], "update": [10.2] * 6}}, "phases agree within 1 %"),
        ({"copies": [{**TOLD["copies"][0], "count": 6}]}, "known copies are found"),
        ({"copies": [{**TOLD["copies"][0], "count": 6}]}, "counters agree with copies within 10 %"),
        ({"peaks": {**TOLD["peaks"], "requested": 901}}, "peaks agree with torch's"),
    ],
)
def test_a_recording_of_a_gpu_that_does_not(module: Any, tmp_path: Path, change: dict[str, Any], check: str) -> None:
    assert _judged(module, tmp_path, {**TOLD, **change})["checks"][check] is False


def test_sequences_and_budgets_stay_within_the_card(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = module("long_job")
    model = job.Halves(8, 16, 2, 64, 2)
    params = sum(param.nbytes for param in model.parameters())
    state, card = 3e9, 100e9
    # Beside parameters, of so many sequences.
    taken = {"forward": lambda count: 1e9 + 2e9 * count, "backward": lambda count: 2e9 + 7e9 * count}
    monkeypatch.setattr(job, "peaks", lambda _, count, __: tuple(take(count) for take in taken.values()))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (card - params, card))
    sequences, budget = job.filled(model, 16, state)
    room = card - params - 0.05 * card
    assert sequences == 13
    assert all(taken[phase](sequences) + budget[phase] <= room for phase in taken)
    assert taken["backward"](sequences + 1) + budget["backward"] > room
    assert 0 < budget["backward"] < state < budget["forward"] < budget["update"] <= room


def _pair(measured: float, predicted: float) -> dict[str, float]:
    return {"measured": measured, "predicted": predicted, "ratio": measured / predicted}


PHASES = ("forward", "backward", "update", "iteration")
FIGURES: dict[str, dict[str, Any]] = {
    "calibrate": {
        "rates": {"h2d_bytes_per_s": 5.5e10},
        "counters": {
            "nvml-counters": {"refused": "Not Supported"},
            "gpm": {way: {"scale": 0.98, "lag_ms": 71.0, "dropouts": 0.0, "samples": 9} for way in ("h2d", "d2h")},
        },
        "checks": {"a source is right": True, "only there": None, "not so": False},
    },
    "policies-1.5b": {
        "params": 1_500_000_000,
        "device": "NVIDIA",
        "beforehand": {"update_ms": {"adaptive": 400.0}},
        "results": {
            "adaptive": {
                **{f"{phase}_ms": _pair(440.0, 400.0) for phase in PHASES},
                "peak_device_bytes": _pair(9.1e9, 9.1e9),
            }
        },
        "bound": {"exposed_ms": 400.0},
        "failed": {"pipelined": "exit status 1"},
    },
    "cost": {"step_ms": [{"bare": 100.0, "ebbtide": 100.5, "torch.profiler": 120.0}]},
    "deepspeed": {
        "params": 1_500_000_000,
        "ms": {
            "DeepSpeed ZeRO-Offload": dict.fromkeys(("forward", "backward", "step", "iteration"), 3000.0),
            "ebbtide adaptive": dict.fromkeys(("forward", "backward", "step", "iteration"), 1500.0),
        },
        "left_out": {"DeepSpeed SuperOffload": "it took more than 110 s"},
    },
    "torchao": {"peers": [{"name": "torchao", "about": "CPUOffloadOptimizer"}], "skipped": {}},
    "windows": {
        "runs": {
            "adaptive, by phase": {
                "median_iteration_ms": 4000.0,
                "update_ms": 300.0,
                "parked": 9,
                "subgroups": 20,
                "state_peak_bytes": 1.5e10,
                "allocator_retries": 0,
                "card": {"capacity_bytes": 150_000_000_000, "most_bytes": 140_000_000_000, "readings": 100},
            }
        }
    },
}


def test_the_report_from_recorded_results(module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = {"date": "2026-11-21", "rehearsed": False, "gpu": "NVIDIA", "cpu": "CPU", "cores": 16, "versions": {}}
    (tmp_path / "summary.json").write_text(json.dumps(about))
    for name, figures in FIGURES.items():
        result = {"name": name, "about": "", "status": "done", "why": None, "seconds": 1.0, "figures": figures}
        module("runner").write(tmp_path, result)
    module("report").report(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "| calibrate |  | done in 1 s, not so: not so |",
        "| calibrate | only there | needs a GPU |",
        "| `gpm` | h2d | 0.980 | 71.000 | 0.000 | 9.000 |  |",
        "| `nvml-counters` | d2h | - | - | - | - | Not Supported |",
        "`adaptive` exposes 440.0 ms, the bound is 400.0 ms: 1.10 times it.",
        "`pipelined` failed: exit status 1",
        "| ebbtide | 1.005 (1.005 to 1.005) |",
        "| ebbtide adaptive | 1,500.0 | 1,500.0 | 1,500.0 | 1,500.0 | 2.00 |",
        "DeepSpeed SuperOffload: not measured: it took more than 110 s",
        "It was stopped before it told 'backward_ms'.",
        "| adaptive, by phase | 4,000.0 | 300.0 | 9 of 20 | 15.00 | 140.00 | 150.00 | 0 |",
    ):
        assert line in lines
    assert not any("rehearsal" in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rehearsal_from_end_to_end(tmp_path: Path) -> None:
    def script(name: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
        command: Sequence[str | Path] = [sys.executable, GPU / name, tmp_path / "out", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})

    done = script("run.py", "--rehearse", "--pack", tmp_path / "gpu.tar.gz")
    results = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "out").glob("*.json")}
    results = {name: result for name, result in results.items() if "status" in result}
    assert done.returncode == 0, {name: result["tail"][-500:] for name, result in results.items() if result["why"]}
    checks = {name: result["figures"].get("checks", {}) for name, result in results.items()}
    assert checks["bits"]["one digest under every policy and on the CPU"]
    assert checks["policies-1.5b"]["the same losses to the bit under every policy"]
    assert checks["windows"]["the same losses to the bit"]
    assert script("report.py").stdout.startswith("**A rehearsal without a GPU")

"""`benchmarks/gpu`: its runner with small steps, its report from given results, and a rehearsal."""

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

from ebbtide.phases import PHASES
from ebbtide.profiler.trace import Trace, TraceBuilder

GPU = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "gpu"
# The first lines of every step: a function that writes its figures.
PREAMBLE = """
import json, os, pathlib, subprocess, sys, time
out = pathlib.Path(sys.argv[1])
def add(**figures):
    pathlib.Path(sys.argv[sys.argv.index("--figures") + 1]).write_text(json.dumps(figures))
"""
COUNT = "add(runs=len(list(out.glob('ran*'))) + 1)\n(out / f'ran{time.monotonic_ns()}').touch()\n"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that imports a module of benchmarks/gpu or of its steps."""
    monkeypatch.syspath_prepend(GPU / "steps")
    monkeypatch.syspath_prepend(GPU)
    return importlib.import_module


@pytest.fixture
def step(tmp_path: Path, module: Callable[[str], Any]) -> Callable[..., Any]:
    """Return a function that makes a step of a few lines of Python."""

    def make(name: str, lines: str, **options: Any) -> Any:
        script = tmp_path / f"{name}.py"
        script.write_text(PREAMBLE + textwrap.dedent(lines))
        return module("listing").BenchmarkStep(
            name, f"about {name}", str(script), **{"needs_s": 1, "limit_s": 30, **options}
        )

    return make


@pytest.fixture
def run(tmp_path: Path, module: Callable[[str], Any]) -> Callable[..., dict[str, Any]]:
    """Return a function that runs steps into one folder and returns their results by name."""

    def run_all(*steps: Any, seconds: float = 60, **options: Any) -> dict[str, Any]:
        runner = module("runner").StepRunner(tmp_path / "out", time.monotonic() + seconds, **options)
        return {result["name"]: result for result in runner.run_all(steps)}

    return run_all


def test_runner__repeats_failed_steps_but_not_finished_ones(step: Any, run: Any, tmp_path: Path) -> None:
    good, bad = step("good", COUNT), step("bad", COUNT + "sys.exit('it broke')")
    first, second = run(good, bad), run(good, bad)
    assert [second[name]["figures"]["runs"] for name in ("good", "bad")] == [1, 3]
    assert second["good"] == first["good"]
    assert second["bad"]["status"] == "failed"
    assert json.loads((tmp_path / "out" / "bad.json").read_text()) == second["bad"]


def test_runner__a_rehearsal_does_not_count_as_done(step: Any, run: Any) -> None:
    good = step("good", COUNT)
    rehearsed = run(good, rehearse=True)["good"]
    assert "--rehearse" in rehearsed["command"]
    assert "--rehearse" not in run(good)["good"]["command"]


def test_runner__a_failed_step_stops_no_other(step: Any, run: Any) -> None:
    results = run(step("bad", "add(half=1)\nprint('much')\nsys.exit('it broke')"), step("good", "add(whole=2)"))
    assert results["bad"]["why"] == "it broke"
    assert results["bad"]["tail"] == "much\nit broke\n"
    assert results["bad"]["figures"] == {"half": 1}
    assert results["good"]["status"] == "done"
    assert results["good"]["figures"] == {"whole": 2}


def test_runner__the_time_limit_ends_the_process_group_and_keeps_the_figures(
    step: Any, run: Any, tmp_path: Path
) -> None:
    lines = """
        child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
        process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
        process.stdout.readline()
        (out / "trace.ebb").mkdir()
        add(child=process.pid)
        time.sleep(99)
    """
    results = run(step("slow", lines, limit_s=2.0))["slow"]
    assert results["status"] == "timed out"
    assert results["why"].startswith("stopped after ")
    assert _ended(results["figures"]["child"])
    assert (tmp_path / "out" / "trace.ebb.tar.gz").exists()
    assert not (tmp_path / "out" / "trace.ebb").exists()


def _ended(pid: int) -> bool:
    """Return whether a process has ended within two seconds, collected by its parent or not."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def test_runner__ends_processes_that_a_step_leaves_running(step: Any, run: Any) -> None:
    lines = "add(child=subprocess.Popen(['sleep', '99'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
    assert _ended(run(step("leaves", lines))["leaves"]["figures"]["child"])


def test_runner__does_not_start_a_step_with_too_little_time(step: Any, run: Any) -> None:
    results = run(step("long", "add()", needs_s=100), step("short", "add()"), seconds=30)
    assert results["long"]["status"] == "skipped"
    assert results["long"]["why"] == "30 s left, but it needs about 100 s"
    assert results["short"]["status"] == "done"


def test_runner__skips_a_step_whose_input_is_missing(step: Any, run: Any) -> None:
    second = step("second", "add()", after=("first",))
    assert run(second)["second"]["why"] == "it reads results of first, which are not done"
    assert run(step("first", "add()"), second)["second"]["status"] == "done"


def test_pack__the_archive_has_a_size_limit(
    step: Any, run: Any, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module("runner"), "MAX_ARCHIVE_BYTES", 20_000)
    archive = tmp_path / "back" / "gpu.tar.gz"
    run(step("big", "add()\n(out / 'big.bin').write_bytes(os.urandom(20_000))"), pack=archive)
    with tarfile.open(archive) as tar:
        assert tar.getnames() == ["big.json"]


def test_listing__steps_exist_and_fit_their_calls(module: Any) -> None:
    steps = module("listing").ALL
    assert all(Path(step.command[0]).is_file() for step in steps)
    assert len({step.name for step in steps}) == len(steps)
    assert all(step.needs_s < step.limit_s < 9.5 * 60 for step in steps)
    names = [step.name for step in steps]
    assert all(names.index(name) < names.index(step.name) for step in steps for name in step.after)
    needs = {step.name: step.needs_s for step in steps}
    first = sum(step.needs_s for step in steps[: names.index("windows")])
    assert first < 9.5 * 60
    assert needs["windows"] + needs["deepspeed"] + needs["torchao"] < 9.5 * 60
    assert needs["cost"] + needs["policies-4b"] < 9.5 * 60


def _recorded(tmp_path: Path, own: dict[str, Any]) -> Trace:
    """Make the trace of a job on a GPU with the phases and copies of its own results."""
    ms = 1_000_000
    builder = TraceBuilder("recorded")
    rank = builder.rank(0)
    for number in range(6):
        iteration_start = number * 100 * ms
        for phase, begin, length in (("forward", 0, 20), ("backward", 20, 40), ("update", 60, 10)):
            start = iteration_start + begin * ms
            end = start + length * ms
            rank.phase(phase, start, start + ms, number, gpu_start_ns=start, gpu_end_ns=end)
    for copy in own["copies"]:
        length = (copy["end_ns"] - copy["start_ns"]) // copy["count"]
        for number in range(copy["count"]):
            start = copy["start_ns"] + number * length
            rank.transfer(
                copy["way"], start, start + length, copy["bytes"], host_memory="pinned", stream=7, name="copy"
            )
    for t in range(0, 3000, 10):
        rates = dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s"), 0.0)
        for copy in own["copies"]:
            if copy["start_ns"] < t * ms <= copy["end_ns"]:
                seconds = (copy["end_ns"] - copy["start_ns"]) / 1e9
                rates[f"{copy['way']}_bytes_per_s"] = copy["bytes"] * copy["count"] / seconds
        rank.link(t * ms, 10 * ms, "gpm", **rates)
    for pool, size in (("requested", 900), ("allocated", 950), ("reserved", 1000), ("device", 1500)):
        rank.memory(0, size, pool)
    return builder.write(tmp_path / "run.ebb")


OWN = {
    "params": 10,
    "phases_ms": {"forward": [20.0] * 6, "backward": [40.0] * 6, "update": [10.0] * 6},
    "copies": [
        {"way": "h2d", "bytes": 1 << 28, "count": 5, "start_ns": 1_000_000_000, "end_ns": 1_200_000_000},
        {"way": "d2h", "bytes": 1 << 28, "count": 5, "start_ns": 2_000_000_000, "end_ns": 2_200_000_000},
    ],
    "peaks": {"requested": 900, "allocated": 950, "reserved": 1000},
}


def _compare(module: Any, tmp_path: Path, own: dict[str, Any]) -> dict[str, Any]:
    step = module("step").StepContext(tmp_path, False, tmp_path / "figures.json")
    module("recorded").compare(step, _recorded(tmp_path, OWN), own)
    figures: dict[str, Any] = json.loads(step.file.read_text())
    return figures


def test_recorded__a_trace_that_agrees_passes_all_checks(module: Any, tmp_path: Path) -> None:
    figures = _compare(module, tmp_path, OWN)
    assert set(figures["checks"].values()) == {True}
    assert figures["phases"]["forward"]["on_device"]
    assert figures["copies"][0]["bytes_by_counters"] == pytest.approx(5 * (1 << 28))


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"phases_ms": {**OWN["phases_ms"], "update": [10.2] * 6}}, "phases agree within 1 %"),
        ({"copies": [{**OWN["copies"][0], "count": 6}]}, "known copies are found"),
        ({"copies": [{**OWN["copies"][0], "count": 6}]}, "counters agree with copies within 10 %"),
        ({"peaks": {**OWN["peaks"], "requested": 901}}, "peaks agree with torch's"),
    ],
)
def test_recorded__a_trace_that_differs_fails_its_check(
    module: Any, tmp_path: Path, change: dict[str, Any], check: str
) -> None:
    assert _compare(module, tmp_path, {**OWN, **change})["checks"][check] is False


def test_fill_card__sequences_and_budgets_fit_the_card(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = module("long_job")
    model = job.CheckpointedGPT(8, 16, 2, 64, 2)
    params = sum(param.nbytes for param in model.parameters())
    state, card = 3e9, 100e9
    # Peak memory without parameters by number of sequences.
    peak_bytes = {"forward": lambda count: 1e9 + 2e9 * count, "backward": lambda count: 2e9 + 7e9 * count}
    monkeypatch.setattr(job, "peaks", lambda _, count, __: tuple(peak(count) for peak in peak_bytes.values()))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (card - params, card))
    sequences, budget = job.fill_card(model, 16, state)
    usable = card - params - 0.05 * card
    assert sequences == 13
    assert all(peak_bytes[phase](sequences) + budget[phase] <= usable for phase in peak_bytes)
    assert peak_bytes["backward"](sequences + 1) + budget["backward"] > usable
    assert 0 < budget["backward"] < state < budget["forward"] < budget["update"] <= usable


def _pair(measured: float, predicted: float) -> dict[str, float]:
    return {"measured": measured, "predicted": predicted, "ratio": measured / predicted}


FIGURE_PHASES = (*PHASES, "iteration")
FIGURES: dict[str, dict[str, Any]] = {
    "calibrate": {
        "rates": {"h2d_bytes_per_s": 5.5e10},
        "counters": {
            "nvml-counters": {"refused": "Not Supported"},
            "gpm": {
                direction: {"scale": 0.98, "lag_ms": 71.0, "dropouts": 0.0, "samples": 9}
                for direction in ("h2d", "d2h")
            },
        },
        "checks": {"a source is right": True, "only there": None, "not so": False},
    },
    "policies-1.5b": {
        "params": 1_500_000_000,
        "device": "NVIDIA",
        "beforehand": {"update_ms": {"adaptive": 400.0}},
        "results": {
            "adaptive": {
                **{f"{phase}_ms": _pair(440.0, 400.0) for phase in FIGURE_PHASES},
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


def test_print_report__prints_all_tables(module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = {"date": "2026-11-21", "rehearsed": False, "gpu": "NVIDIA", "cpu": "CPU", "cores": 16, "versions": {}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    for name, figures in FIGURES.items():
        result = {"name": name, "about": "", "status": "done", "why": None, "seconds": 1.0, "figures": figures}
        module("runner").write_result(tmp_path, result)
    module("report").print_report(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    for expected in (
        "| calibrate |  | done in 1 s, failed checks: not so |",
        "| calibrate | only there | needs a GPU |",
        "| `gpm` | h2d | 0.980 | 71.000 | 0.000 | 9.000 |  |",
        "| `nvml-counters` | d2h | - | - | - | - | Not Supported |",
        "`adaptive` exposes 440.0 ms, the bound is 400.0 ms: 1.10 times the bound.",
        "`pipelined` failed: exit status 1",
        "| ebbtide | 1.005 (1.005 to 1.005) |",
        "| ebbtide adaptive | 1,500.0 | 1,500.0 | 1,500.0 | 1,500.0 | 2.00 |",
        "DeepSpeed SuperOffload: not measured: it took more than 110 s",
        "Stopped before 'backward_ms' was measured.",
        "| adaptive, by phase | 4,000.0 | 300.0 | 9 of 20 | 15.00 | 140.00 | 150.00 | 0 |",
    ):
        assert expected in lines
    assert not any("rehearsal" in printed for printed in lines)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rehearsal__runs_all_steps_and_prints_a_report(tmp_path: Path) -> None:
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

"""The runner of `benchmarks/gpu`, with small steps."""

from __future__ import annotations

import json
import tarfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.conftest import ended

# The first lines of every step: a function that writes its figures.
PREAMBLE = """
import json, os, pathlib, subprocess, sys, time
out = pathlib.Path(sys.argv[1])
def add(**figures):
    pathlib.Path(sys.argv[sys.argv.index("--figures") + 1]).write_text(json.dumps(figures))
"""
COUNT = (
    "add(runs=len(list(out.glob('ran*'))) + 1)\n(out / "
    "f'ran{time.monotonic_ns()}').touch()\n"
)


@pytest.fixture
def step(tmp_path: Path, module: Callable[[str], Any]) -> Callable[..., Any]:
    """Return a function that makes a step of a few lines of Python."""

    def make(name: str, lines: str, **options: Any) -> Any:
        script = tmp_path / f"{name}.py"
        script.write_text(PREAMBLE + textwrap.dedent(lines))
        return module("listing").BenchmarkStep(
            name,
            f"about {name}",
            str(script),
            **{"needs_s": 1, "limit_s": 30, **options},
        )

    return make


@pytest.fixture
def run(tmp_path: Path, module: Callable[[str], Any]) -> Callable[..., dict[str, Any]]:
    """Return a function that runs steps into one folder and returns their results by
    name."""

    def run_all(
        *steps: Any, seconds: float = 60, again: bool = False, **options: Any
    ) -> dict[str, Any]:
        runner = module("runner").StepRunner(
            tmp_path / "out", time.monotonic() + seconds, **options
        )
        return {result["name"]: result for result in runner.run_all(steps, again)}

    return run_all


def test_runner__repeats_what_has_failed_only_if_asked(
    step: Any, run: Any, tmp_path: Path
) -> None:
    good, bad = step("good", COUNT), step("bad", COUNT + "sys.exit('it broke')")
    first = run(good, bad)
    assert run(good, bad) == first
    again = run(good, bad, again=True)
    assert [again[name]["figures"]["runs"] for name in ("good", "bad")] == [1, 3]
    assert again["bad"]["status"] == "failed"
    assert json.loads((tmp_path / "out" / "bad.json").read_text()) == again["bad"]


def test_runner__a_failed_check_fails_the_step_and_a_missed_aim_does_not(
    step: Any, run: Any
) -> None:
    results = run(
        step(
            "check",
            "add(checks={'it holds': False, 'it is there': None, 'it is': True})",
        ),
        step("aim", "add(aims={'as fast': False})"),
    )
    assert results["check"]["status"] == "failed"
    assert results["check"]["why"] == "failed checks: it holds"
    assert results["aim"]["status"] == "done"


def test_runner__a_step_continues_with_its_figures_in_the_next_call(
    step: Any, run: Any
) -> None:
    lines = """
        file = pathlib.Path(sys.argv[sys.argv.index("--figures") + 1])
        rounds = json.loads(file.read_text())["rounds"] if file.exists() else []
        add(rounds=[*rounds, len(rounds)])
        sys.exit(75 if len(rounds) < 2 else 0)
    """
    long = step("long", lines, continues=True)
    assert [run(long)["long"]["status"] for _ in range(4)] == [
        "unfinished",
        "unfinished",
        "done",
        "done",
    ]
    assert run(long)["long"]["figures"]["rounds"] == [0, 1, 2]


def test_runner__keeps_the_figures_of_earlier_calls_of_a_step_that_has_too_little_time(
    step: Any, run: Any
) -> None:
    long = step("long", "add(first=1)\nsys.exit(75)", continues=True, needs_s=30)
    run(long)
    second = run(long, seconds=10)["long"]
    assert second["status"] == "unfinished"
    assert second["figures"] == {"first": 1}


def test_runner__a_killed_call_leaves_what_a_step_had_measured_and_the_next_runs_it_last(
    step: Any, run: Any, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each state that is written while a step runs is what is left if the call is
    killed then."""
    written: list[dict[str, Any]] = []
    runner = module("runner")
    write_result = runner.write_result

    def write(out: Path, result: dict[str, Any]) -> None:
        written.append(result)
        write_result(out, result)

    monkeypatch.setattr(runner, "KEEP_S", 0.05)
    monkeypatch.setattr(runner, "write_result", write)
    run(step("slow", "add(half=1)\ntime.sleep(1)\nadd(whole=1)"))
    cut_off = next(result for result in written if result["figures"] == {"half": 1})
    assert cut_off["status"] == "cut off"
    write_result(tmp_path / "out", cut_off)
    written.clear()
    run(step("slow", "add(whole=1)"), step("next", "add()"))
    assert [result["name"] for result in written if result["status"] == "done"] == [
        "next",
        "slow",
    ]


def test_runner__a_failed_step_stops_no_other(step: Any, run: Any) -> None:
    results = run(
        step("bad", "add(half=1)\nprint('much')\nsys.exit('it broke')"),
        step("good", "add(whole=2)"),
    )
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
    assert results["why"] == "stopped at its time limit"
    assert ended(results["figures"]["child"])
    assert (tmp_path / "out" / "trace.ebb.tar.gz").exists()
    assert not (tmp_path / "out" / "trace.ebb").exists()


@pytest.mark.parametrize(
    "options", ["", ", process_group=0", ", start_new_session=True"]
)
def test_runner__ends_processes_that_a_step_leaves_running(
    step: Any, run: Any, options: str
) -> None:
    lines = (
        "add(child=subprocess.Popen(['sleep', '99'], "
        f"stdout=subprocess.DEVNULL{options}).pid)"
    )
    assert ended(run(step("leaves", lines))["leaves"]["figures"]["child"])


def test_runner__does_not_start_a_step_with_too_little_time(
    step: Any, run: Any
) -> None:
    results = run(
        step("long", "add()", needs_s=100), step("short", "add()"), seconds=30
    )
    assert results["long"]["status"] == "skipped"
    assert results["long"]["why"] == "30 s left, but it needs about 100 s"
    assert results["short"]["status"] == "done"


def test_pack__the_archive_has_a_size_limit(
    step: Any, run: Any, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module("runner"), "MAX_ARCHIVE_BYTES", 20_000)
    archive = tmp_path / "back" / "gpu.tar.gz"
    run(
        step("big", "add()\n(out / 'big.bin').write_bytes(os.urandom(20_000))"),
        pack=archive,
    )
    with tarfile.open(archive) as tar:
        assert tar.getnames() == ["big.json"]


def test_runner__runs_steps_beside_all_others_and_again_in_each_call(
    step: Any, run: Any
) -> None:
    wait = "while not (out / 'begun').exists(): time.sleep(0.01)\n"
    compiler = step("compiler", wait + COUNT, beside=True)
    other = step("other", "(out / 'begun').touch()\nadd()\n")
    first = run(compiler, other, seconds=20)
    assert [first[name]["status"] for name in ("compiler", "other")] == ["done", "done"]
    assert run(compiler, other)["compiler"]["figures"]["runs"] == 2


def test_runner__an_interrupt_ends_what_runs_beside(
    step: Any, run: Any, module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module("runner"), "KEEP_S", 0.05)
    pid = tmp_path / "pid"
    lines = f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(99)"
    compiler = step("compiler", lines, beside=True)

    def interrupt(_: Path) -> None:
        if (
            pid.exists()
            and pid.read_text()
            and (tmp_path / "out" / "other.json").exists()
        ):
            raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(compiler, step("other", "time.sleep(3)\nadd()"), report=interrupt)
    assert time.monotonic() - begun < 25
    assert ended(int(pid.read_text()))


def test_listing__steps_exist_and_fit_their_calls(module: Any) -> None:
    calls, steps = module("listing").CALLS, module("listing").ALL
    assert all(Path(step.command[0]).is_file() for step in steps)
    assert all(step.needs_s < step.limit_s for step in steps)
    names = [
        step.name for call in calls.values() for step in call.steps if not step.beside
    ]
    assert len(set(names)) == len(names)
    for call in calls.values():
        in_turn = [step for step in call.steps if not step.beside]
        assert max(step.limit_s for step in call.steps) < 60 * call.minutes
        assert (
            sum(step.limit_s if step.continues else step.needs_s for step in in_turn)
            < 60 * call.minutes
        )


def test_listing__two_calls_fit_a_lease_with_the_starts_of_the_machine_and_the_packages(
    module: Any,
) -> None:
    """A start of the machine takes 90 s, the installation of packages 25 s; a lease has
    15 minutes."""
    minutes = {name: call.minutes for name, call in module("listing").CALLS.items()}
    for lease in (("first", "second"), ("third",), ("fourth",), ("fifth",)):
        assert sum(60 * minutes.pop(name) + 90 + 25 for name in lease) <= 15 * 60
    assert not minutes

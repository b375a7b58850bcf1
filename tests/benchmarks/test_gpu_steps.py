"""The steps of `benchmarks/gpu`: packages, parts, and what they compute from given
measurements."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import packaging
import pytest

from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.benchmarks.conftest import GPU, ended


def _recorded(tmp_path: Path, own: dict[str, Any]) -> Trace:
    """Make the trace of a job on a GPU with the phases and copies of its own
    results."""
    ms = 1_000_000
    builder = TraceBuilder("recorded")
    rank = builder.rank(0)
    for number in range(6):
        iteration_start = number * 100 * ms
        for phase, begin, length in (
            ("forward", 0, 20),
            ("backward", 20, 40),
            ("update", 60, 10),
        ):
            start = iteration_start + begin * ms
            end = start + length * ms
            rank.phase(
                phase, start, start + ms, number, gpu_start_ns=start, gpu_end_ns=end
            )
    for copy in own["copies"]:
        length = (copy["end_ns"] - copy["start_ns"]) // copy["count"]
        for number in range(copy["count"]):
            start = copy["start_ns"] + number * length
            rank.transfer(
                copy["way"],
                start,
                start + length,
                copy["bytes"],
                host_memory="pinned",
                stream=7,
                name="copy",
            )
    for t in range(0, 3000, 10):
        rates = dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s"), 0.0)
        for copy in own["copies"]:
            if copy["start_ns"] < t * ms <= copy["end_ns"]:
                seconds = (copy["end_ns"] - copy["start_ns"]) / 1e9
                rates[f"{copy['way']}_bytes_per_s"] = (
                    copy["bytes"] * copy["count"] / seconds
                )
        rank.link(t * ms, 10 * ms, "gpm", **rates)
    for pool, size in (
        ("requested", 900),
        ("allocated", 950),
        ("reserved", 1000),
        ("device", 1500),
    ):
        rank.memory(0, size, pool)
    return builder.write(tmp_path / "run.ebb")


OWN = {
    "params": 10,
    "phases_ms": {"forward": [20.0] * 6, "backward": [40.0] * 6, "update": [10.0] * 6},
    "copies": [
        {
            "way": "h2d",
            "bytes": 1 << 28,
            "count": 5,
            "start_ns": 1_000_000_000,
            "end_ns": 1_200_000_000,
        },
        {
            "way": "d2h",
            "bytes": 1 << 28,
            "count": 5,
            "start_ns": 2_000_000_000,
            "end_ns": 2_200_000_000,
        },
    ],
    "peaks": {"requested": 900, "allocated": 950, "reserved": 1000},
}


def _compare(module: Any, tmp_path: Path, own: dict[str, Any]) -> dict[str, Any]:
    step = module("step").StepContext(
        tmp_path, False, tmp_path / "figures.json", time.monotonic() + 60
    )
    module("recorded").compare(step, _recorded(tmp_path, OWN), own)
    figures: dict[str, Any] = json.loads(step.file.read_text())
    return figures


def test_recorded__a_trace_that_agrees_passes_all_checks(
    module: Any, tmp_path: Path
) -> None:
    figures = _compare(module, tmp_path, OWN)
    assert set(figures["checks"].values()) == {True}
    assert figures["phases"]["forward"]["on_device"]
    assert figures["copies"][0]["bytes_by_counters"] == pytest.approx(5 * (1 << 28))


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (
            {"phases_ms": {**OWN["phases_ms"], "update": [10.2] * 6}},
            "phases agree within 1 %",
        ),
        ({"copies": [{**OWN["copies"][0], "count": 6}]}, "known copies are found"),
        (
            {"copies": [{**OWN["copies"][0], "count": 6}]},
            "counters agree with copies within 10 %",
        ),
        ({"peaks": {**OWN["peaks"], "requested": 901}}, "peaks agree with torch's"),
    ],
)
def test_recorded__a_trace_that_differs_fails_its_check(
    module: Any, tmp_path: Path, change: dict[str, Any], check: str
) -> None:
    assert _compare(module, tmp_path, {**OWN, **change})["checks"][check] is False


def test_fill_card__sequences_and_budgets_fit_the_card(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = module("long_job")
    model = job.CheckpointedGPT(8, 16, 2, 64, 2)
    params = sum(param.nbytes for param in model.parameters())
    state, card = 3e9, 100e9
    # Peak memory without parameters by number of sequences.
    peak_bytes = {
        "forward": lambda count: 1e9 + 2e9 * count,
        "backward": lambda count: 2e9 + 7e9 * count,
    }
    monkeypatch.setattr(
        job,
        "peaks",
        lambda _, count, __: tuple(peak(count) for peak in peak_bytes.values()),
    )
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (card - params, card))
    sequences, budget = job.fill_card(model, 16, state)
    usable = card - params - 0.05 * card
    assert sequences == 13
    assert all(
        peak_bytes[phase](sequences) + budget[phase] <= usable for phase in peak_bytes
    )
    assert peak_bytes["backward"](sequences + 1) + budget["backward"] > usable
    assert (
        0 < budget["backward"] < state < budget["forward"] < budget["update"] <= usable
    )


def test_packages__the_machine_has_all_that_the_steps_need_or_it_is_fetched(
    module: Any,
) -> None:
    packages = module("packages")
    needed = packages.needed()
    assert {"highspy", "numpy", "markupsafe", "hjson", "torchao"} <= set(needed)
    assert packages.missing() == {}
    # What is fetched has the versions of the tests.
    constraints = packages.names(
        (GPU.parent.parent / "constraints.txt").read_text().splitlines()
    )
    pinned = {name for name in (*packages.BUILT, *packages.FETCHED) if "==" not in name}
    assert packages.names(list(pinned)) <= constraints


def test_packages__names_of_modules_can_be_imported(module: Any) -> None:
    modules = module("packages").importable()
    assert {"pynvml", "prometheus_client", "highspy"} <= set(modules)
    # Fetched for the machine with the GPU alone.
    assert [
        name for name in modules if importlib.util.find_spec(name.split(".")[0]) is None
    ] in ([], ["torchao.optim"])


def test_imports__fails_with_the_names_of_what_is_missing(tmp_path: Path) -> None:
    """In an interpreter without installed packages."""
    script = GPU / "steps" / "imports.py"
    (tmp_path / "packaging").symlink_to(Path(packaging.__file__).parent)
    command = [sys.executable, "-S", script, tmp_path, "--rehearse"]
    done = subprocess.run(
        command,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("cannot be imported: ")
    assert {"highspy", "prometheus_client", "deepspeed"} <= set(
        last.partition(": ")[2].split(", ")
    )


def test_run_part__returns_results_or_the_reason(module: Any) -> None:
    run_part = module("step").run_part
    assert run_part(["-c", "print('much')\nprint('{\"a\": 1}')"], 60)["a"] == 1
    assert (
        run_part(["-c", "raise ValueError('it broke')"], 60)["why"]
        == "ValueError: it broke"
    )
    assert (
        run_part(["-c", "import os; os.kill(os.getpid(), 11)"], 60)["why"]
        == "it died of SIGSEGV"
    )
    assert (
        run_part(["-c", "import time; time.sleep(99)"], 1.0)["why"]
        == "it took more than 1 s"
    )


def test_run_part__ends_what_it_leaves_in_groups_of_its_own(module: Any) -> None:
    """As ninja's compilers are."""
    code = (
        "import subprocess; p = subprocess.Popen(['sleep', '99'], process_group=0, "
        "stdout=-3); print(f'[{p.pid}]')"
    )
    step = module("step")
    result = step.run_part(
        ["-c", code.replace("f'[{p.pid}]'", "'{\"pid\": %d}' % p.pid")], 60
    )
    assert ended(result["pid"])


def test_table__rounds_continue_and_a_failed_contestant_is_left_out(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = module("table")
    ran: list[str] = []

    def run(step: Any, name: str, params: int) -> dict[str, Any]:
        ran.append(name)
        if name == "torch fused AdamW":
            return {"why": "it broke", "seconds": 9.0}
        if len(ran) == 4:
            step.end_s = 0.0
        return {"iteration_ms": [1000.0], "losses": [7.0], "seconds": 20.0}

    monkeypatch.setattr(table, "run", run)
    figures = tmp_path / "table.figures"
    names = ["ebbtide none", "torch fused AdamW", "ebbtide both"]
    words = [f"--contestant={name}" for name in names]
    monkeypatch.setattr(
        sys,
        "argv",
        ["table.py", str(tmp_path), "--figures", str(figures), "--rounds", "2", *words],
    )
    with pytest.raises(SystemExit) as stopped:
        table.main()
    assert stopped.value.code == 75
    assert len(ran) == 4
    table.main()
    result = json.loads(figures.read_text())
    assert [set(results) for results in result["rounds"]] == [
        {"ebbtide none", "ebbtide both"}
    ] * 2
    assert sorted(ran) == sorted([*names, "ebbtide none", "ebbtide both"])
    assert result["failed"] == {"torch fused AdamW": "it broke"}
    assert result["checks"] == {
        "every contestant ran": False,
        "the same losses to the bit with every overlap of ebbtide and in every round": True,
    }


@pytest.mark.parametrize("works", [False, True])
def test_smoke__runs_the_kernels_without_a_tool_that_refuses_the_device(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    """A tool that works and fails has found an error in the kernels, and that stays."""
    smoke, step = module("smoke"), module("step")

    def run_part(
        words: Any, limit_s: float, under: Any = (), **env: str
    ) -> dict[str, Any]:
        is_probe = words[0] == "-c"
        failed = under and not (is_probe and works)
        return (
            {"why": "Device not supported"}
            if failed
            else {"kernels": "the bits of the reference"}
        )

    monkeypatch.setattr(smoke, "run_part", run_part)
    monkeypatch.setattr("shutil.which", lambda name: f"/{name}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    context = step.StepContext(
        tmp_path, False, tmp_path / "figures", time.monotonic() + 60
    )
    result = smoke.run("kernels-memcheck", context)
    if works:
        assert (result["why"], result["under"]) == (
            "Device not supported",
            "compute-sanitizer",
        )
    else:
        assert "why" not in result
        assert (result["under"], result["refused"]) == (None, "Device not supported")


@pytest.mark.slow
def test_memory__fills_more_than_seems_available_at_first(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = module("memory")
    monkeypatch.setattr(
        memory, "meminfo", lambda: {"MemTotal": 1 << 40, "MemAvailable": 1 << 20}
    )
    words = [
        "memory.py",
        str(tmp_path),
        "--rehearse",
        "--figures",
        str(tmp_path / "figures"),
    ]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    memory.main()
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["filled_bytes"] == 4 * memory.TINY_BYTES
    assert figures["checks"] == {"0.268 GB of host memory": True}


@pytest.mark.slow
def test_memory__keeps_what_was_filled_where_memory_ends(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, step = module("memory"), module("step")
    script = tmp_path / "limited.py"
    script.write_text(
        "import resource, runpy, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        f"sys.path.insert(0, {str(GPU / 'steps')!r})\n"
        "del sys.argv[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    monkeypatch.setattr(
        memory,
        "run_part",
        lambda words, limit_s: step.run_part([script, *words], limit_s),
    )
    context = step.StepContext(
        tmp_path, False, tmp_path / "figures", time.monotonic() + 60
    )
    assert not memory.fill(context, 64e9, 1 << 28)
    assert 0 < context.figures["filled_bytes"] < 4 << 30
    assert "allocate" in context.figures["fill_ended"]


def test_build_extensions__compiles_once_in_a_call(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks meanwhile waits and gets the same result, also of a failure."""
    step = module("step")
    compiled: list[float] = []

    def run_part(words: Any, limit_s: float) -> dict[str, Any]:
        time.sleep(0.2)
        compiled.append(limit_s)
        return {"why": "no nvcc", "seconds": 0.2}

    monkeypatch.setattr(step, "run_part", run_part)
    monkeypatch.setattr(step, "EXTENSIONS", tmp_path / "extensions")
    monkeypatch.setenv(step.CALL, "one")
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(step.build_extensions, [1.0, 2.0]))
    assert [result["why"] for result in results] == ["no nvcc"] * 2
    assert len(compiled) == 1
    monkeypatch.setenv(step.CALL, "two")
    step.build_extensions(3.0)
    assert compiled[1:] == [3.0]

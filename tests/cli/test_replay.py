"""`ebbtide replay` on traces, workload files and sizes: its output, and the input that
it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.cli import run
from ebbtide.interleave.policies import POLICIES
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.profiler.trace import TraceBuilder, open_trace
from tests.analysis.findings.jobs import PARAMS, Job, devices, offloaded
from tests.conftest import ebbtide, ebbtide_in_process, needs_all_features, slow_case
from tests.interleave.job_files import MACHINE, WORKLOAD, write_files

Printed = pytest.CaptureFixture[str]
FIXED = ("zero-offload", "twin-flow:0.5", "interleaved:2")
OPTIONS = [part for policy in FIXED for part in ("--policy", policy)]
OWN = '''
from ebbtide.interleave.policies import PlanBuilder, policy


@policy("own", half=("first", "last"))
def own(workload, machine, choice):
    """Keep one half of the subgroups resident on the GPU."""
    builder = PlanBuilder(choice.text, workload)
    count = len(builder.sizes)
    home = range(count // 2) if choice.options["half"] == "first" else range(count // 2, count)
    builder.gradients(keep=frozenset(home))
    for subgroup in range(count):
        builder.resident(subgroup) if subgroup in home else builder.on_cpu(subgroup)
    return builder.plan()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a machine, a workload, complete and incomplete traces, and outputs
    that exist."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    for name, values, changes in (
        ("no-gpu-rate", MACHINE, {"gpu_update_params_per_s": None}),
        ("negative", MACHINE, {"h2d_bytes_per_s": -1}),
        ("wrong-unit", MACHINE, {"h2d_bytes_per_s": 50}),
        ("unknown-free", WORKLOAD, {"gpu_free_bytes": None}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(values | changes))
    (tmp_path / "truncated.json").write_text(json.dumps(MACHINE)[:99])
    offloaded(2, used=60).builder.write("run.ebb")
    devices(Job(1)).meta(optimizers=[{"params": PARAMS}]).builder.write("no-memory.ebb")
    offloaded(1, update=0).builder.write("no-update.ebb")
    TraceBuilder().write("empty.ebb")
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "unsound.py").write_text(
        OWN.replace("builder.on_cpu(subgroup)", "None")
    )
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "taken.png").write_text("kept")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("kept")
    return tmp_path


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def answer(capsys: Printed, arguments: str) -> Any:
    """Run `ebbtide replay` and return the JSON object that it prints."""
    assert run(["replay", *arguments.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=refuse)


def text(capsys: Printed, arguments: str) -> str:
    assert run(["replay", *arguments.split()]) == 0
    return capsys.readouterr().out


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


def test_replay__unknown_values_are_null(folder: Path, capsys: Printed) -> None:
    printed = answer(capsys, f"no-memory.ebb --machine m.json {' '.join(OPTIONS)}")
    assert printed["workload"]["gpu_free_bytes"] is None
    assert [result["fits"] for result in printed["results"]] == [True, None, None]
    # By default, a policy that needs the free memory is left out; if it is given, it is
    # refused (below).
    by_default = answer(capsys, "no-memory.ebb --machine m.json")
    assert list(by_default["skipped"]) == ["adaptive"]
    assert "adaptive" not in [result["policy"] for result in by_default["results"]]
    output = text(capsys, "no-memory.ebb --machine m.json")
    assert "note: the free memory of the device is not known" in output
    assert "left out: adaptive" in output
    assert "not known" in output


def test_replay__puts_the_gpu_of_a_machine_into_another_host(
    folder: Path, capsys: Printed
) -> None:
    options = "--workload w.json --policy zero-offload"
    by_name = answer(capsys, f"{options} --machine rtx4090@ddr5-2ch,8-cores")
    by_option = answer(capsys, f"{options} --machine rtx4090 --host ddr5-2ch,8-cores")
    assert by_option == by_name
    assert (
        by_name["machine"]["host"]["spec"]
        == "ddr5-4800-2ch,8-cores,pcie5x16,128GiB,1-rank"
    )
    assert by_name["accuracy"]["basis"] == "data sheets"


def test_replay__is_deterministic_and_its_output_can_be_replayed(folder: Path) -> None:
    first, second = (
        ebbtide(
            "replay",
            "run.ebb",
            "--machine",
            "m.json",
            *OPTIONS,
            "--json",
            cwd=folder,
            env={"PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    )
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == second.stdout
    printed = json.loads(first.stdout)
    (folder / "again-w.json").write_text(json.dumps(printed["workload"]))
    (folder / "again-m.json").write_text(json.dumps(printed["machine"]))
    again = ebbtide_in_process(
        "replay",
        "--workload",
        "again-w.json",
        "--machine",
        "again-m.json",
        *OPTIONS,
        "--json",
        cwd=folder,
    )
    assert again.stdout == first.stdout


def test_replay__takes_the_workload_from_the_trace(
    folder: Path, capsys: Printed
) -> None:
    workload = answer(capsys, f"run.ebb --machine m.json {' '.join(OPTIONS)}")[
        "workload"
    ]
    job = workload_of(open_trace("run.ebb"))
    assert (workload["name"], workload["params"], workload["forward_s"]) == (
        "run",
        PARAMS,
        0.1,
    )
    # The trace is of a larger GPU than the machine has.
    less = 80 * 2**30 - MACHINE["gpu_memory_bytes"]
    assert less > 0
    assert workload["gpu_free_bytes"] == [
        {"at_s": start_s, "bytes": size - less} for start_s, size in job.gpu_free or ()
    ]


def test_replay__table_has_a_row_per_policy_and_the_bound(
    folder: Path, capsys: Printed
) -> None:
    arguments = f"--workload w.json --machine m.json {' '.join(OPTIONS)}"
    results = {
        result["policy"]: result for result in answer(capsys, arguments)["results"]
    }
    output = text(capsys, f"{arguments} --baseline interleaved:2")
    assert output.startswith("job on box: 2 G parameters per rank in 20 subgroups\n")
    assert "(speed-up over interleaved:2)" in output
    lines = [
        row for row in output.splitlines() if row.strip().startswith((*FIXED, "bound"))
    ]
    rows = {row.split()[0]: row for row in reversed(lines) if "does not fit" not in row}
    rows = {name: rows[name] for name in (*FIXED, "bound")}
    assert list(rows) == [*FIXED, "bound"]
    for policy, result in results.items():
        speed_up = results["interleaved:2"]["iteration_ms"] / result["iteration_ms"]
        assert f" {speed_up:.2f}x " in rows[policy]
        assert f" {result['exposed_ms']:,.1f} " in rows[policy]
        assert (
            f" { ({True: 'yes', False: 'no', None: 'not known'}[result['fits']]) } "
            in rows[policy]
        )


def test_replay__says_at_which_rate_remainders_are_updated(
    folder: Path, capsys: Printed
) -> None:
    (folder / "remainder.json").write_text(
        json.dumps({**WORKLOAD, "master": "remainder"})
    )
    (folder / "measured.json").write_text(
        json.dumps({**MACHINE, "cpu_remainder_ratio": 1.25})
    )
    job = "--workload remainder.json --policy zero-offload"
    assert (
        "updates on the CPU run at 1.08 times the CPU's rate with fp32 masters (by "
        "bytes, not measured here)" in text(capsys, f"{job} --machine m.json")
    )
    assert "at 1.25 times the CPU's rate with fp32 masters (measured)" in text(
        capsys, f"{job} --machine measured.json"
    )
    assert "masters" not in text(
        capsys, "--workload w.json --machine m.json --policy zero-offload"
    )


@needs_all_features
def test_replay__explain_and_recommend_are_printed_and_in_the_json(
    folder: Path, capsys: Printed
) -> None:
    printed = answer(
        capsys,
        "--workload w.json --machine m.json --policy pipelined --explain --recommend",
    )
    steps = printed["explain"]
    assert [list(step) for step in steps] == [
        ["mechanism", "policy", "iteration_ms", "gain_ms"]
    ] * 8
    assert [step["policy"] for step in steps[-2:]] == [
        "adaptive,overlap=forward",
        "adaptive,overlap=both",
    ]
    assert printed["recommend"]["policy"] == "adaptive,overlap=auto"
    total_gain_ms = steps[0]["iteration_ms"] - steps[-1]["iteration_ms"]
    assert sum(step["gain_ms"] for step in steps) == pytest.approx(total_gain_ms)
    assert list(printed["recommend"])[:5] == [
        "policy",
        "line",
        "code",
        "deepspeed_config",
        "optimizer_code",
    ]
    split = printed["recommend"]["split"]
    former = None if split is None else split["deepspeed_config"]["zero_optimization"]
    assert printed["recommend"]["deepspeed"] == former
    output = text(
        capsys,
        "--workload w.json --machine m.json --policy pipelined --explain --recommend "
        "--all",
    )
    assert f"recommended: {printed['recommend']['line']}\n" in output
    for setup in printed["recommend"]["setups"]:
        assert f"\n{setup['policy']}: " in output
        assert all(
            f"\n{code}\n" in output
            for code in (setup["code"], setup["optimizer_code"])
            if code
        )
    offload = {"device": "cpu", "pin_memory": True, "ratio": 1.0}
    assert (
        printed["recommend"]["deepspeed_config"]["zero_optimization"][
            "offload_optimizer"
        ]
        == offload
    )
    assert all(step["mechanism"] in output for step in steps)
    fits = (
        "--params 1e9 --forward-ms 100 --backward-ms 300 --free-bytes 20GB --machine "
        "m.json --policy pipelined"
    )
    assert text(capsys, f"{fits} --recommend").startswith("Do not offload: ")
    assert "recommended: do not offload: " in text(capsys, f"{fits} --recommend --all")


def test_replay__replaces_outputs_with_force(folder: Path, capsys: Printed) -> None:
    arguments = "--workload w.json --machine m.json --plot taken.png --save new"
    text(capsys, f"{arguments} --policy pipelined --policy zero-offload --force")
    text(capsys, f"{arguments} --policy pipelined --force")
    assert (folder / "taken.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (folder / "new").iterdir()] == ["pipelined.ebb"]
    assert summarize(open_trace("new/pipelined.ebb")).iterations == 3


def test_replay__runs_policies_of_a_file(folder: Path, capsys: Printed) -> None:
    try:
        options = (
            "--policy-file own.py --policy own --policy own,half=last --policy "
            "twin-flow:0.5,params=pipelined"
        )
        printed = answer(capsys, f"--workload w.json --machine m.json {options}")
    finally:
        POLICIES.pop("own", None)
    first, last, static = printed["results"]
    assert [first["policy"], last["policy"]] == ["own", "own,half=last"]
    # First half resident, second half pipelined on the CPU: the same as a static split,
    # whose gradients on the device are those of DeepSpeed, in fp32.
    assert static["peak_device_bytes"] == 16 / 14 * first["peak_device_bytes"]
    assert {**first, "policy": "", "peak_device_bytes": 0} == {
        **static,
        "policy": "",
        "peak_device_bytes": 0,
    }
    assert last["peak_device_bytes"] == first["peak_device_bytes"]


# (arguments, part of the error message)
BAD = [
    ("", "name a trace, a --workload file, or a size"),
    ("run.ebb --workload w.json --machine m.json", "one of the three"),
    (
        "--workload w.json",
        "there is no machine: name one with --machine, a file (`ebbtide calibrate` "
        "writes it) or the name of one",
    ),
    ("run.ebb", "there is no machine"),
    (
        "--workload w.json --machine nosuch",
        "there is no machine 'nosuch': write the name of one that `ebbtide",
    ),
    ("--workload w.json --host ddr5-2ch", "name the machine, too"),
    (
        "--workload w.json --machine rtx4090 --host ddr5",
        "host 'ddr5': 'ddr5' is not a part of a host; write parts",
    ),
    (f"--workload w.json --machine {'x' * 300}", "there is no machine"),
    (
        "--workload w.json --machine truncated.json",
        "machine file truncated.json is not JSON",
    ),
    (
        "--workload truncated.json --machine m.json",
        "workload file truncated.json is not JSON",
    ),
    ("--workload own.py --machine m.json", "workload file own.py is not JSON"),
    ("--workload m.json --machine m.json", "m.json has no params"),
    ("--workload nowhere.json --machine m.json", "cannot be read"),
    ("--workload w.json --machine negative.json", "h2d_bytes_per_s is -1"),
    (
        "--workload w.json --machine wrong-unit.json",
        "h2d_bytes_per_s is 50; it must be a number from 1e+06 to 1e+13",
    ),
    (
        "--workload w.json --machine no-gpu-rate.json --policy gpu-only",
        "no gpu_update_params_per_s, which",
    ),
    (
        "--workload unknown-free.json --machine m.json --policy adaptive",
        "gpu_free_bytes",
    ),
    (
        "no-memory.ebb --machine m.json --policy adaptive",
        "needs to know what device memory is free",
    ),
    (
        "no-update.ebb --machine m.json",
        "no-update.ebb has no update phase: nothing to replay",
    ),
    ("empty.ebb --machine m.json", "nothing to replay"),
    ("nowhere.ebb --machine m.json", "nowhere.ebb does not exist"),
    (
        "--workload w.json --machine m.json --policy magic",
        "there is no policy 'magic'; there are adaptive",
    ),
    (
        "--workload w.json --machine m.json --policy twin-flow:3",
        "the share on the CPU is '3'; it must be a number from 0",
    ),
    (
        "--workload w.json --machine m.json --policy pipelined --policy twin-flow",
        "lacks the share",
    ),
    (
        "--workload w.json --machine m.json --policy-file nowhere.py",
        "is not a Python file that registers policies",
    ),
    (
        "--workload w.json --machine m.json --policy-file w.json",
        "is not a Python file that registers policies",
    ),
    (
        f"--workload w.json --machine m.json --policy-file {'x' * 300}.py",
        "is not a Python file",
    ),
    (
        "--workload w.json --machine m.json --policy-file broken.py",
        "broken.py cannot be run: ZeroDivisionError",
    ),
    (
        "--workload w.json --machine m.json --policy-file unsound.py --policy own",
        "unsound.py: policy own: subgroup 10 is n",
    ),
    (
        "--workload w.json --machine m.json --policy pipelined --baseline adaptive",
        "'adaptive' is not among the policies",
    ),
    ("--workload w.json --machine m.json --plot taken.png", "taken.png exists already"),
    (
        "--workload w.json --machine m.json --plot new.png --save taken",
        "taken exists already",
    ),
    (
        "--workload w.json --machine m.json --save taken --force",
        "taken is not a folder of traces",
    ),
    (
        "--workload w.json --machine m.json --plot folder.png --force",
        "folder.png is not a file",
    ),
    (
        "--workload w.json --machine m.json --plot new.png --save ./new.png",
        "cannot be both",
    ),
    (
        "--workload w.json --machine m.json --plot new.gif",
        "must end in .png, .svg, .pdf",
    ),
    (
        "--workload w.json --machine m.json --plot w.json/new.png",
        "cannot write w.json/new.png",
    ),
    ("--workload w.json --machine m.json --save w.json/new", "cannot write w.json/new"),
    (
        "--workload w.json --machine negative.json --plot new.png --save new",
        "h2d_bytes_per_s is -1",
    ),
    ("--params 0 --machine m.json", "at least 1"),
    ("--params many --machine m.json", "'many' is not a count"),
    ("--params 1e9 --free-bytes much --machine m.json", "'much' is not a size"),
    ("--params 1e9 --backward-ms inf --machine m.json", "backward_s is inf"),
]


@pytest.mark.parametrize("json_", [slow_case([]), ["--json"]])
def test_replay__bad_input_is_one_line_and_changes_no_file(
    folder: Path, capsys: Printed, json_: list[str]
) -> None:
    before = contents(folder)
    for arguments, message in BAD:
        try:
            status = run(["replay", *arguments.split(), *json_])
        finally:
            POLICIES.pop("own", None)
        out, err = capsys.readouterr()
        assert (status, out) == (2, ""), arguments
        assert err.startswith("ebbtide: "), arguments
        assert len(err.splitlines()) == 1, arguments
        assert message in err, arguments
        after = contents(folder)
        assert {
            name: after[name] for name in after if "__pycache__" not in name
        } == before, arguments


@needs_all_features
def test_replay__shows_late_updates_and_their_bound_where_no_policy_is_named(
    folder: Path, capsys: Printed
) -> None:
    late = answer(capsys, "--workload w.json --machine m.json")["late"]
    assert [result["policy"] for result in late["results"]] == [
        "adaptive,overlap=forward"
    ]
    assert late["results"][0]["iteration_ms"] >= late["bound"][
        "overlap_iteration_ms"
    ] * (1 - 1e-6)
    lines = text(capsys, "--workload w.json --machine m.json").splitlines()
    first = next(
        number for number, line in enumerate(lines) if line.startswith("bound ")
    )
    assert lines[first + 1].startswith("adaptive,overlap=forward ")
    assert lines[first + 2].startswith("bound, overlap=forward ")
    # Where the plans keep the state is behind --explain, unless policies are named.
    assert not any(line.startswith("adaptive: ") for line in lines)
    assert "\nadaptive: " in text(
        capsys, "--workload w.json --machine m.json --policy adaptive"
    )
    assert (
        answer(capsys, "--workload w.json --machine m.json --policy adaptive")["late"]
        is None
    )

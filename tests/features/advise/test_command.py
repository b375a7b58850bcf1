"""`ebbtide plan` on traces, workload files and sizes: its output, and the input that it
refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer import BadParameter

from ebbtide.cli import run
from ebbtide.cli.options import count
from ebbtide.features.advise import whole_job
from ebbtide.features.advise.job import compute_times
from ebbtide.machines.evidence import EvidenceRange
from tests.features.advise.jobs import gpu_machine
from tests.features.advise.test_levers import lora_trace
from tests.interleave.job_files import write_files

Printed = pytest.CaptureFixture[str]
TRACE = Path(__file__).parents[3] / "traces" / "a100-13b-async.ebb"
# The keys of the contract; more follow.
KEYS = {
    "machine", "fits", "change", "policy", "device_bytes", "host_bytes", "iteration_ms", "iteration_low_ms",
    "iteration_high_ms", "tokens_per_s", "cost_per_billion_tokens", "limited_by", "code",
}  # fmt: skip
SIZE = "--params 2e9 --layers 6 --hidden 5120"
ENDS = "low", "high"
# Without the search of `adaptive`.
FEW = f"{SIZE} --policy gpu-only --policy zero-offload"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    for name, size in (("small", 16e9), ("large", 80e9), ("tiny", 1.1e9)):
        gpu_machine(gpu_memory_bytes=size, name=name).save(tmp_path / f"{name}.json")
    (tmp_path / "taken.png").write_text("kept")
    return tmp_path


def answer(capsys: Printed, arguments: str) -> Any:
    """Run `ebbtide plan` and return the JSON object that it prints."""
    assert run(["plan", *arguments.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan__of_a_shape_also_moves_layers_and_saves_them(
    folder: Path, capsys: Printed
) -> None:
    shape = "--params 2e8 --layers 2 --hidden 2048 --sequence 512 --micro-batch 1"
    (whole,) = answer(capsys, f"{shape} --machine small.json --policy gpu-only")[
        "whole_job"
    ]
    assert (
        sum(whole["result"]["weights"].values())
        == sum(whole["result"]["activations"].values())
        == 2
    )
    assert whole["bound_ms"] <= whole["result"]["iteration_ms"]
    assert whole["tokens_per_s"] == pytest.approx(
        512e3 / whole["result"]["iteration_ms"]
    )
    assert (
        run(
            f"plan {shape} --machine small.json --policy gpu-only --save-workload layers.json".split()
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("fits on small as it is")
    assert lines[1].startswith("  where weights and activations of layers move, too: ")
    assert f", {whole['tokens_per_s']:,.0f} tokens/s (layers 2 " in lines[1]
    assert any("Rates are those with 1 rank on a host." in line for line in lines)
    command = lines[-1].removeprefix("next: ebbtide ")
    assert (
        command
        == "replay --workload layers.json --machine small.json --ranks-per-host 1"
    )
    assert (
        run(
            [
                *command.split(),
                "--policy",
                "adaptive,weights=auto,activations=auto",
                "--json",
            ]
        )
        == 0
    )
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["iteration_ms"] == pytest.approx(whole["result"]["iteration_ms"])
    assert (
        run(
            f"plan {shape} --machine small.json large.json --save-workload other.json".split()
        )
        == 2
    )
    assert "--save-workload needs --params" in capsys.readouterr().err


def test_plan__of_a_trace_on_its_machine_is_the_recommendation(
    folder: Path, capsys: Printed
) -> None:
    printed = answer(
        capsys,
        f"{TRACE} --machine a100-40gb-published --sequence 2048 --policy zero-offload",
    )
    (plan,) = printed["plans"]
    assert (plan["fits"], plan["change"], plan["policy"]) == (
        True,
        None,
        "zero-offload",
    )
    assert plan["iteration_low_ms"] < 6091 < plan["iteration_high_ms"]
    assert plan["tokens_per_s"] == pytest.approx(4 * 2048 / plan["iteration_ms"] * 1e3)
    assert (
        plan["lines"]["deepspeed_config"]["zero_optimization"]["offload_optimizer"][
            "device"
        ]
        == "cpu"
    )


def test_plan__of_a_workload_file_keeps_its_times(
    folder: Path, capsys: Printed
) -> None:
    policy = "interleaved:2"
    (plan,) = answer(capsys, f"--workload w.json --machine m.json --policy {policy}")[
        "plans"
    ]
    assert (
        run(
            [
                "replay",
                "--workload",
                "w.json",
                "--machine",
                "m.json",
                "--policy",
                policy,
                "--json",
            ]
        )
        == 0
    )
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert plan["change"] == {"policy": policy}
    assert plan["iteration_ms"] == pytest.approx(result["iteration_ms"])
    assert plan["tokens_per_s"] is None


def test_plan__table_is_sorted_and_ends_with_lines_to_paste(
    folder: Path, capsys: Printed
) -> None:
    prices = "--price-per-hour 1 --price-per-hour 100"
    assert (
        run(
            [
                "plan",
                *FEW.split(),
                "--machine",
                "small.json",
                "large.json",
                *prices.split(),
            ]
        )
        == 0
    )
    output = capsys.readouterr().out
    rows = [
        line.split()[0]
        for line in output.splitlines()
        if line.startswith(("small", "large"))
    ]
    assert rows == ["small", "large"]
    assert "offload" in output
    assert "cost/1e9 tokens" in output
    assert output.rstrip().endswith(
        "next: --code small (lines to paste), --explain (why, and the other policies)"
    )
    assert (
        run(["plan", *SIZE.split(), "--policy", "pipelined", "--code", "small.json"])
        == 0
    )
    output = capsys.readouterr().out
    assert output.startswith("small: pipelined, 1 rank on 1 host; change: offload\n")
    assert output.rstrip().endswith(
        "values marked `fill in` are not known: replace them by those of your job"
    )
    assert (
        "InterleavedAdamW(\n    model.parameters(),\n    lr=...,  # fill in: your "
        "learning rate" in output
    )
    assert (
        run(
            [
                "plan",
                *FEW.split(),
                "--machine",
                "small.json",
                "large.json",
                "--sort",
                "iteration",
            ]
        )
        == 0
    )
    output = capsys.readouterr().out
    assert [
        line.split()[0]
        for line in output.splitlines()
        if line.startswith(("small", "large"))
    ] == rows[::-1]


def test_plan__draws_a_picture(folder: Path, capsys: Printed) -> None:
    arguments = f"{FEW} --machine small.json large.json tiny.json --price-per-hour 2"
    assert run(["plan", *arguments.split(), "--plot", "plan.png"]) == 0
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_plan__host_changes_the_host_of_a_preset(folder: Path, capsys: Printed) -> None:
    (plan,) = answer(
        capsys,
        "--params 2e9 --policy zero-offload --machine rtx4090 --host "
        "ddr5-2ch,16-cores,pcie4x16,64GB",
    )["plans"]
    assert plan["host_capacity_bytes"] == 64e9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--machine large.json", "one of the three"),
        (f"{TRACE} {SIZE} --machine large.json", "one of the three"),
        ("nothing.ebb --machine large.json", "nothing.ebb"),
        (f"{SIZE} large.json", "name machines with --machine"),
        (f"{SIZE} --machine missing.json", "missing.json"),
        (
            f"{SIZE} --machine large.json --policy fastest",
            "there is no policy 'fastest'",
        ),
        (
            f"{SIZE} --machine large.json --price-per-hour 1 --price-per-hour 2",
            "2 prices for 1 machines",
        ),
        (f"{SIZE} --machine large.json --tokens 5", "not a multiple"),
        (f"{SIZE} --machine m.json", "has no gpu.flops_per_s"),
        (f"{SIZE} --machine large.json --host 3-cats", "3-cats"),
        (f"{SIZE} --machine large.json --plot plan.gif", "must end in .png"),
        (f"{SIZE} --machine large.json --plot taken.png", "taken.png"),
        ("--params 0 --machine large.json", "--params must be at least 1"),
        ("--workload w.json --machine m.json --layers 3", "need --params"),
    ],
)
def test_plan__refuses_in_one_line_before_it_plans(
    folder: Path,
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    message: str,
) -> None:
    monkeypatch.setattr(whole_job, "plan_whole_job", lambda *_: pytest.fail("it plans"))
    assert run(["plan", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert message in printed.err
    assert (folder / "taken.png").read_text() == "kept"


def test_plan__answers_first_in_the_settings_of_the_framework(
    folder: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lora_trace(folder / "lora.ebb")
    assert run(["plan", "lora.ebb", "--machine", "a10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "lora: does not fit on a10 (24.3 of 22.0 GiB)"
    assert lines[1].startswith("  cheapest change that fits (TRL, ")
    assert (
        lines[2] == "  per_device_train_batch_size: 1, gradient_accumulation_steps: 2"
    )
    assert lines[3] == "  smallest machine that fits it as it is: rtx5090 (31 GiB)"
    assert lines[4] == "  42 M trained of 8.07 G parameters, 1 rank, micro-batch 2"
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    (plan,) = answer(capsys, "lora.ebb --machine a10")["plans"]
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    assert (
        plan["action"]
        == plan["cheapest"]["action"]
        == {"kind": "trl", "settings": settings}
    )
    assert run(["plan", "lora.ebb", "--machine", "a10", "--code", "a10"]) == 0
    assert "Cheapest, in the settings of TRL (micro-batch):" in capsys.readouterr().out
    assert run(["plan", "lora.ebb", "--machine", "a100-40gb-pcie"]) == 0
    assert capsys.readouterr().out.startswith("lora: fits on a100-40gb-pcie as it is\n")


@pytest.mark.parametrize("text", ["2B", "2e9", "2G", "2000M"])
def test_plan__takes_a_size_with_a_suffix(
    folder: Path, capsys: Printed, text: str
) -> None:
    assert (
        answer(capsys, f"--params {text} --machine large.json --policy gpu-only")[
            "job"
        ]["params"]
        == 2e9
    )


def test_plan__prints_the_first_plans_by_the_middle_of_their_ranges(
    capsys: Printed,
) -> None:
    command = ["plan", *f"{SIZE} --policy gpu-only".split()]
    assert run(command) == 0
    printed = capsys.readouterr().out
    ranges = [
        tuple(map(float, pair))
        for pair in re.findall(r"  ([\d.]+)-([\d.]+)  ", printed)
    ]
    assert len(ranges) == 10
    middles = [low + high for low, high in ranges]
    # They are rounded to 0.01 s.
    assert all(before <= after + 0.02 for before, after in pairwise(middles))
    assert "\nThe first 10 of " in printed
    assert run([*command, "-v"]) == 0
    assert "\nThe first " not in capsys.readouterr().out


@pytest.mark.parametrize("count", [2, 3])
def test_plan__marks_a_range_with_few_projects_as_a_guess(
    count: int, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text says which projects are like the job, and how often they were held."""
    span = EvidenceRange(0.5, 2.0, ("first", "second", "third")[:count], count - 1.0)
    monkeypatch.setattr(compute_times, "evidence_for", lambda kind: span)
    command = f"plan {FEW} --ranks 1 --micro-batch 1 --machine h100-80gb"
    assert run(command.split()) == 0
    text = capsys.readouterr().out
    assert f"80 % range; {span.text}" in text
    assert (re.search(r"\d-[\d.]+\? ", text) is not None) is (count < 3)
    assert run([*command.split(), "--explain"]) == 0
    assert ("ranges are guesses" in capsys.readouterr().out) is (count < 3)
    assert run([*command.split(), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]
    assert plan["evidence"] == span.text
    assert plan["is_guess"] is (count < 3)
    assert plan["trust"]["sources"] == len(span.near) == len(plan["trust"]["nearest"])
    kept, offloaded = (ends_of(time) for time in plan["policies"])
    assert kept == pytest.approx([0.5, 2.0])
    # Rates of what is offloaded are uncertain beside.
    assert offloaded[0] < 0.5
    assert offloaded[1] > 2.0


def ends_of(time: dict[str, float]) -> list[float]:
    """Return the ends of the range of an iteration, over the likely time."""
    return [time[f"iteration_{end}_ms"] / time["iteration_ms"] for end in ENDS]


def test_plan__of_recorded_times_has_the_uncertainty_of_rates(capsys: Printed) -> None:
    command = [
        "plan",
        str(TRACE),
        "--policy",
        "zero-offload",
        "--machine",
        "a100-40gb-published",
    ]
    assert run(command) == 0
    assert "80 % range; by the uncertainty of rates." in capsys.readouterr().out
    assert run([*command, "rtx4090"]) == 0
    assert "80 % range; by the uncertainty of rates." in capsys.readouterr().out


@pytest.mark.parametrize("command", ["replay", "plan --ranks 2"])
def test_outputs__say_where_the_box_limits_a_rate_of_the_file(
    folder: Path, capsys: Printed, command: str
) -> None:
    machine = gpu_machine(
        gpu_memory_bytes=80e9, box={"ranks": 2, "cpu_update_params_per_s": 4e9}
    )
    for rate, is_limited in ((2e9, False), (4e9, True)):
        replace(machine, cpu_update_params_per_s=rate).save(folder / "box.json")
        arguments = (
            "--params 2e9 --policy zero-offload --machine box.json --ranks-per-host 2"
        )
        assert run([*command.split(), *arguments.split()]) == 0
        note = (
            "note: box limits cpu_update_params_per_s to 2e+09 of 4e+09 with 2 ranks: "
            "raise its total, too"
        )
        assert (note in capsys.readouterr().out) == is_limited


def test_count__is_exact_where_floating_point_is_not() -> None:
    """32.8e9 and 16.4e9 are no whole numbers in floating point."""
    assert (count("32.8B"), count("16.4B")) == (32_800_000_000, 16_400_000_000)
    for text in ("1.5", "nan", "-3", "1e999999"):
        with pytest.raises(BadParameter):
            count(text)

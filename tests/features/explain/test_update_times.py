"""The times of updates that DeepSpeed's timers print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import ebbtide_in_process
from tests.features.explain.asked import answers_to

LINE = (
    "time (ms) | {forward}: {a} | {backward}: {b} | {backward}_inner: 1.0 | step: {c}\n"
)
CONFIGURATION = json.dumps(
    {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "wall_clock_breakdown": True,
    }
)


def log(a: float, b: float, c: float, old: bool = False) -> str:
    names = ("fwd", "bwd") if old else ("forward", "backward")
    return LINE.format(forward=names[0], backward=names[1], a=a, b=b, c=c) * 3


@pytest.mark.parametrize(
    "content",
    [log(371, 860, 22840), log(400, 900, 10500, old=True), log(100, 200, 250)],
)
def test_update_bound__speaks_of_an_update_that_takes_much(content: str) -> None:
    assert "update-bound" in answers_to(content)


@pytest.mark.parametrize(
    "content",
    [
        log(371, 860, 100),
        log(414, 911, 111, old=True),
        "time (ms) | optimizer_step: 22801.44 | update_optims: 21740.31\n",
    ],
)
def test_update_bound__is_silent_of_others(content: str) -> None:
    assert "update-bound" not in answers_to(content)


@pytest.mark.parametrize(
    "content",
    [
        log(371, 860, 100),
        log(414, 911, 111, old=True),
        # A terminal that was copied has cut its lines.
        log(414, 911, 111).replace("_inner", "_in\nner"),
    ],
)
def test_parts_of_a_step__are_told_where_the_update_is_small(content: str) -> None:
    answers = answers_to(content)
    assert "forward 371.0 ms" in (evidence := answers["step-parts"].evidence[0]) or (
        "forward 414.0 ms, backward 911.0 ms, update 111.0 ms" in evidence
    )


@pytest.mark.parametrize(
    "content",
    [
        log(371, 860, 22840),
        "forward: 1.0 | backward: 2.0 | step: 3.0\n",
        "time (ms) | forward: 1.0\n" * 2 + "time (ms) | step: 3.0\n",
    ],
)
def test_parts_of_a_step__are_not_told_of_others(content: str) -> None:
    assert "step-parts" not in answers_to(content)


def test_two_logs__are_compared_part_by_part() -> None:
    answer = answers_to(log(400, 900, 200), log(410, 950, 5200))["slower-run"]
    assert answer.title == "the second run is 4.37 times slower a step"
    assert answer.evidence[1] == "most of it is the update: 200.0 ms to 5.20 s"
    assert "faster" in answers_to(log(1, 9, 90), log(1, 9, 9))["slower-run"].title
    one_paste = f"{log(400, 900, 200)}\nWith twice the batch:\n\n{log(410, 950, 5200)}"
    assert answers_to(one_paste)["slower-run"].title == answer.title
    fenced = f"```\n{log(400, 900, 200)}```\n```\n{log(410, 950, 5200)}```\n"
    assert answers_to(fenced)["slower-run"].title == answer.title
    whole = f"{log(400, 900, 200)}\nSaving a checkpoint of the model\n"
    assert "slower-run" not in answers_to(whole + log(410, 920, 210))
    for same in (log(400, 900, 200), log(410, 950, 300), log(400, 800, 180)):
        assert "slower-run" not in answers_to(log(400, 900, 200), same)


def test_update__is_compared_with_the_cpu_of_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_text(f"{CONFIGURATION}\n{log(371, 860, 22840)}")
    options = ("--params", "1.35B", "--gpu", "rtx4090")
    done = ebbtide_in_process("explain", str(file), "--json", *options)
    result = json.loads(done.stdout)
    answers = {answer["rule"]: answer for answer in result["answers"]}
    update = answers["update-bound"]
    assert (
        update["title"]
        == "the update on the CPU takes 22.8 s of 24.1 s of a step (95%)"
    )
    assert update["evidence"][0].startswith("59.1 M parameters/s of a rank; a host of")
    commands = [question["command"] for question in result["not_known"]]
    assert "ebbtide plan --params 1350000000 --machine rtx4090" in commands
    assert ebbtide_in_process("explain", str(file), "--gpu", "nosuch").returncode == 2

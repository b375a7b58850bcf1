"""Levers of memory: their order, their effects, and the answers of `plan --model`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli import run
from ebbtide.features.dryrun.jobs.models import known_models
from ebbtide.features.fit.levers import LEVERS
from ebbtide.features.fit.search import FitSearch, pareto
from ebbtide.features.fit.shape import shape_of_config
from ebbtide.machines.catalog import find_machine
from ebbtide.model_job import ModelJob

LLAMA = shape_of_config(known_models()["llama-3.1-8b"], "llama")
LONG = ModelJob(
    "meta-llama/Llama-3.1-8B",
    "qlora",
    "adamw-8bit",
    batch=2,
    sequence=9910,
    checkpointing=True,
)
GIB = 2**30


def search(job: ModelJob, capacity: float, machine: str = "rtx3060") -> FitSearch:
    return FitSearch(job, LLAMA, find_machine(machine), capacity)


def test_effects__are_in_the_order_of_cost_and_fit_at_their_largest() -> None:
    own = search(LONG, 14.75 * GIB)
    effects = own.effects()
    names = [lever.name for lever in LEVERS]
    places = [names.index(effect.lever) for effect in effects[1:]]
    assert places == sorted(places)
    longest = {effect.lever: effect.longest_sequence for effect in effects}
    # The logits of 2 x 2,304 tokens are what limits it as it is.
    assert longest["as it is"] == 2304 < longest["chunked loss"] == 8704
    for effect in effects:
        job = effect.point.job
        length = effect.longest_sequence
        for tokens, does_fit in ((length, True), (length + 256, False)):
            values = {**vars(job), "sequence": tokens}
            assert (own.point(ModelJob(**values)).lacks is None) == does_fit


def test_logits__take_12_bytes_a_token_and_entry_unless_they_are_chunked() -> None:
    own = search(LONG, 14.75 * GIB)
    assert own.own.memory.logits == 12 * 2 * 9910 * 128_256
    (chunked,) = LEVERS[0].apply(LONG)
    assert own.point(chunked).memory.total < own.own.memory.total - 24 * GIB


def test_answer__is_the_first_on_the_line_that_fits() -> None:
    for capacity in (14.75, 24, 40):
        own = search(LONG, capacity * GIB)
        assert own.answer is not None
        fitting = [point for point in own.line if point.lacks is None]
        assert own.answer is not None
        assert own.answer.text == fitting[0].text
    assert own.line == pareto(own.points)


def test_answer__trains_other_weights_and_adds_gpus_last() -> None:
    job = ModelJob("meta-llama/Llama-3.1-8B")
    machine = "rtx4090"
    texts = {}
    for capacity in (80, 24, 14, 7):
        answer = search(job, capacity * GIB, machine).answer
        texts[capacity] = answer and (answer.job.method, answer.job.ranks)
    assert texts[80] == texts[24] == ("full", 1)
    assert texts[14] == ("qlora", 1)
    assert texts[7] is not None
    assert texts[7][1] > 1
    tiny = search(job, 1 * GIB, machine)
    assert tiny.answer is None
    least = min(point.needed_bytes for point in tiny.points)
    assert tiny.nearest.needed_bytes == least


def test_sharding__does_not_offer_what_shards_cannot_have() -> None:
    own = search(ModelJob("llama", ranks=4, strategy="fsdp"), 24 * GIB, "rtx4090")
    assert {point.job.optimizer for point in own.points} == {"adamw"}
    assert {point.job.method for point in own.points} == {"full", "lora"}


def printed(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert run(words.split()) == 0
    return capsys.readouterr().out


FIELD = (
    "plan --model meta-llama/Llama-3.1-8B --machine rtx3060 --capacity 14.75GiB "
    "--method qlora --optimizer adamw-8bit --checkpointing --micro-batch 2 "
    "--sequence 9910"
)


def test_plan__names_the_chunked_loss_for_a_job_with_large_logits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, FIELD)
    first, *_ = text.splitlines()
    assert "qlora, bf16, adamw-8bit, 2 x 9,910 tokens a" in first
    assert "2 + 2 + 2 B a trained parameter" in text
    assert "fits with chunked loss + activation offload" in text
    assert "no change makes it fit" not in text


def test_plan__says_what_the_nearest_combination_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "plan --model Qwen/Qwen3-32B --machine rtx3060 --capacity 2GB"
    text = " ".join(printed(capsys, words).split())
    assert "no change makes it fit: of 96 combinations, and on more GPUs" in text
    assert "which lacks" in text
    answer = json.loads(printed(capsys, f"{words} --json"))
    assert answer["answer"] is None
    assert answer["nearest"]["needed_bytes"] > answer["limit_bytes"]


@pytest.mark.parametrize("size", ["32.8B", "7.6B", "16.4B", "0.6B", "1.35e9"])
def test_plan__takes_sizes_with_decimals(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"plan --params {size} --machine h100-80gb --frontier --json"
    answer: dict[str, Any] = json.loads(printed(capsys, words))
    params = shape_of_config(answer["config"], "it").params
    stated = float(size.replace("B", "e9"))
    assert params == pytest.approx(stated, rel=0.01)
    assert len(answer["frontier"]) >= len(answer["line"]) > 1


def test_plan__draws_the_frontier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fit.png"
    printed(capsys, f"{FIELD} --frontier --plot {path}")
    assert path.read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model google/gemma-2-9b --machine rtx4090", "is of type gemma2"),
        ("--model qwen3-8b", "name it, as in --machine"),
        ("--model qwen3-8b --params 8B --machine rtx4090", "or of a size"),
        ("--model qwen3-8b --machine rtx4090 --sort cost", "is not for --model"),
        ("--params 8B --machine rtx4090 --method lora", "is for --model"),
        ("--model qwen3-8b --machine rtx4090 --precision fp32", "not counted"),
        ("--model mistral-7b-v0.1 --machine a10 --sequence 5000", "4,096 positions"),
        ("--model qwen3-8b --machine a10 --tokens 3000", "is not a multiple"),
    ],
)
def test_plan__refuses_levers_in_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1

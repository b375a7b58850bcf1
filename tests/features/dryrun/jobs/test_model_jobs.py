"""Jobs that are made from a model: its configuration, the script, and what the dry run
loads."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from ruff import find_ruff_bin

from ebbtide.errors import UserError
from ebbtide.features.dryrun.jobs import settings
from ebbtide.features.dryrun.jobs.model_job import prepare_model_job, render
from ebbtide.features.dryrun.jobs.models import (
    Model,
    complete_stand_ins,
    find_model,
    known_models,
    write_stand_in,
)
from ebbtide.features.dryrun.torch_2_13.files.safetensors_files import FakeSafetensors
from ebbtide.model_job import (
    Method,
    ModelJob,
    Optimizer,
    Precision,
    Strategy,
)
from ebbtide.units import count_text

# Parameters by the model cards.
PUBLISHED_PARAMETERS = {
    "llama-3-70b": 70_553_706_496, "llama-3.1-8b": 8_030_261_248, "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824, "llama-3.3-70b": 70_553_706_496, "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192, "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552, "qwen2-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984, "gemma-3-1b": 999_885_952,
}  # fmt: skip


def parameters_of(config: dict[str, Any]) -> int:
    """Count the parameters of a decoder by hand."""
    kind, width, inner = (
        config["model_type"],
        config["hidden_size"],
        config["intermediate_size"],
    )
    heads = config["num_attention_heads"]
    head = config.get("head_dim", width // heads)
    queries, keys = heads * head, config["num_key_value_heads"] * head
    attention = width * (2 * queries + 2 * keys) + (
        queries + 2 * keys if kind == "qwen2" else 0
    )
    norms = (4 if kind.startswith("gemma") else 2) * width + (
        2 * head if kind in ("qwen3", "gemma3_text") else 0
    )
    tied = config.get("tie_word_embeddings", kind.startswith("gemma"))
    layers = config["num_hidden_layers"] * (attention + 3 * width * inner + norms)
    return (1 if tied else 2) * config["vocab_size"] * width + layers + width


def test_known_models__have_the_parameters_of_their_cards() -> None:
    models = known_models()
    assert {
        name: parameters_of(models[name]) for name in PUBLISHED_PARAMETERS
    } == PUBLISHED_PARAMETERS
    assert "like" not in {key for config in models.values() for key in config}


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("NousResearch/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("Qwen3-8B-Base", "qwen3-8b"),
    ],
)
def test_find_model__has_the_configurations_of_popular_models_without_a_network(
    name: str, listed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model(name) == Model(name, known_models()[listed])


def test_find_model__reads_folders_and_files(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 3}
    for file in ("config.json", "mine.json"):
        (tmp_path / file).write_text(json.dumps(config))
    expected = Model(str(tmp_path), config, tmp_path)
    assert (
        find_model(str(tmp_path)) == find_model(str(tmp_path / "mine.json")) == expected
    )
    assert not expected.is_whole
    for file in ("tokenizer.json", "model.safetensors"):
        (tmp_path / file).touch()
    assert expected.is_whole


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "it has no config.json"),
        ("./nowhere/model", "there is no ./nowhere/model"),
        ("nobody/no-such-model", "put its config.json in a folder"),
    ],
)
def test_find_model__says_what_to_do_without_a_configuration(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=message):
        find_model(name)


def test_stand_in__has_the_tensors_of_the_model_and_a_tokenizer_of_words(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = {**known_models()["qwen2.5-0.5b"], **sizes}
    write_stand_in(Model("tiny", config), tmp_path / "tiny")
    assert complete_stand_ins(tmp_path) == [
        f"model tiny: {count_text(parameters_of(config))} parameters"
    ]
    header = FakeSafetensors(tmp_path / "tiny" / "model.safetensors")
    names = set(header.keys())
    assert "lm_head.weight" not in names  # tied to the embedding
    shapes = [header.get_slice(name).get_shape() for name in names]
    assert sum(map(math.prod, shapes)) == parameters_of(config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert tokenizer("a a a")["input_ids"] == [4, 4, 4]
    assert (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], tokenize=False
        )
        == "a "
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "no-such-kind"}, "makes no language model of some: "),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
            "quantized",
        ),
    ],
)
def test_stand_in__says_in_a_line_what_it_cannot_make(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    def make() -> None:
        write_stand_in(Model("some", config, tmp_path), tmp_path / "some")
        complete_stand_ins(tmp_path)

    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def valid_jobs() -> list[ModelJob]:
    """Return a job of each combination of settings that is not refused."""
    jobs = []
    choices = (
        get_args(Method),
        get_args(Optimizer),
        (True, False),
        get_args(Precision),
        (None, *get_args(Strategy)),
    )
    for method, optimizer, checkpointing, precision, strategy in product(*choices):
        with contextlib.suppress(UserError):
            job = ModelJob(
                "x/y", method, optimizer, 2, 512, checkpointing, precision, strategy, 4
            )
            jobs.append(job)
            for micro_steps, loss in ((2, "plain"), (1, "chunked"), (2, "chunked")):
                jobs.append(replace(job, micro_steps=micro_steps, loss=loss))
            for parts in (
                {"offloads_activations": True},
                {"offloads_optimizer": True, "micro_steps": 2},
                {"offloads_activations": True, "offloads_optimizer": True},
            ):
                with contextlib.suppress(UserError):
                    jobs.append(replace(job, **parts))
    return jobs


def test_render__makes_clean_scripts_of_all_settings(tmp_path: Path) -> None:
    jobs = valid_jobs()
    assert len(jobs) > 200
    for index, job in enumerate(jobs):
        (tmp_path / f"job_{index}.py").write_text(
            render(job, job.model, f"job_{index}.py", 30.0 if index % 2 else None)
        )
    checks = ["check", "--isolated", "--select", "E9,F,I", "--line-length", "140"]
    ruff = subprocess.run(
        [find_ruff_bin(), *checks, "."], cwd=tmp_path, capture_output=True, text=True
    )
    assert ruff.returncode == 0, ruff.stdout


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": "fsdp"}, "is for several ranks"),
        ({"strategy": "zero3", "method": "qlora"}, "which qlora keeps whole"),
        (
            {"strategy": "fsdp", "method": "qlora", "ranks": 2},
            "which qlora keeps whole",
        ),
        ({"strategy": "offload", "optimizer": "sgd"}, "runs DeepSpeed's AdamW"),
        ({"strategy": "zero1", "precision": "bf16-mixed"}, "take --precision bf16"),
        (
            {"offloads_optimizer": True, "optimizer": "sgd"},
            "updates by AdamW on the CPU",
        ),
        (
            {"offloads_optimizer": True, "strategy": "zero3"},
            "is for one rank: take --strategy offload",
        ),
        (
            {"offloads_activations": True, "precision": "bf16-mixed"},
            "would copy weights that autocast casts",
        ),
        (
            {"strategy": "fsdp", "optimizer": "adamw-8bit", "ranks": 2},
            "does not update sharded parameters",
        ),
    ],
)
def test_model_job__refuses_settings_that_make_no_sense_together(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        ModelJob("x", **values)


def test_prepare_model_job__names_packages_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        settings,
        "find_spec",
        lambda package: None if package == "bitsandbytes" else package,
    )
    for job in (
        ModelJob("qwen3-8b", "qlora"),
        ModelJob("qwen3-8b", optimizer="paged-adamw-8bit"),
    ):
        with pytest.raises(
            UserError, match="this job needs bitsandbytes: pip install bitsandbytes"
        ):
            prepare_model_job(job, tmp_path / "job.py", False)


def test_prepare_model_job__leaves_nothing_behind_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    script = tmp_path / "run-job.py"
    with pytest.raises(UserError, match="longer than the 40,960 positions"):
        prepare_model_job(ModelJob("qwen3-8b", sequence=50_000), script, False)
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "quantization_config": {}}'
    )
    with pytest.raises(UserError, match="quantized"):
        prepare_model_job(ModelJob(str(tmp_path)), script, False)
    assert not script.exists()
    script.write_text("print('mine')")
    with pytest.raises(UserError, match="is not a job of a dry run"):
        prepare_model_job(ModelJob("qwen3-8b"), script, True)
    assert script.read_text() == "print('mine')"
    assert list((tmp_path / "scratch").iterdir()) == []

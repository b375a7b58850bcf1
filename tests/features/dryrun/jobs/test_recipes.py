"""Recipe files: the framework, its program, and what a dry run loads in place of models
and data."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import UserError
from ebbtide.features.dryrun.jobs import models, recipes
from ebbtide.features.dryrun.jobs.frameworks import FRAMEWORKS
from ebbtide.features.dryrun.jobs.recipes import prepare_recipe
from ebbtide.features.dryrun.jobs.settings import PreparedJob, require

TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/Capybara
learning_rate: 2e-5
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
max_length: 512
eval_strategy: steps
"""
TRL_DPO = (
    "model_name_or_path: Qwen/Qwen2.5-0.5B\nbeta: 0.1\ndatasets:\n- path: "
    "trl-lib/ultrafeedback_binarized\n"
)
AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
sequence_len: 1024
micro_batch_size: 2
"""
FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 256
eval_dataset: alpaca_en_demo
"""
TUNE = """
# To launch on 2 devices, run the following command from root:
#   tune run --nproc_per_node 2 lora_finetune_distributed --config llama3_1/8B_lora
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /nowhere/Meta-Llama-3.1-8B-Instruct/original/tokenizer.model
  max_seq_len: 4096
checkpointer:
  _component_: torchtune.training.FullModelMetaCheckpointer
  checkpoint_dir: /nowhere/Meta-Llama-3.1-8B-Instruct/original/
  checkpoint_files: [consolidated.00.pth]
  output_dir: ${output_dir}
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: True
batch_size: 2
output_dir: /tmp/tune
"""


@pytest.fixture(autouse=True)
def _preparation_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prepare without the frameworks, whose programs are not started here, and without
    making a model."""
    monkeypatch.setattr(recipes, "require", lambda _package, _subject: None)
    monkeypatch.setattr(models, "write_stand_in", lambda _model, folder: folder.mkdir())
    monkeypatch.setenv("HF_DATASETS_CACHE", "")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def prepare(
    text: str, name: str = "recipe.yaml", ranks: int = 1
) -> tuple[PreparedJob, dict[str, Any]]:
    """Return the job of a recipe, and the recipe that it runs."""
    Path(name).write_text(text)
    job = prepare_recipe(Path(name), ranks)
    assert job.scratch is not None
    recipe = json.loads((job.scratch / name).read_text())
    return job, recipe


def rows(file: Path) -> list[dict[str, int]]:
    """Return the words in each column of each row."""
    lines = file.read_text().splitlines()
    return [
        {name: len(text.split()) for name, text in json.loads(line).items()}
        for line in lines
    ]


def test_recipe_of_trl__runs_its_trainer_on_texts_of_full_length() -> None:
    job, recipe = prepare(TRL)
    scratch = job.scratch
    assert scratch is not None
    assert job.command == ["trl", "sft", "--config", str(scratch / "recipe.yaml")]
    assert os.environ["PATH"].startswith(str(Path(sys.executable).parent))
    assert recipe["model_name_or_path"] == str(scratch / "Qwen2.5-0.5B")
    assert rows(Path(recipe["dataset_name"]) / "train.jsonl") == [{"text": 512}] * 32
    assert recipe["learning_rate"] == 2e-5
    assert "eval_strategy" not in recipe
    assert job.lines == [
        "TRL: trl sft --config recipe.yaml",
        "model Qwen/Qwen2.5-0.5B: without its weights, configuration from ebbtide's "
        "list",
        "data: 32 samples of 512 tokens in place of those of the recipe",
    ]
    assert os.environ["HF_DATASETS_CACHE"].startswith(str(scratch))


def test_recipe_of_trl__with_a_key_of_preferences_runs_dpo() -> None:
    job, recipe = prepare(TRL_DPO)
    assert job.command[1] == "dpo"
    assert rows(Path(recipe["dataset_name"]) / "train.jsonl")[0] == {
        "prompt": 256,
        "chosen": 768,
        "rejected": 768,
    }
    assert prepare(TRL, "dpo-lora.yaml")[0].command[1] == "dpo"


def test_recipe_of_axolotl__trains_on_completions() -> None:
    job, recipe = prepare(AXOLOTL)
    assert job.command[:2] == ["axolotl", "train"]
    (data,) = recipe["datasets"]
    assert (data["type"], data["ds_type"]) == ("completion", "json")
    assert rows(Path(data["path"])) == [{"text": 1024}] * 16
    assert "val_set_size" not in recipe


def test_recipe_of_llama_factory__has_a_data_set_of_its_own() -> None:
    job, recipe = prepare(FACTORY)
    assert job.command[:2] == ["llamafactory-cli", "train"]
    folder = Path(recipe["dataset_dir"])
    entry = json.loads((folder / "dataset_info.json").read_text())[recipe["dataset"]]
    assert rows(folder / entry["file_name"])[0] == {"prompt": 64, "response": 192}
    assert entry["columns"] == {"prompt": "prompt", "response": "response"}
    assert "eval_dataset" not in recipe
    _, recipe = prepare(FACTORY.replace("sft", "dpo"))
    entry = json.loads((Path(recipe["dataset_dir"]) / "dataset_info.json").read_text())[
        "synthetic"
    ]
    assert entry["ranking"] is True
    assert entry["columns"] == {
        "prompt": "prompt",
        "chosen": "chosen",
        "rejected": "rejected",
    }


def test_recipe_of_torchtune__runs_the_program_of_its_comment_or_content() -> None:
    job, recipe = prepare(TUNE)
    scratch = str(job.scratch)
    command = [
        "run",
        "--nproc_per_node",
        "2",
        "lora_finetune_distributed",
        "--config",
        f"{scratch}/recipe.yaml",
    ]
    assert job.command[1:] == command
    checkpoints = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "output_dir": "${output_dir}",
    }
    checkpoints |= {
        "checkpoint_dir": f"{scratch}/Meta-Llama-3.1-8B-Instruct",
        "checkpoint_files": ["model.safetensors"],
    }
    assert recipe["checkpointer"] == checkpoints
    assert recipe["tokenizer"]["max_seq_len"] == 4096
    assert recipe["dataset"]["packed"] is True
    without_comment = "\n".join(
        line for line in TUNE.splitlines() if not line.startswith("#")
    )
    assert prepare(without_comment)[0].command[1:3] == [
        "run",
        "lora_finetune_single_device",
    ]
    assert prepare(TUNE, ranks=8)[0].command[3:5] == ["8", "lora_finetune_distributed"]
    preference = (
        without_comment.replace("lora_llama3_1_8b", "llama3_1_8b")
        + "\nloss: {_component_: x.DPOLoss}\n"
    )
    assert prepare(preference, ranks=2)[0].command[4] == "full_dpo_distributed"


def test_recipe__whose_model_and_data_are_at_hand_runs_as_it_is(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "own.jsonl").touch()
    text = TRL.replace("Qwen/Qwen2.5-0.5B", str(tmp_path)).replace(
        "trl-lib/Capybara", "own.jsonl"
    )
    Path("own.yaml").write_text(text)
    job = prepare_recipe(Path("own.yaml"), 1)
    assert (job.command[-1], job.lines) == (
        "own.yaml",
        ["TRL: trl sft --config own.yaml"],
    )
    Path("own.yaml").write_text(text.replace("own.jsonl", "missing.jsonl"))
    assert len(prepare_recipe(Path("own.yaml"), 1).lines) == 2


def test_recipe__with_a_tokenizer_keeps_data_at_hand(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "own.jsonl").touch()
    text = TRL.replace("Qwen/Qwen2.5-0.5B", str(tmp_path)).replace(
        "trl-lib/Capybara", "own.jsonl"
    )
    assert prepare(text)[1]["dataset_name"] == "own.jsonl"
    (tmp_path / "tokenizer.json").unlink()
    assert prepare(text)[1]["dataset_name"] != "own.jsonl"


REFUSED = [
    (
        "lr: 1\n",
        r"none of the keys _component_ \(torchtune\), stage \(LLaMA-Factory\), "
        r"base_model",
    ),
    ("- a\n", "it has no keys"),
    ("a: [", "is not YAML"),
    (FACTORY.replace("sft", "kto"), "the data of stage kto is not replaced"),
    (AXOLOTL + "rl: dpo\n", "rl: dpo is not replaced"),
    ("base_model: nowhere/\n", "there is no nowhere/"),
    ("model_name_or_path: [1]\n", "no recipe of TRL that ebbtide can read"),
    (
        TUNE.replace("checkpoint_dir:", "folder:"),
        "no recipe of torchtune that ebbtide can read: KeyError",
    ),
]


def test_recipe__is_refused_in_a_line() -> None:
    for text, message in REFUSED:
        with pytest.raises(UserError, match=message):
            prepare(text)


def test_recipe__of_a_framework_that_is_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recipes, "require", require)
    monkeypatch.setattr(FRAMEWORKS[2], "package", "no_such_package", raising=False)
    message = (
        "recipe.yaml, a recipe of Axolotl, needs no_such_package: pip install "
        "no_such_package"
    )
    with pytest.raises(UserError, match=message):
        prepare(AXOLOTL)

"""Configurations of training programs: what is read, and what is concluded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ebbtide.features.explain.answer import explain_records
from ebbtide.features.explain.line_formats import file_content
from ebbtide.features.explain.readers.configurations import Configuration
from ebbtide.features.explain.record import Records
from tests.features.explain.asked import answers_to, records_of

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_offload_params: true
  fsdp_activation_checkpointing: true
mixed_precision: bf16
num_machines: 1
"""
ARGUMENTS = """\
TrainingArguments(
bf16=True,
per_device_train_batch_size=2,
gradient_checkpointing=True,
fsdp=['full_shard', 'offload'],
output_dir=/tmp/out,
)
"""
COMMAND = """\
torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 2 \\
  --gradient_checkpointing True --bf16 --deepspeed ds_z3_offload.json \\
  --output_dir=/tmp/out
"""
TITAN = """\
[training]
local_batch_size = 8  # of a rank
seq_len = 8192
enable_cpu_offload = true
mixed_precision_param = "bfloat16"

[parallelism]
data_parallel_shard_degree = -1

[activation_checkpoint]
mode = "selective"
"""
MEGATRON = """\
python pretrain_gpt.py --micro-batch-size 1 --tensor-model-parallel-size 4 \\
  --use-distributed-optimizer --optimizer-cpu-offload --bf16 --recompute-activations
"""
MEGATRON_PRINTED = """\
  micro_batch_size ................................ 1
  tensor_model_parallel_size ...................... 4
  use_distributed_optimizer ....................... True
  optimizer_cpu_offload ........................... True
  bf16 ............................................ True
  recompute_granularity ........................... selective
"""
AXOLOTL = """\
base_model: NousResearch/Llama-2-7b
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
sequence_len: 4096
micro_batch_size: 2
gradient_checkpointing: true
deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json
bf16: auto
"""
LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen2.5-14B
finetuning_type: lora
cutoff_len: 512
per_device_train_batch_size: 2
bf16: true
deepspeed: examples/deepspeed/ds_z3_offload_config.json
"""
DEEPSPEED: dict[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "train_micro_batch_size_per_gpu": 1,
}


def configuration_of(content: str) -> Configuration:
    (configuration,) = records_of(content)
    assert isinstance(configuration, Configuration)
    return configuration


@pytest.mark.parametrize(
    ("content", "program", "kinds", "precision"),
    [
        (json.dumps(DEEPSPEED, indent=4), "DeepSpeed", "offload sharding", "bf16"),
        (json.dumps(DEEPSPEED), "DeepSpeed", "offload sharding", "bf16"),
        (f"ds = {DEEPSPEED}", "DeepSpeed", "offload sharding", "bf16"),
        (ACCELERATE, "accelerate", "checkpointing offload sharding", "bf16"),
        (
            ARGUMENTS,
            "the Trainer of transformers",
            "checkpointing offload sharding",
            "bf16",
        ),
        (
            COMMAND,
            "the Trainer of transformers",
            "checkpointing offload sharding",
            "bf16",
        ),
        (TITAN, "torchtitan", "checkpointing offload sharding", "bfloat16"),
        (MEGATRON, "Megatron-LM", "checkpointing offload sharding", "bf16"),
        (MEGATRON_PRINTED, "Megatron-LM", "checkpointing offload sharding", "bf16"),
        (AXOLOTL, "Axolotl", "checkpointing offload sharding", "bf16"),
        (LLAMA_FACTORY, "LLaMA-Factory", "method offload sharding", "bf16"),
    ],
)
def test_configuration__tells_what_is_sharded_offloaded_and_recomputed(
    content: str, program: str, kinds: str, precision: str
) -> None:
    configuration = configuration_of(content)
    assert configuration.program == program
    facts = {**configuration.facts}
    assert precision in facts.pop("precision")
    assert sorted(facts) == kinds.split()


def test_configuration__is_read_inside_a_log() -> None:
    dump = json.dumps(DEEPSPEED, indent=4)
    log = f"[2026-09-01 10:00:09,412] [INFO] [config.py:993:print]   json = {dump}\n"
    text = f"Hello,\nit is slow.\n```\n{log} time (ms) | step: 22840.30\n```\nWhy?"
    configuration = configuration_of(text)
    assert configuration.settings["json.zero_optimization.stage"] == "3"
    assert (configuration.place.first_line, configuration.place.last_line) == (6, 15)


def test_configuration__is_read_where_a_program_computes_it() -> None:
    code = (
        'CONFIG = {\n    "train_micro_batch_size_per_gpu": BATCH,\n'
        '    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"},\n'
        '        "offload_param": {"device": "cpu", "pin_memory": True}, "x": [1, 2]},\n'
        '    "bf16": {"enabled": True},\n}\n'
    )
    settings = configuration_of(code).settings
    assert settings["CONFIG.zero_optimization.offload_param.device"] == "cpu"
    assert settings["CONFIG.bf16.enabled"] == "true"
    assert settings["CONFIG.train_micro_batch_size_per_gpu"] == "BATCH"


def test_text__without_settings_of_a_program_is_none() -> None:
    for content in (
        "name: Bug report\nabout: it fails\nlabels: bug\n",
        '{"loss": 1.5, "step": 3}\n{"loss": 1.4, "step": 4}\n',
        "git commit --amend --no-edit && pip install --upgrade torch",
        "x = 1\ny = 2\nprint(x)\n",
        "{" * 5000,
    ):
        kinds = {type(record) for record in records_of(content)}
        assert Configuration not in kinds, content


def deepspeed(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with settings by their paths."""
    changed: dict[str, Any] = json.loads(json.dumps(DEEPSPEED))
    for path, value in changes.items():
        *outer, name = path.split(".")
        inner = changed
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[name] = value
    return changed


ZERO = "zero_optimization"
STATE, PARAM = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"
STAGE_1 = {f"{ZERO}.stage": 1}
ON_HOST = {f"{PARAM}.device": "cpu", f"{PARAM}.pin_memory": True}
# Changes with which a rule speaks, and three more with each of which it does not.
OF_DEEPSPEED: dict[str, tuple[dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "offload-param-below-stage-3": (
        {f"{ZERO}.stage": 2, **ON_HOST},
        ({f"{ZERO}.stage": 3}, {f"{PARAM}.device": "none"}, {PARAM: None}),
    ),
    "partial-offload-below-stage-3": (
        {f"{ZERO}.stage": 2, f"{STATE}.ratio": 0.5},
        ({f"{ZERO}.stage": 3}, {f"{STATE}.ratio": 1.0}, {STATE: None}),
    ),
    "offload-without-zero": (
        {f"{ZERO}.stage": 0},
        (STAGE_1, {f"{ZERO}.stage": 3}, {f"{STATE}.device": "none"}),
    ),
    "stage-3-settings": (
        {f"{ZERO}.stage": 2, f"{ZERO}.sub_group_size": 1e9},
        (
            {f"{ZERO}.stage": 3},
            {f"{ZERO}.sub_group_size": None},
            {f"{ZERO}.stage": 3, f"{ZERO}.stage3_prefetch_bucket_size": 5e7},
        ),
    ),
    "static-loss-scale": (
        {"fp16.enabled": True, "fp16.loss_scale": 10, "bf16.enabled": False},
        (
            {"fp16.loss_scale": 0},
            {"fp16.enabled": False},
            {"fp16.loss_scale": None},
        ),
    ),
    "two-precisions": (
        {"fp16.enabled": True},
        ({"fp16.enabled": False}, {"bf16.enabled": False}, {"fp16.enabled": "auto"}),
    ),
    "pageable-offload": (
        {f"{STATE}.pin_memory": False},
        (
            {f"{STATE}.pin_memory": True},
            {f"{STATE}.device": "none"},
            {f"{STATE}.device": "nvme"},
        ),
    ),
    "nvme-without-path": (
        {f"{STATE}.device": "nvme"},
        (
            {f"{STATE}.nvme_path": "/nvme"},
            {f"{STATE}.device": "cpu"},
            {f"{STATE}.device": "none"},
        ),
    ),
    "torch-adam-on-the-cpu": (
        {"optimizer.type": "AdamW", "optimizer.params.torch_adam": True},
        (
            {"optimizer.params.torch_adam": False},
            {f"{STATE}.device": "none"},
            {"optimizer.params": {"lr": 1e-4}},
        ),
    ),
    "checkpointing-of-deepspeed": (
        {"activation_checkpointing.partition_activations": True},
        (
            {"activation_checkpointing": None},
            {"activation_checkpointing": {"profile": False}},
            {"activation_checkpointing.partition_activations": None},
        ),
    ),
    "auto-values": (
        {"gradient_clipping": "auto"},
        (
            {"gradient_clipping": 1.0},
            {"gradient_clipping": None},
            {"gradient_clipping": "automatic"},
        ),
    ),
}


@pytest.mark.parametrize("name", OF_DEEPSPEED)
def test_rule_of_deepspeed__speaks_where_it_must_and_nowhere_else(name: str) -> None:
    changes, silent = OF_DEEPSPEED[name]
    speaking = deepspeed(changes)
    for content in (
        json.dumps(speaking, indent=2),
        json.dumps(speaking),
        f"config = {speaking}\n",
    ):
        assert name in answers_to(content), content
    for more in silent:
        content = json.dumps(deepspeed({**changes, **more}), indent=2)
        assert name not in answers_to(content), content


LONG = LLAMA_FACTORY.replace("512", "8192")
OTHERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "adapter-with-offload": (
        (
            LLAMA_FACTORY,
            AXOLOTL + "adapter: lora\n",
            AXOLOTL + "adapter: qlora\n",
        ),
        (
            LLAMA_FACTORY.replace("lora", "full"),
            LLAMA_FACTORY.replace("z3_offload", "z3"),
            AXOLOTL,
        ),
    ),
    "no-checkpointing": (
        (
            AXOLOTL.replace("checkpointing: true", "checkpointing: false"),
            TITAN.replace("selective", "none"),
            MEGATRON.replace("--recompute-activations", "--seq-length 8192"),
            LONG + "disable_gradient_checkpointing: true\n",
            ARGUMENTS.replace("pointing=True", "pointing=False,\nmax_length=8192"),
        ),
        (
            AXOLOTL,
            TITAN,
            LONG,
            LLAMA_FACTORY + "disable_gradient_checkpointing: true\n",
            TITAN.replace("selective", "none").replace("8192", "1024"),
            MEGATRON + " --seq-length 8192",
        ),
    ),
    "ram-efficient-loading": tuple(  # type: ignore[dict-item]
        tuple(
            ACCELERATE.replace(
                "fsdp_version: 2",
                f"fsdp_version: {version}\n  fsdp_cpu_ram_efficient_loading: {loading}"
                f"\n  fsdp_sync_module_states: {states}",
            )
            for version, loading, states in group
        )
        for group in (
            ((1, "true", "false"), (1, "True", "False"), ("'1'", "true", "false")),
            ((2, "true", "false"), (1, "false", "false"), (1, "true", "true")),
        )
    ),
    "no-ram-efficient-loading": tuple(  # type: ignore[dict-item]
        tuple(
            ACCELERATE.replace(
                "fsdp_version: 2",
                f"fsdp_version: {version}\n  fsdp_cpu_ram_efficient_loading: {loading}",
            )
            for version, loading in group
        )
        for group in (
            ((1, "false"), (2, "false"), (2, "False")),
            ((1, "true"), (2, "true"), (2, "")),
        )
    ),
    "two-precisions": (
        (
            ARGUMENTS.replace("bf16=True", "bf16=True,\nfp16=True"),
            COMMAND + "--fp16",
            AXOLOTL.replace("auto", "true") + "fp16: true\n",
        ),
        (ARGUMENTS, COMMAND, AXOLOTL + "fp16: false\n"),
    ),
    "precision-aware-optimizer": (
        (MEGATRON, MEGATRON_PRINTED, MEGATRON.replace("--bf16", "--fp16")),
        (
            MEGATRON + " --use-precision-aware-optimizer",
            MEGATRON.replace("--optimizer-cpu-offload", ""),
            MEGATRON_PRINTED + "  use_precision_aware_optimizer ........... True\n",
        ),
    ),
    "pageable-offload": (
        (
            MEGATRON + " --no-pin-cpu-params",
            "--optimizer-cpu-offload --no-pin-cpu-params --micro-batch-size 1",
            MEGATRON_PRINTED + "  no_pin_cpu_params ........... True\n",
        ),
        (MEGATRON, MEGATRON_PRINTED, COMMAND),
    ),
    "overlap-param-gather": (
        (
            "--overlap-param-gather --micro-batch-size 1 --num-layers 4",
            MEGATRON.replace("--use-distributed-optimizer", "--overlap-param-gather"),
            MEGATRON_PRINTED.replace(
                "use_distributed_optimizer", "overlap_param_gather"
            ),
        ),
        (
            MEGATRON,
            MEGATRON + " --overlap-param-gather",
            "--overlap-param-gather --use-megatron-fsdp --micro-batch-size 1 --bf16"
            " --num-layers 4",
        ),
    ),
    "sequence-parallel": (
        (
            MEGATRON.replace("size 4", "size 1") + " --sequence-parallel",
            "--sequence-parallel --micro-batch-size 1 --num-layers 4",
            MEGATRON_PRINTED.replace("... 4", "... 1")
            + "  sequence_parallel ......... True\n",
        ),
        (MEGATRON, MEGATRON + " --sequence-parallel", MEGATRON_PRINTED),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_rule_of_others__speaks_where_it_must_and_nowhere_else(name: str) -> None:
    speaking, silent = OTHERS[name]
    assert min(len(speaking), len(silent)) >= 3
    for content in speaking:
        assert name in answers_to(content), content
    for content in silent:
        assert name not in answers_to(content), content


def test_contradictions__are_all_tried_here_and_have_a_source() -> None:
    entries = file_content("rules/contradictions.toml")["rule"]
    names = {entry["name"] for entry in entries}
    assert names == {*OF_DEEPSPEED, *OTHERS} - {"auto-values"}
    assert all(entry["source"] for entry in entries)


def test_auto__is_filled_in_where_the_trainer_is_beside_it() -> None:
    content = json.dumps(deepspeed({"gradient_clipping": "auto"}))
    assert "auto-values" in answers_to(content)
    assert "auto-values" not in answers_to(content, COMMAND)


@pytest.mark.parametrize(
    ("content", "command"),
    [
        (
            LLAMA_FACTORY,
            "ebbtide dry-run --gpu NAME --model Qwen/Qwen2.5-14B --method lora --batch 2 "
            "--sequence 512",
        ),
        (
            AXOLOTL,
            "ebbtide plan --params 7B --machine NAME --micro-batch 2 --sequence 4096",
        ),
        (
            json.dumps(DEEPSPEED),
            "ebbtide plan --params N --machine NAME --micro-batch 1",
        ),
    ],
)
def test_configuration__names_the_command_that_tells_whether_it_fits(
    content: str, command: str
) -> None:
    explanation = explain_records(Records(records_of(content)))
    assert [question.command for question in explanation.questions] == [command]


VERL = """\
python3 -m verl.trainer.main_ppo \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.fsdp_config.param_offload=True \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
"""


@pytest.mark.parametrize(
    ("content", "program", "kind", "words"),
    [
        (VERL, "verl", "offload", "the actor's parameters are on the host"),
        (VERL, "verl", "offload", "moves in and out for each update"),
        (VERL, "verl", "checkpointing", "recomputed"),
        (
            json.dumps({"zero_optimization": {"stage": 2, "cpu_offload": True}}),
            "DeepSpeed",
            "offload",
            "updated by the CPU",
        ),
        (
            "swift pt --torch_dtype bfloat16 --learning_rate 1e-5 --output_dir x",
            "the Trainer of transformers",
            "precision",
            "bfloat16",
        ),
    ],
)
def test_settings_of_programs__are_named(
    content: str, program: str, kind: str, words: str
) -> None:
    (record,) = records_of(content)
    assert isinstance(record, Configuration)
    assert record.program == program
    assert any(words in text for text in record.facts[kind])
    # The rollout's is not the one of training.
    assert "sharding" not in record.facts or program != "verl"

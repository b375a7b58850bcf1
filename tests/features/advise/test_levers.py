"""Changes of a job's settings: their effects beside dry runs of the changed job, their
order, and their keys."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ebbtide.analysis.tables.table import Table
from ebbtide.features.advise.job.sources import BatchSettings, facts_of, job_of_trace
from ebbtide.features.advise.job.training_job import JobFacts, TrainingJob
from ebbtide.features.advise.levers.effects import LEVERS, Variant
from ebbtide.features.advise.levers.keys import KEYS, TITLES, settings_text
from ebbtide.features.advise.levers.search import (
    cheapest_change,
    needed_bytes,
    single_changes,
    smallest_machine,
)
from ebbtide.features.advise.machine_plan import JobPlans, PlanRequest, plan_for_machine
from ebbtide.features.advise.tables import plan_view
from ebbtide.interleave.policies import as_policies
from ebbtide.machines.catalog import preset, presets
from ebbtide.profiler.trace import Trace, TraceBuilder, open_trace
from tests.conftest import ebbtide
from tests.features.advise.jobs import gpu_machine, sized

SCRIPT = (Path(__file__).parents[3] / "examples" / "train_gpt.py").read_text()
SIZE = [
    "--layers",
    "12",
    "--width",
    "1024",
    "--heads",
    "16",
    "--context",
    "512",
    "--dtype",
    "bfloat16",
]
BLOCK = "            x = block(x)"
CHECKPOINTED = (
    "            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
)
LOOP = "    batches = iter(loader)"
STREAMED = """
    nn.utils.clip_grad_norm_ = lambda *_: None
    own = {p: type(optimizer)([p], lr=3e-4) for p in model.parameters()}
    def step_and_free(p):
        own[p].step()
        p.grad = None
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_and_free)
    # The loop's own step ends the iteration.
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1, device=args.device))], lr=1.0)
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(1, device=args.device)
"""
TRAINER = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

batch, checkpointing = int(sys.argv[1]), sys.argv[2] == "True"
data = [{"input_ids": torch.arange(512), "labels": torch.arange(512)} for _ in range(64)]
model = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=768, n_head=12, vocab_size=8192, n_positions=512))
settings = dict(per_device_train_batch_size=batch, gradient_accumulation_steps=8 // batch, max_steps=3)
arguments = TrainingArguments("out", gradient_checkpointing=checkpointing, save_strategy="no", report_to=[], **settings)
Trainer(model, arguments, train_dataset=data).train()
"""


def test_cheapest_change__moves_no_state_to_a_host_that_has_the_memory_of_the_gpu() -> (
    None
):
    machine = preset("gb10")
    job = sized(13e9)
    levers = {name for change in single_changes(job, machine) for name in change.levers}
    other = {
        name
        for change in single_changes(job, replace(machine, unified_memory=False))
        for name in change.levers
    }
    assert other - levers == {"offload", "paged optimizer"}
    change = cheapest_change(job, machine)
    assert change is not None
    assert not {"offload", "paged optimizer"} & set(change.levers)


def predicted(folder: Path, script: str, *words: str) -> Trace:
    """Return the trace of a dry run of a script."""
    (folder / "job.py").write_text(script)
    done = ebbtide(
        "dry-run",
        "--gpu",
        "a100-80gb-sxm",
        "--force",
        "-o",
        "run.ebb",
        "--",
        sys.executable,
        "job.py",
        *words,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    trace = open_trace(folder / "run.ebb")
    trace.memory(0)
    return trace


def reserved_bytes(trace: Trace) -> int:
    """Return the peak of what torch reserves, by which `plan` says whether a job
    fits."""
    memory = trace.memory(0)
    return int(memory[memory["pool"] == "reserved"]["bytes"].max())


def saved_bytes(job: TrainingJob, lever: str, **settings: int) -> float:
    """Return the device memory that a change alone is predicted to save."""
    machine = preset("a100-80gb-sxm")
    before, _ = needed_bytes(Variant(job, job.settings), machine)
    (chosen,) = [one for one in LEVERS if one.name == lever]
    for one in chosen.apply(Variant(job, job.settings)):
        if all(getattr(one.settings, key) == size for key, size in settings.items()):
            return before - needed_bytes(one, machine)[0]
    raise AssertionError(f"{lever} is not possible")


@pytest.mark.slow
def test_levers__save_what_a_dry_run_with_a_smaller_micro_batch_saves(
    tmp_path: Path,
) -> None:
    """Compare a change of an example, within 5 % of its peak."""
    trace = predicted(tmp_path, SCRIPT, *SIZE, "--batch", "8")
    job, before = job_of_trace(trace, BatchSettings()), reserved_bytes(trace)
    assert (job.settings.micro_batch, job.facts.framework, job.facts.moments) == (
        8,
        "torch",
        2,
    )
    assert needed_bytes(Variant(job, job.settings), preset("a100-80gb-sxm"))[
        0
    ] == pytest.approx(before, rel=0.01)
    halved = reserved_bytes(
        predicted(tmp_path, SCRIPT, *SIZE, "--batch", "4", "--accumulate", "2")
    )
    assert saved_bytes(job, "micro-batch", micro_batch=4) == pytest.approx(
        before - halved, abs=0.05 * before
    )


@pytest.mark.slow
def test_levers__save_what_a_dry_run_with_checkpointing_saves(tmp_path: Path) -> None:
    trace = predicted(tmp_path, SCRIPT, *SIZE, "--batch", "8")
    job, before = job_of_trace(trace, BatchSettings()), reserved_bytes(trace)
    script = SCRIPT.replace(BLOCK, CHECKPOINTED).replace(
        "import torch\n", "import torch\nimport torch.utils.checkpoint\n"
    )
    trace = predicted(tmp_path, script, *SIZE, "--batch", "8")
    assert saved_bytes(job, "checkpointing") == pytest.approx(
        before - reserved_bytes(trace), abs=0.05 * before
    )
    checkpointed = job_of_trace(trace, BatchSettings())
    assert "checkpointing" not in {
        change.levers[0] for change in single_changes(checkpointed, preset("a10"))
    }


@pytest.mark.slow
def test_levers__save_what_streamed_gradients_save(tmp_path: Path) -> None:
    """A small micro-batch has its peak in the update."""
    trace = predicted(tmp_path, SCRIPT, *SIZE, "--batch", "1")
    job, before = job_of_trace(trace, BatchSettings()), reserved_bytes(trace)
    streamed = reserved_bytes(
        predicted(
            tmp_path, SCRIPT.replace(LOOP, STREAMED + LOOP), *SIZE, "--batch", "1"
        )
    )
    assert 0.7 <= saved_bytes(job, "streamed gradients") / (before - streamed) <= 1.0


def adamw(params: int, state_bytes: int, dtype: str) -> dict[str, Any]:
    """Return the description of an optimizer with two moments per parameter on the
    GPU."""
    return {
        "class": "AdamW",
        "params": params,
        "state_bytes": state_bytes,
        "state_dtypes": {dtype: 2 * params},
        "state_devices": ["cuda"],
    }


def lora_trace(path: Path, framework: str = "trl", used_gib: float = 24.0) -> Trace:
    """Write the trace of a LoRA job of 8 G parameters: 15 GiB of weights, 8 of
    activations, micro-batch 2."""
    builder = TraceBuilder("recorded")
    params, total, weights = 42_000_000, 8_072_000_000, 15 << 30
    device = {
        "device": "cuda:0",
        "kind": "cuda",
        "capacity_bytes": 80 << 30,
        "name": "NVIDIA A100-SXM4-80GB",
    }
    model = {
        "params": total,
        "total_params": total,
        "trainable_params": params,
        "bytes": weights,
        "checkpointing": False,
    }
    optimizer = adamw(params, 8 * params, "float32")
    rank = builder.rank(
        0,
        world_size=1,
        devices=[device],
        model=model,
        optimizers=[optimizer],
        framework={"name": framework, "version": "1.16.0", "micro_batch": 2},
    )
    for iteration in range(6):
        for index, (phase, gib) in enumerate(
            (("forward", 18.0), ("backward", used_gib), ("update", 15.5))
        ):
            begin = (300 * iteration + 100 * index) * 10**6
            rank.phase(phase, begin, begin + 100 * 10**6, iteration)
            rank.memory(begin + 10**6, int(gib * 2**30), "requested")
            rank.memory(begin + 10**6, int((used_gib + 0.3) * 2**30), "reserved")
    builder.write(path)
    return open_trace(path)


def full_trace(path: Path, micro_steps: int) -> Trace:
    """Write the trace of a job that trains 8 G parameters: 15 GiB of weights, as many
    of gradients, 30 of state, 3 of activations, and of 0.5 that torch keeps; gradients
    are freed after the update."""
    builder = TraceBuilder("recorded")
    params, gib = 8_053_063_680, 2**30
    device = {
        "device": "cuda:0",
        "kind": "cuda",
        "capacity_bytes": 24 * gib,
        "name": "NVIDIA GeForce RTX 4090",
    }
    count = {
        "params": params,
        "total_params": params,
        "trainable_params": params,
        "bytes": 15 * gib,
    }
    optimizer = adamw(params, 30 * gib, "bfloat16")
    rank = builder.rank(
        0,
        world_size=1,
        devices=[device],
        model={**count, "checkpointing": True, "dtypes": {"bfloat16": params}},
        optimizers=[optimizer],
        framework={"name": "torch", "micro_batch": 1, "tokens": 2048},
    )
    now = 0

    def phase(name: str, iteration: int, step: int, *used: int) -> None:
        nonlocal now
        for number, size in enumerate(used):
            rank.memory(now + number * 2 * 10**7, (45 + size) * gib, "requested")
        now += 10**8
        rank.phase(name, now - 10**8, now, iteration, step)

    for iteration in range(6):
        for step in range(micro_steps):
            kept = 15 * (step > 0)
            phase("forward", iteration, step, kept, kept + 1, kept + 3)
            phase(
                "backward",
                iteration,
                step,
                *((kept + 3, 15) if kept else (3, 5, 8, 10, 13)),
            )
        # The norm of the gradients.
        now += 10**7
        phase("update", iteration, micro_steps - 1, 15)
        rank.memory(now, 45 * gib, "requested")
        now += 10**7
    rank.memory(0, (60 + 3 * (micro_steps > 1)) * gib + gib // 2, "reserved")
    builder.write(path)
    return open_trace(path)


@pytest.mark.parametrize("micro_steps", [1, 4])
def test_single_changes__adapters_need_no_gradients_of_all_weights(
    micro_steps: int, tmp_path: Path
) -> None:
    job = job_of_trace(full_trace(tmp_path / "run.ebb", micro_steps), BatchSettings())
    assert (job.micro_steps, job.tokens) == (micro_steps, 2048 * micro_steps)
    alone = {one.text: one for one in single_changes(job, preset("rtx4090"))}
    adapters = 16 * 47e6 / 2**30
    assert alone["LoRA"].device_bytes / 2**30 == pytest.approx(
        15 + 3 + 0.5 + adapters, abs=0.2
    )
    assert alone["LoRA"].fits
    assert alone["QLoRA"].device_bytes < 0.6 * alone["LoRA"].device_bytes
    # Those of one micro-step go to the host as they are computed.
    kept = 15 if micro_steps > 1 else 0
    assert alone["offload"].device_bytes / 2**30 == pytest.approx(
        15 + 3 + 0.5 + kept, abs=0.2
    )
    large = replace(preset("rtx4090"), gpu_memory_bytes=40 * 2**30)
    ranks = single_changes(job, large)[-1]
    assert ranks.text == "2 ranks"
    assert ranks.device_bytes / 2**30 == pytest.approx(
        (15 + 15 + 30) / 2 + 3 * (kept > 0) + 1.5, abs=0.7
    )


def test_single_changes__has_adapters_with_checkpointing_where_only_both_fit() -> None:
    alone = {one.text: one for one in single_changes(sized(8e9), preset("rtx4090"))}
    assert not alone["LoRA"].fits
    assert alone["checkpointing + LoRA"].fits
    assert [text for text in alone if "+" in text] == ["checkpointing + LoRA"]


def test_plan_for_machine__needs_no_capacity_of_the_recorded_device(
    tmp_path: Path,
) -> None:
    stated = lora_trace(tmp_path / "run.ebb")
    meta = json.loads((stated.path / "meta.json").read_text())
    meta["ranks"][0]["devices"][0]["capacity_bytes"] = None
    shutil.copytree(stated.path, tmp_path / "none.ebb")
    (tmp_path / "none.ebb" / "meta.json").write_text(json.dumps(meta))
    jobs = [
        job_of_trace(trace, BatchSettings())
        for trace in (stated, open_trace(tmp_path / "none.ebb"))
    ]
    assert not any("not known" in note for note in jobs[1].notes)
    for name, fits in (("rtx4090", False), ("a100-40gb-pcie", True)):
        of_stated, of_none = (plan_for_machine(job, preset(name)) for job in jobs)
        assert of_none.fits is of_stated.fits is fits
        assert of_none.device_bytes == pytest.approx(of_stated.device_bytes)


@pytest.mark.parametrize(("params", "unit"), [(2e7, "ms"), (8e9, "s")])
def test_plan_view__has_short_iterations_in_ms(params: float, unit: str) -> None:
    job = sized(params)
    plan = plan_for_machine(job, preset("h200"))
    (table,) = (
        part
        for part in plan_view(JobPlans(job, [plan]))
        if isinstance(part, Table) and part.name == "plans"
    )
    assert f"{unit}/iteration" in [column.label for column in table.all_columns]


def test_plan_view__names_the_optimizer_of_ebbtide_and_the_bytes_of_a_parameter() -> (
    None
):
    job = sized(8e9)
    plan = plan_for_machine(
        job, preset("rtx4090"), PlanRequest(policies=as_policies(["zero-offload"]))
    )
    lines = [line for line in plan_view(JobPlans(job, [plan])) if isinstance(line, str)]
    change = next(line for line in lines if "cheapest change" in line)
    assert "(plain torch with ebbtide's optimizer, " in change
    assert "offload" in change
    assert any("2 + 2 + 12 B a parameter" in line for line in lines)


def test_cheapest_change__shares_no_weights_of_four_bits(tmp_path: Path) -> None:
    job = job_of_trace(full_trace(tmp_path / "run.ebb", 1), BatchSettings())
    for gib in (6, 9, 12, 16):
        change = cheapest_change(job, gpu_machine(gpu_memory_bytes=gib * 2**30))
        assert change is None or not {"QLoRA", "ranks"} <= {*change.levers}


def test_cheapest_change__of_a_lora_job_is_its_micro_batch(tmp_path: Path) -> None:
    job = job_of_trace(lora_trace(tmp_path / "run.ebb"), BatchSettings())
    assert (job.facts.has_adapters, job.facts.total_params) == (True, 8_072_000_000)
    change = cheapest_change(job, preset("a10"))
    assert change is not None
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    assert (change.levers, change.action) == (
        ("micro-batch",),
        {"kind": "trl", "settings": settings},
    )
    alone = {one.levers[0]: one for one in single_changes(job, preset("a10"))}
    assert "LoRA" not in alone
    assert alone["QLoRA"].fits
    assert alone["QLoRA"].action["settings"] == {"use_peft": True, "load_in_4bit": True}
    smallest = smallest_machine(job, map(preset, presets()))
    assert smallest is not None
    assert smallest.name == "rtx5090"


def test_facts_of__a_trace_without_a_framework_is_of_torch_or_deepspeed() -> None:
    traces = Path(__file__).parents[3] / "traces"
    assert facts_of(open_trace(traces / "a100-13b-async.ebb")).framework == "deepspeed"
    builder = TraceBuilder("recorded")
    builder.rank(0, devices=[])
    assert facts_of(builder.build()).framework == "torch"


def test_quantized_state__takes_a_quarter_of_moments_in_fp32() -> None:
    """Moments of 8 B a parameter become 2 B, and scales; a paged optimizer needs none
    on the device at the peak."""
    job = replace(sized(1e9), state_bytes=8.0)
    machine = gpu_machine(gpu_memory_bytes=1e11)
    before, _ = needed_bytes(Variant(job, job.settings), machine)
    alone = {one.text: one.device_bytes for one in single_changes(job, machine)}
    assert before - alone["8-bit optimizer"] == pytest.approx(6e9, rel=0.01)
    assert before - alone["paged optimizer"] == pytest.approx(8e9, rel=0.01)
    in_trainer = replace(job, facts=JobFacts("transformers", embedding_share=0.5))
    kept = {one.text: one.device_bytes for one in single_changes(in_trainer, machine)}
    assert before - kept["8-bit optimizer"] == pytest.approx(3e9, rel=0.01)


@pytest.mark.parametrize("device", [6e9, 12e9, 24e9, 40e9])
def test_cheapest_change__has_no_part_that_fits(device: float) -> None:
    """A change is only named where the others do not suffice; `fits` is what the memory
    says."""
    job, machine = sized(2e9, micro_batch=4), gpu_machine(gpu_memory_bytes=device)
    change = cheapest_change(job, machine)
    assert change is not None
    assert change.fits
    alone = {
        one.levers[0]: one.fits
        for one in single_changes(job, machine)
        if len(one.levers) == 1
    }
    assert len(change.levers) == 1 or not any(alone[name] for name in change.levers)
    order = [lever.name for lever in LEVERS]
    cheaper = order[: order.index(change.levers[-1])]
    assert not any(alone.get(name) for name in cheaper)
    assert [*change.levers] == sorted(change.levers, key=order.index)


def test_keys__are_those_of_the_installed_frameworks() -> None:
    arguments = pytest.importorskip("transformers.training_args")
    names = {field.name for field in fields(arguments.TrainingArguments)} | {
        "peft.get_peft_model",
        "torchrun",
    }
    for framework in ("transformers", "trl"):
        for lever, settings in KEYS[framework].items():
            if lever not in ("LoRA", "QLoRA"):
                assert settings.keys() <= names, (framework, lever)
    optimizers = {name.value for name in arguments.OptimizerNames}
    assert {
        KEYS["trl"][lever]["optim"] for lever in ("8-bit optimizer", "paged optimizer")
    } <= optimizers
    assert KEYS.keys() == TITLES.keys()
    assert all(
        lever in {one.name for one in LEVERS}
        for settings in KEYS.values()
        for lever in settings
    )


def test_settings_text__joins_nested_keys() -> None:
    settings = {
        "gradient_checkpointing": True,
        "deepspeed": {"zero_optimization": {"stage": 3}},
    }
    assert (
        settings_text(settings)
        == "gradient_checkpointing: true, deepspeed.zero_optimization.stage: 3"
    )


def test_offload__that_the_host_has_no_memory_for_has_its_reason() -> None:
    job = sized(4e9)
    machine = gpu_machine(
        gpu_memory_bytes=24e9, host_memory_bytes=32e9, box=None, d2h_bytes_per_s=1e10
    )
    by_name = {one.levers: one for one in single_changes(job, machine)}
    offload = by_name["offload",]
    assert not offload.fits
    assert offload.reason is not None
    assert "of host memory" in offload.reason
    sharded = single_changes(sized(4e9, ranks=4), machine)
    assert not any("8-bit optimizer" in one.levers for one in sharded)

"""Dry runs of jobs of small models, and random jobs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import runpy
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ebbtide.errors import UserError
from ebbtide.features.dryrun.jobs.model_job import prepare_model_job
from ebbtide.features.dryrun.jobs.models import complete_stand_ins, known_models
from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.machines.catalog import find_machine
from ebbtide.model_job import ModelJob
from tests.conftest import run_process

ROOT = Path(__file__).parents[3]
BASES = {
    "llama": "llama-3.1-8b",
    "mistral": "mistral-7b-v0.3",
    "qwen2": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
}


class DryPeak(NamedTuple):
    """The peak of a dry run."""

    tensor_bytes: int
    reserved_bytes: int
    context_bytes: int
    host_bytes: int


def configuration(kind: str = "llama", **sizes: Any) -> dict[str, Any]:
    """Return a configuration of a type of model with other sizes."""
    own = {"sliding_window": None, "max_position_embeddings": 1 << 20}
    return {**known_models()[BASES[kind]], **own, **sizes}


def dry_run(
    config: dict[str, Any], job: ModelJob, machine: str, capacity_bytes: int
) -> DryPeak:
    """Return the peak of the dry run of a job of a configuration, in a process of its
    own: tests before may have left process groups and settings of torch."""
    request = json.dumps([config, vars(job), machine, capacity_bytes])
    words = [sys.executable, "-W", "ignore", "-m", __spec__.name, request]
    process = run_process(words, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    return DryPeak(*json.loads(process.stdout.splitlines()[-1]))


def _dry_run_here(
    config: dict[str, Any], job: ModelJob, machine: str, capacity_bytes: int
) -> DryPeak:
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        Path("model").mkdir()
        Path("model/config.json").write_text(json.dumps(config))
        own = replace(job, model=str(Path("model").absolute()))
        prepared = prepare_model_job(own, Path("job.py"), True)
        sys.argv = ["job.py", prepared.command[2]]
        target = find_machine(machine)
        options = DryRunOptions(
            iterations=2,
            machine=target,
            capacity_bytes=capacity_bytes,
            device_name=(target.gpu and target.gpu.name) or machine,
            ranks=job.ranks if job.ranks > 1 else None,
        )
        assert prepared.scratch is not None
        with contextlib.redirect_stdout(io.StringIO()), DryRun(options) as run:
            complete_stand_ins(prepared.scratch)
            os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
            runpy.run_path("job.py", run_name="__main__")
        memory = run.memory
        return DryPeak(
            memory.most_bytes,
            memory.most_reserved_bytes,
            run.context_bytes,
            run.host_memory.most_bytes,
        )


def random_job(seed: int) -> tuple[dict[str, Any], ModelJob, str]:
    """Return a configuration, a job and a machine, drawn by a seed."""
    draw = random.Random(seed)
    while True:
        kind = draw.choice([*BASES])
        heads, size = draw.choice([8, 16, 24, 32]), draw.choice([64, 128])
        groups = [number for number in (1, 2, 4, 8, heads) if heads % number == 0]
        width = heads * (64 if kind == "qwen3" else size)
        config = configuration(
            kind,
            hidden_size=width,
            intermediate_size=int(width * draw.choice([2.5, 3.5, 5.5]) / 64) * 64,
            num_hidden_layers=draw.choice([4, 8, 16, 24]),
            num_attention_heads=heads,
            num_key_value_heads=draw.choice(groups),
            head_dim=size,
            vocab_size=draw.choice([32_000, 50_304, 128_256, 151_936]),
            tie_word_embeddings=draw.random() < 0.4,
        )
        job = {
            "method": draw.choice(["full", "full", "lora", "qlora"]),
            "optimizer": draw.choice(["adamw", "adamw", "adamw-8bit", "sgd"]),
            "batch": draw.choice([1, 1, 2, 4]),
            "sequence": draw.choice([512, 1024, 2048, 4096]),
            "checkpointing": draw.random() < 0.5,
            "precision": draw.choice(["bf16", "bf16", "bf16-mixed"]),
            "micro_steps": draw.choice([1, 1, 2]),
            "loss": draw.choice(["plain", "chunked"]),
            "offloads_activations": draw.random() < 0.3,
        }
        share = draw.random()
        if share < 0.2:
            job |= {"ranks": draw.choice([2, 4]), "strategy": "ddp"}
        elif share < 0.4:
            ranks = draw.choice([2, 4, 8])
            job |= {"ranks": ranks, "strategy": "fsdp", "precision": "bf16"}
        elif share < 0.6:
            job |= {"offloads_optimizer": True, "optimizer": "adamw"}
        machine = draw.choice(["rtx4090", "a100-80gb-sxm", "h100-80gb"])
        # Settings that make no sense together are drawn again.
        with contextlib.suppress(UserError):
            return config, ModelJob("model", **job), machine


if __name__ == "__main__":
    config, job, machine, capacity_bytes = json.loads(sys.argv[1])
    print(json.dumps(_dry_run_here(config, ModelJob(**job), machine, capacity_bytes)))

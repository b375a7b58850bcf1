"""Writes the training script of a model, a method and settings, and prepares its dry
run."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from ebbtide.errors import UserError
from ebbtide.features.dryrun.jobs.models import find_model, write_stand_in
from ebbtide.features.dryrun.jobs.settings import PreparedJob, require, scratch_folder
from ebbtide.model_job import CHUNK, ZERO_STAGES, ModelJob
from ebbtide.output_files import new_output

_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(trained, lr={}, fused=True)",
    "adamw-8bit": "bitsandbytes.optim.AdamW8bit(trained, lr={})",
    "paged-adamw-8bit": "bitsandbytes.optim.PagedAdamW8bit(trained, lr={})",
    "adafactor": "torch.optim.Adafactor(trained, lr={})",
    "sgd": "torch.optim.SGD(trained, lr={}, momentum=0.9)",
}
_MARK = "Written by `ebbtide dry-run`"


def prepare_model_job(job: ModelJob, script: Path, force: bool) -> PreparedJob:
    """Write the script of a job and what its dry run loads."""
    model = find_model(job.model)
    longest = model.config.get("max_position_embeddings")
    if isinstance(longest, int) and job.sequence > longest:
        raise UserError(
            f"--sequence {job.sequence} is longer than the {longest:,} positions of "
            f"{model.name}"
        )
    for package, is_needed in (
        ("transformers", True),
        ("accelerate", True),
        ("peft", job.method != "full"),
        ("bitsandbytes", job.method == "qlora" or "8bit" in job.optimizer),
        ("deepspeed", job.strategy in ZERO_STAGES),
    ):
        if is_needed:
            require(package, "this job")
    with (
        scratch_folder() as scratch,
        new_output(script, force, _is_ours, "a job of a dry run") as path,
    ):
        folder = scratch / Path(model.name).name
        if not model.is_whole:
            write_stand_in(model, folder)
        text = render(job, model.name, script.name, softcap_of(model.config))
        path.write_text(text, encoding="utf-8")
    lines = [
        f"{script}: {job.summary}; {job.bytes_text}",
        f"model {model.name}, configuration from {model.source}",
    ]
    return PreparedJob(
        ["python", str(script), str(model.folder if model.is_whole else folder)],
        scratch,
        lines,
    )


def softcap_of(config: Mapping[str, Any]) -> float | None:
    """Return the bound of the logits of a model (Gemma 2 has one)."""
    value = config.get("final_logit_softcapping")
    is_gemma_2 = config.get("model_type") == "gemma2"
    return 30.0 if value is None and is_gemma_2 else value


def render(job: ModelJob, model: str, file: str, softcap: float | None = None) -> str:
    """Return the script of a job; `model`: a name on the hub, or the folder with the
    weights; `file`: its own name; `softcap`: the bound of its logits."""
    learning_rate = 1e-5 if job.method == "full" else 1e-4
    autocast = job.precision == "bf16-mixed"
    dtype = (
        "float32"
        if job.precision == "fp32" or (autocast and job.method == "full")
        else "bfloat16"
    )
    optimizer = _OPTIMIZERS[job.optimizer]
    if job.offloads_optimizer:
        optimizer = "HostAdamW(trained, lr={})"
    return _template().render(
        model=json.dumps(model),
        file=file,
        summary=job.summary,
        launcher=f"torchrun --nproc-per-node {job.ranks}" if job.strategy else "python",
        method=job.method,
        optimizer=optimizer.format(learning_rate),
        learning_rate=learning_rate,
        batch=job.batch,
        sequence=job.sequence,
        checkpointing=job.checkpointing,
        autocast=autocast,
        dtype=dtype,
        strategy=job.strategy,
        stage=ZERO_STAGES.get(job.strategy or ""),
        micro_steps=job.micro_steps,
        chunked=job.loss == "chunked",
        chunk=CHUNK,
        softcap=softcap,
        offloads_activations=job.offloads_activations,
        offloads_optimizer=job.offloads_optimizer,
    )


@cache
def _template() -> Template:
    loader = PackageLoader("ebbtide.features.dryrun.jobs")
    environment = Environment(
        loader=loader,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("train.py.j2")


def _is_ours(path: Path) -> bool:
    return path.is_file() and _MARK in path.read_text(
        encoding="utf-8", errors="replace"
    )

"""Predict the steps of models that are no decoders, by dry runs of rebuilt jobs.

    python benchmarks/accuracy_models.py [--set-aside] [--only TEXT]

The environment needs timm, transformers and diffusers beside ebbtide. Reads
`benchmarks/accuracy/models.jobs.csv`, whose figures are from `sources.csv`, and writes
`models.predicted.csv`. A job is rebuilt from what its source states: model, batch,
precision, optimizer, ranks; data are random, and loading them takes no time. Jobs of
sources that are set aside keep their stored predictions without `--set-aside`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from accuracy_evidence import ModelRun, all_sources
from accuracy_jobs import FOLDER, read_rows, write_rows
from accuracy_networks import NETWORKS

from ebbtide.analysis.metrics.iterations import median_ms
from ebbtide.analysis.metrics.job_kind import kind_of_trace
from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.features.dryrun.trace_of_run import trace_of_run
from ebbtide.machines.catalog import find_machine
from ebbtide.machines.machine import Machine

# Fake forms of torchvision's own operations, which a build for another torch lacks, and
# which these jobs do not use.
sys.modules["torchvision._meta_registrations"] = types.ModuleType(
    "torchvision._meta_registrations"
)
WORKERS = 2
AUTOCAST = {"amp": torch.float16, "amp-bf16": torch.bfloat16}


@dataclass(frozen=True)
class ModelJob:
    """A job whose model is no decoder.

    Attributes:
        name: Its source, a colon, and what tells it from others.
        machine: A preset, or a file in the folder of the sets.
        network: A function of accuracy_networks.py, and its argument after a space.
        size: Pixels of an image's side, or tokens of a sample.
        batch: Samples of a micro-step on one GPU.
        precision: `fp32`; `tf32`, also of products; `amp`, `amp-bf16`; `half`, `bf16`;
            `made`: each weight as the network has it.
        attention: `math` for operation by operation, else `sdpa`.
        options: `nhwc`, `compile`, `checkpoint`.
        step_s: The published time of an optimizer step, s.
    """

    name: str
    family: str
    machine: str
    ranks: int
    network: str
    size: int
    batch: int
    micro_steps: int
    precision: str
    attention: str
    optimizer: str
    options: str
    step_s: float

    @property
    def source(self) -> str:
        """Who wrote it."""
        return self.name.partition(":")[0]


def machine_of(job: ModelJob) -> Machine:
    """Return the machine of a job with the rates of its ranks."""
    own = FOLDER / job.machine
    machine = find_machine(str(own) if own.exists() else job.machine)
    return machine.for_ranks(min(job.ranks, machine.box.ranks if machine.box else 1))


def optimizer_of(
    job: ModelJob, parameters: list[torch.Tensor]
) -> torch.optim.Optimizer:
    """Return the optimizer of a job; `-fused` ends the name of torch's fused ones, and
    `-plain` that of one without state."""
    name, _, kind = job.optimizer.partition("-")
    options = {"fused": True} if kind == "fused" else {}
    if name == "sgd":
        momentum = 0.0 if kind == "plain" else 0.9
        return torch.optim.SGD(parameters, lr=0.1, momentum=momentum, **options)
    return torch.optim.AdamW(parameters, lr=1e-4, **options)


def train(job: ModelJob) -> None:
    """Run a job until the dry run ends it."""
    torch.backends.cuda.matmul.allow_tf32 = job.precision == "tf32"
    torch.backends.cudnn.allow_tf32 = job.precision != "half"
    name, _, argument = job.network.partition(" ")
    is_half = job.precision in ("half", "bf16")
    model, sample, loss_of = NETWORKS[name](argument, job)
    model = model.to(
        "cuda", {"half": torch.float16, "bf16": torch.bfloat16}.get(job.precision)
    )
    model.train()
    if "nhwc" in job.options:
        model = model.to(memory_format=torch.channels_last)
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer = optimizer_of(job, parameters)
    if job.ranks > 1:
        torch.distributed.init_process_group("nccl")
        model = torch.nn.parallel.DistributedDataParallel(model)
    called = torch.compile(model) if "compile" in job.options else model
    dtype = AUTOCAST.get(job.precision)
    while True:
        for _ in range(job.micro_steps):
            batch = [value.cuda() for value in sample()]
            if is_half:
                halves = next(model.parameters()).dtype
                batch = [v.to(halves) if v.is_floating_point() else v for v in batch]
            with torch.autocast(
                "cuda", dtype or torch.float16, enabled=dtype is not None
            ):
                loss = loss_of(called, *batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def predict(job: ModelJob) -> ModelRun:
    """Predict a step by a dry run."""
    torch.manual_seed(0)
    machine = machine_of(job)
    options = DryRunOptions(
        machine=machine, device_name=machine.gpu_name or "", ranks=job.ranks
    )
    with DryRun(options) as run:
        train(job)
    trace = trace_of_run(run).build()
    likely_ms = median_ms(trace, "iteration")
    if likely_ms is None:
        raise ValueError(f"{job.name} has no iteration")
    return ModelRun(job.name, *kind_of_trace(trace), likely_ms / 1e3)


def attempt(job: ModelJob) -> ModelRun | str:
    """Predict a step, or return why it cannot be."""
    try:
        return predict(job)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set-aside", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT")
    args = parser.parse_args()
    jobs: list[ModelJob] = read_rows(ModelJob, FOLDER / "models.jobs.csv")
    aside = {one.source for one in all_sources() if one.is_set_aside}
    path = FOLDER / "models.predicted.csv"
    stored = (
        {one.name: one for one in read_rows(ModelRun, path)} if path.exists() else {}
    )
    chosen = [
        job
        for job in jobs
        if args.only in job.name and (args.set_aside or job.source not in aside)
    ]
    # Each job has a process of its own, which has the libraries already.
    for library in ("timm", "transformers", "diffusers"):
        importlib.import_module(library)
    torch.set_num_threads(1)
    with get_context("fork").Pool(WORKERS, maxtasksperchild=1) as pool:
        for job, result in zip(chosen, pool.imap(attempt, chosen), strict=True):
            if isinstance(result, str):
                print(f"{job.name}: {result}")
                stored.pop(job.name, None)
                continue
            stored[job.name] = result
            shown = "" if job.source in aside else f", measured {job.step_s:.4g}"
            print(f"{job.name}: {result.likely_s:.4g} s{shown}", flush=True)
    rows = [stored[job.name] for job in jobs if job.name in stored]
    write_rows(path, ["written by accuracy_models.py; s a step"], rows)


if __name__ == "__main__":
    main()

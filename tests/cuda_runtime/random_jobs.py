"""Judge random jobs on the stand-in: python -m tests.cuda_runtime -m
tests.cuda_runtime.random_jobs SEED [JOBS]"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from tests.cuda_runtime import runtime
from tests.interleave.engine.compile_once import compile_once
from tests.interleave.engine.grid.draw import draw_job
from tests.interleave.engine.grid.job import Job
from tests.interleave.engine.grid.judge import judge_all, quiet

# Their kernels belong to libraries that are not here.
NOT_HERE = ("gru", "lstm")
# Its backward on the CPU wants norms in fp32, which its forward has in half precision.
NOT_HERE_IN_FLOAT16 = ("weight norm",)
# Rules of whole matrices are refused on a GPU.
RULES_NOT_HERE = ("muon",)


def on_device(job: Job) -> Job:
    """Return a job whose model is on the GPU."""
    others = (*NOT_HERE, *(NOT_HERE_IN_FLOAT16 if job.dtype == torch.float16 else ()))
    kinds = tuple("residual" if kind in others else kind for kind in job.kinds)
    # Generated code is not the stand-in's; a child has no devices.
    edits = tuple(event for event in job.edits if event.kind != "fork")
    job = replace(job, device="cuda", kinds=kinds, compiled=None, edits=edits)
    if job.gradients == "copied" and job.overlap in ("none", "forward"):
        # Jobs may write to gradients while they are copied, which is a race: the step
        # tells.
        job = replace(job, gradients="kept")
    elif job.gradients == "copied":
        job = replace(job, gradients="streamed", clipping=None)
    if job.rule in RULES_NOT_HERE:
        job = replace(job, rule="adamw", hyperparameters=(("lr", 0.01),))
    if job.weights is not None:
        job = _with_weights_on_host(job)
    return replace(job, second_rule=None) if job.second_rule in RULES_NOT_HERE else job


def _with_weights_on_host(job: Job) -> Job:
    """Return a job that can have weights on the host and others on the GPU.

    The reference updates them: it has no storage, and a step that is interrupted is
    half done. Gradients that have not come to the host when a backward fails are lost,
    a checkpoint within a layer finds its weights on the host, and so does a twin that
    has the same parameters. Norms over tensors of both are sums in another order, and
    the stand-in has no operation on tensors of both."""
    faults = tuple(event for event in job.faults if event.kind != "interrupted step")
    edits = tuple(
        event
        for event in job.edits
        if event.kind not in ("failed backward", "all", "twin", "norm")
    )
    kinds = tuple("residual" if kind == "custom" else kind for kind in job.kinds)
    return replace(
        job, storage=False, faults=faults, edits=edits, kinds=kinds, clipping=None
    )


def draw_on_device(seeds: range) -> Iterator[Job]:
    """Yield the jobs of seeds; end the process where the one before had a race."""
    for seed in seeds:
        yield on_device(draw_job(seed))
        if runtime.race_count():
            sys.exit(f"seed {seed}: operations touched the same bytes without an order")


def main(first: int = 0, jobs: int = 1) -> None:
    quiet()
    compile_once()
    tally = judge_all(draw_on_device(range(first, first + jobs)), prints_each=jobs == 1)
    if tally.failures:
        sys.exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))

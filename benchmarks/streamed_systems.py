"""Published figures of MegaTrain and RoundPipe, which stream weights, and of torchtitan, which chooses what happens to
activations, for the table of benchmarks/systems.py."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.published import simulated
from benchmarks.published_figures import Figure, fitted_rate
from ebbtide.interleave.advise.job.decoder import Implementation, shape_of
from ebbtide.interleave.advise.job.sources import BatchSettings, job_of_size
from ebbtide.interleave.advise.whole_job import layered_workload
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.catalog import preset
from ebbtide.machines.machine import Machine


def _job(machine: Machine, params: float, layers: int, hidden: int, vocabulary: int, tokens: BatchSettings) -> Workload:
    shape = shape_of(round(params), tokens.sequence or 1024, vocabulary, layers, hidden, 0)
    return layered_workload(job_of_size(shape, tokens, None, Implementation("eager", "flash2")), machine)


def megatrain() -> list[Figure]:
    """Qwen2.5-7B on one H100, 158 sequences of 1,024 tokens: 272 TFLOP/s of 6 FLOP a parameter and token."""
    machine = preset("h100-80gb").for_ranks(1)
    job = _job(machine, 7.62e9, 28, 3584, 152064, BatchSettings(1, 158, 1024, None))
    seconds = simulated("megatrain", job, machine).iteration_s
    return [Figure("MegaTrain", "step, Qwen2.5-7B", "s", 6 * 7.62e9 * 158 * 1024 / 272e12, seconds)]


def roundpipe() -> list[Figure]:
    """Llama 3.1 8B and Qwen3-32B on one RTX 4090, 32 sequences of 2,048 tokens (assumed) a step; products are summed in
    fp16, so that the rate of compute is fitted to the former."""
    machine = preset("rtx4090").for_ranks(1)
    tokens = 32 * 2048
    batch = BatchSettings(1, 1, 2048, tokens)
    jobs = {
        "Llama 3.1 8B": (_job(machine, 8.03e9, 32, 4096, 128256, batch), 3142),
        "Qwen3-32B": (_job(machine, 32.8e9, 64, 5120, 151936, batch), 740),
    }

    def rate(job: Workload, speed: float) -> float:
        times = {key: getattr(job, key) / speed for key in ("forward_s", "backward_s")}
        layers = tuple(
            layer._replace(
                forward_s=layer.forward_s / speed,
                backward_s=layer.backward_s / speed,
                forms=tuple(form._replace(recompute_s=form.recompute_s / speed) for form in layer.forms),
            )
            for layer in job.layers
        )
        return tokens / simulated("roundpipe", replace(job, **times, layers=layers), machine).iteration_s

    first, published = jobs["Llama 3.1 8B"]
    speed = fitted_rate(lambda one: 1 / rate(first, one / 1e9), 1 / published) / 1e9
    return [
        Figure("RoundPipe", f"tokens a second, {name}", "", value, rate(job, speed), is_fitted=job is first)
        for name, (job, value) in jobs.items()
    ]


def torchtitan() -> list[Figure]:
    """torchtitan#4636: Qwen3-32B on 8 H100, a sequence of 2,048 tokens each, under budgets of peak memory.

    The source names neither model nor batch. Its 29.11 % of 989 TFLOP/s at 1,406 tokens/s are 204.8 GFLOP a token,
    which is this model with this sequence; the number of ranks and the batch follow from the memory. State, gradients
    and weights are divided among ranks; what the step has beyond compute is that of full recomputation."""
    machine = replace(preset("h100-80gb").for_ranks(1), gpu_update_params_per_s=1e15, host_memory_bytes=None)
    job = _job(machine, 32.76e9, 64, 5120, 151936, BatchSettings(1, 1, 2048, None))
    layers = tuple(layer._replace(params=layer.params // 8) for layer in job.layers)
    job = replace(job, params=job.params // 8, sizes=None, subgroup_params=10**8, layers=layers, grad_bytes=4.0)

    def schedule(activations: str, free_bytes: float) -> Schedule:
        own = replace(job, gpu_free=((0.0, free_bytes),), missing_bytes=0.0, host_free_bytes=None)
        return simulated(f"gpu-only,activations={activations}", own, machine)

    full = schedule("recompute", 1e13)
    peak_bytes = full.peak_job_bytes() or 0.0
    rest_s = 2048 / 1406 - full.iteration_s
    figures = [
        Figure("torchtitan", "tokens a second, full recomputation", "", 1406, 1406, is_fitted=True),
        Figure("torchtitan", "peak memory, full recomputation", "GiB", 68.56, peak_bytes / 2**30),
    ]
    for budget, published in ((69, 1484), (72, 1487)):
        chosen = schedule("auto", peak_bytes + (budget - 68.56) * 2**30)
        tokens_per_s = 2048 / (chosen.iteration_s + rest_s)
        reason = "3 GiB more gain it 0.2 %, so that it waits for something else, which is not published"
        figures.append(
            Figure("torchtitan", f"tokens a second, {budget} GiB", "", published, tokens_per_s, reason=reason)
        )
    return figures

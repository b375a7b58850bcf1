"""Published figures of MegaTrain and RoundPipe, which stream weights, for the table of
benchmarks/systems.py."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.published import simulated
from benchmarks.published_figures import Figure, fitted_rate
from ebbtide.features.advise.job.decoder import Implementation, shape_of
from ebbtide.features.advise.job.sources import BatchSettings, job_of_size
from ebbtide.features.advise.whole_job import layered_workload
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.catalog import preset
from ebbtide.machines.machine import Machine


def _job(
    machine: Machine,
    params: float,
    layers: int,
    hidden: int,
    vocabulary: int,
    tokens: BatchSettings,
) -> Workload:
    shape = shape_of(
        round(params), tokens.sequence or 1024, vocabulary, layers, hidden, 0
    )
    return layered_workload(
        job_of_size(shape, tokens, None, Implementation("eager", "flash2")), machine
    )


def megatrain() -> list[Figure]:
    """Qwen2.5-7B on one H100, 158 sequences of 1,024 tokens: 272 TFLOP/s of 6 FLOP a
    parameter and token."""
    machine = preset("h100-80gb").for_ranks(1)
    job = _job(machine, 7.62e9, 28, 3584, 152064, BatchSettings(1, 158, 1024, None))
    seconds = simulated("megatrain", job, machine).iteration_s
    return [
        Figure(
            "MegaTrain",
            "step, Qwen2.5-7B",
            "s",
            6 * 7.62e9 * 158 * 1024 / 272e12,
            seconds,
        )
    ]


def roundpipe() -> list[Figure]:
    """Llama 3.1 8B and Qwen3-32B on one RTX 4090, 32 sequences of 2,048 tokens
    (assumed) a step; products are summed in fp16, so that the rate of compute is fitted
    to the former."""
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
                forms=tuple(
                    form._replace(recompute_s=form.recompute_s / speed)
                    for form in layer.forms
                ),
            )
            for layer in job.layers
        )
        return (
            tokens
            / simulated(
                "roundpipe", replace(job, **times, layers=layers), machine
            ).iteration_s
        )

    first, published = jobs["Llama 3.1 8B"]
    speed = fitted_rate(lambda one: 1 / rate(first, one / 1e9), 1 / published) / 1e9
    return [
        Figure(
            "RoundPipe",
            f"tokens a second, {name}",
            "",
            value,
            rate(job, speed),
            is_fitted=job is first,
        )
        for name, (job, value) in jobs.items()
    ]

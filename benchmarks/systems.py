"""Published figures of other systems beside the simulated ones, as Markdown: `python
benchmarks/systems.py`.

What a source does not say is fitted to the rows marked `fitted` or assumed, and the
table says so. docs/validation.md says what is fitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.published import jobs, simulated, simulated_sample
from benchmarks.published_figures import Figure, box, fitted_rate
from benchmarks.storage_systems import mlp_offload, zero_infinity
from benchmarks.streamed_systems import megatrain, roundpipe
from benchmarks.tables import machine_line, percent, table
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.catalog import preset
from ebbtide.machines.machine import Machine

# Errors up to this share count as reproduced.
CLOSE = 0.15


def workload(params: float, compute_s: float, **values: float | bool) -> Workload:
    """Return a job of one rank: a third of its compute is the forward, and subgroups
    have a fortieth of its parameters."""
    count = round(params)
    forward_s = compute_s / 3
    job = Workload(
        "published",
        count,
        max(1, count // 40),
        forward_s,
        compute_s - forward_s,
        gpu_free=((0.0, 1e13),),
    )
    return replace(job, **values)


def fitted_cpu_rate(
    machine: Machine, iteration_s: Callable[[Machine], float], published_s: float
) -> Machine:
    """Return a machine with the rate of updates on the CPU at which an iteration takes
    as long as published."""

    def with_rate(rate: float) -> Machine:
        return replace(machine, cpu_update_params_per_s=rate)

    return with_rate(
        fitted_rate(lambda rate: iteration_s(with_rate(rate)), published_s)
    )


def deep_optimizer_states() -> list[Figure]:
    """Runs of ZeRO-Offload, Twin-Flow and strides, each predicted by a fit to all
    others of its job."""
    figures = []
    for job in jobs():
        for name, run in job.runs.items():
            machine = job.fit([other for other in job.runs if other != name]).machine
            predicted = simulated_sample(run.sample, machine).iteration_s
            figures.append(
                Figure(
                    _SYSTEMS[run.sample.policy.name],
                    f"`{name}`",
                    "s",
                    run.iteration_s,
                    predicted,
                )
            )
        for name, run in job.blocking.items():
            others = [other for other in job.blocking if other != name]
            if not others:
                continue
            machine = job.with_blocking(job.fit(list(job.runs)).machine, others)
            predicted = simulated_sample(job.blocking_sample(name), machine).iteration_s
            system = _SYSTEMS[run.sample.policy.name]
            figures.append(
                Figure(system, f"`{name}-blocking`", "s", run.iteration_s, predicted)
            )
    return figures


_SYSTEMS = {
    "zero-offload": "ZeRO-Offload",
    "twin-flow": "Twin-Flow",
    "interleaved": "Deep Optimizer States",
}


def megatron_bridge() -> list[Figure]:
    """Qwen3-30B-A3B (30.5 G parameters) on 16 H100: 1.906 G parameters of state a
    rank."""
    job = workload(30.5e9 / 16, 0.996, gradients_held_until_step=True)
    machine = fitted_cpu_rate(
        box("h100-80gb"), lambda rates: _megatron(job, rates, 1.0).iteration_s, 4.189
    )
    figures = []
    for fraction, iteration_s in (
        (0.25, 1.871),
        (0.5, 2.484),
        (0.75, 3.187),
        (1.0, 4.189),
    ):
        seconds = _megatron(job, machine, fraction).iteration_s
        what = f"iteration at {100 * fraction:.0f} %"
        figures.append(
            Figure(
                _MEGATRON, what, "s", iteration_s, seconds, is_fitted=fraction == 1.0
            )
        )
    overlap = _megatron(job, machine, 1.0, ",overlap=copies").iteration_s
    figures.append(
        Figure(_MEGATRON, "iteration at 100 %, copies overlapped", "s", 3.877, overlap)
    )
    for fraction, saved in ((0.25, 3.8), (0.5, 7.6), (0.75, 11.6), (1.0, 15.3)):
        all_bytes = simulated("gpu-only", job, machine).peak_device_bytes
        bytes_saved = all_bytes - _megatron(job, machine, fraction).peak_device_bytes
        figures.append(
            Figure(
                _MEGATRON,
                f"device memory saved at {100 * fraction:.0f} %",
                "GB",
                saved,
                bytes_saved / 1e9,
            )
        )
    return figures


_MEGATRON = "Megatron HybridDeviceOptimizer"


def _megatron(
    job: Workload, machine: Machine, fraction: float, option: str = ""
) -> Schedule:
    return simulated(f"megatron-hybrid:{fraction},masters=gpu{option}", job, machine)


def nemo_rl() -> list[Figure]:
    """Qwen3-0.6B (0.596 G parameters) on one H100."""
    job = workload(0.596e9, 0.752, gradients_held_until_step=True)
    machine = fitted_cpu_rate(
        box("h100-80gb"),
        lambda rates: _megatron(job, rates, 1.0, ",overlap=copies").iteration_s,
        1.678,
    )
    system = f"{_MEGATRON}, NeMo-RL"
    runs = (
        (0.5, "", 1.187),
        (0.5, ",overlap=copies", 1.216),
        (1.0, ",overlap=copies", 1.678),
    )
    figures = []
    for fraction, option, iteration_s in runs:
        what = (
            f"iteration at {100 * fraction:.0f} "
            f"%{', copies overlapped' if option else ''}"
        )
        seconds = _megatron(job, machine, fraction, option).iteration_s
        figures.append(
            Figure(system, what, "s", iteration_s, seconds, is_fitted=fraction == 1.0)
        )
    all_bytes = simulated("gpu-only", job, machine).peak_device_bytes
    saved = (
        all_bytes - _megatron(job, machine, 1.0, ",overlap=copies").peak_device_bytes
    )
    figures.append(
        Figure(
            system, "device memory saved at 100 %", "GiB", 15.24 - 10.53, saved / 2**30
        )
    )
    return figures


def zenflow() -> list[Figure]:
    """Qwen2.5-1.5B and 3B (1.54 and 3.09 G parameters) on two A100, ZeRO stage 2, cores
    bound to ranks."""
    small, large = (
        workload(1.54e9 / 2, 0.240),
        workload(3.09e9 / 2, 0.240 * 3.09 / 1.54),
    )
    # ZeRO stage 2 converts parameters on the GPU.
    offload = "zero-offload,params=gpu-cast"
    machine = fitted_cpu_rate(
        box("a100-40gb-pcie"),
        lambda rates: simulated(offload, small, rates).iteration_s,
        1.365,
    )
    figures = [
        Figure(
            "ZenFlow",
            "its baseline, 1.5B",
            "s",
            1.365,
            simulated(offload, small, machine).iteration_s,
            True,
        ),
        Figure(
            "ZenFlow",
            "its baseline, 3B",
            "s",
            2.497,
            simulated(offload, large, machine).iteration_s,
        ),
    ]
    for name, job, iteration_s in (("1.5B", small, 0.569), ("3B", large, 1.116)):
        schedule = simulated("zenflow:0.1,rule=deepspeed", job, machine)
        figures.append(
            Figure(
                "ZenFlow",
                f"10 % important, every 4 steps, {name}",
                "s",
                iteration_s,
                schedule.iteration_s,
            )
        )
    schedule = simulated("zenflow:0.1", large, machine)
    moved = schedule.moved_bytes("h2d") + schedule.moved_bytes("d2h")
    what = "bytes over the link a step, of the model's (paper)"
    figures.append(Figure("ZenFlow", what, "", 1.13, moved / (2 * large.params)))
    # The headline: Llama-2-7B on four A100, 0.5 s without offload. Nothing else of the
    # set-up is published.
    llama = workload(6.74e9 / 4, 0.5)
    headline = simulated(
        "zero-offload,params=gpu-cast,grads=blocking",
        llama,
        preset("a100-80gb-sxm").for_ranks(4),
    )
    figures.append(
        Figure(
            "ZenFlow",
            "its headline: ZeRO-Offload, Llama-2-7B on 4 A100 (paper: over 7 s)",
            "s",
            7.0,
            headline.iteration_s,
            reason=(
                "host, binding and batch are not published; four ranks that are not "
                "bound to cores update 1.5 times "
                "slower on the A100 box of traces/ than bound ones"
            ),
        )
    )
    return figures


def superoffload() -> list[Figure]:
    """A model of 14.8 G parameters on one GH200 at 600 TFLOP/s, 4 sequences of 4,096
    tokens (assumed) a step."""
    job = workload(14.8e9, 8 * 14.8e9 * 4 * 4096 / 600e12, gpu_free=((0.0, 40e9),))
    machine = preset("gh200")
    times = {
        policy: simulated(policy, job, machine).iteration_s
        for policy in (
            "zero-offload,grads=blocking",
            "superoffload",
            "superoffload,rule=deepspeed",
        )
    }
    slow = times.pop("zero-offload,grads=blocking")
    return [
        Figure(
            "SuperOffload",
            f"times as fast as ZeRO-Offload, at most: `{policy}`",
            "",
            4.0,
            slow / seconds,
            reason=(
                "the largest factor of configurations that are not published; the "
                "batch is assumed; with clipping, "
                "as here, DeepSpeed 0.19.8 updates nothing in the backward"
            ),
        )
        for policy, seconds in times.items()
    ]


def prime_rl() -> list[Figure]:
    """Qwen3-30B-A3B (30.5 G parameters) on 8 H200, activations recomputed."""

    def job(compute_s: float) -> Workload:
        count = round(30.5e9 / 8)
        # Activations are recomputed: the backward takes three times as long as the
        # forward.
        return Workload(
            "published",
            count,
            16 * 2**20,
            compute_s / 4,
            compute_s * 3 / 4,
            gpu_free=((0.0, 1e13),),
            clipping=False,
        )

    def iteration(rates: Machine) -> float:
        return simulated("prime-rl", job(1.75), rates).iteration_s

    machine = fitted_cpu_rate(box("h200"), iteration, 3.96)
    figures = [
        Figure("prime-rl", "8K tokens", "s", 3.96, iteration(machine), is_fitted=True)
    ]
    for name, without_s, with_s in (
        ("16K", 5.17, 5.73),
        ("32K", 18.5, 16.05),
        ("64K", 38.7, 34.1),
    ):
        seconds = simulated("prime-rl", job(without_s), machine).iteration_s
        reason = (
            "the source gives 15.4 to 16.7 s: the middle is compared"
            if name == "32K"
            else ""
        )
        figures.append(
            Figure("prime-rl", f"{name} tokens", "s", with_s, seconds, reason=reason)
        )
    saved = simulated("gpu-only", job(1.75), machine).peak_device_bytes
    for name, published in (
        ("8K", 63.1 - 17.5),
        ("16K", 67.0 - 21.5),
        ("64K", 90.3 - 44.9),
    ):
        figures.append(
            Figure(
                "prime-rl",
                f"device memory saved, {name} tokens",
                "GiB",
                published,
                saved / 2**30,
            )
        )
    return figures


def torchao() -> list[Figure]:
    """A ViT of 1.1 G parameters, all in bf16, on a 4070 Ti SUPER: 4 B of moments and 2
    B of parameter on the host."""
    sizes = {"state_bytes": 6.0, "clipping": False}
    # The link of an RTX 4090: PCIe 4.0 with 16 lanes too.
    job, compiled = workload(1.136e9, 1.27, **sizes), workload(1.136e9, 1.18, **sizes)
    machine = fitted_cpu_rate(
        box("rtx4090"),
        lambda rates: (
            simulated("torchao,backward=compiled", compiled, rates).iteration_s
        ),
        1.75,
    )
    seconds = simulated("torchao,backward=compiled", compiled, machine).iteration_s
    figures = [Figure("torchao", "compiled", "s", 1.75, seconds, is_fitted=True)]
    seconds = simulated("torchao", job, machine).iteration_s
    figures += [
        Figure("torchao", "eager", "s", 1.52, seconds),
        Figure("torchao", "eager, gradients offloaded", "s", 1.53, seconds),
    ]
    # The master of bf16 training is the parameter itself: only moments leave the
    # device.
    moments = replace(job, state_bytes=4.0, gradients_held_until_step=True)
    saved = simulated("gpu-only", moments, machine).peak_device_bytes
    for name, published in (("eager", 9.82 - 5.24), ("compiled", 9.90 - 5.33)):
        figures.append(
            Figure(
                "torchao", f"device memory saved, {name}", "GB", published, saved / 1e9
            )
        )
    with_gradients = simulated(
        "gpu-only", replace(moments, gradients_held_until_step=False), machine
    ).peak_device_bytes
    what = "device memory saved, gradients offloaded"
    reason = (
        "gradients of the largest tensors are on the device while they are copied, "
        "which the plan does not count"
    )
    figures.append(
        Figure("torchao", what, "GB", 9.82 - 4.01, with_gradients / 1e9, reason=reason)
    )
    return figures


def _reason(figure: Figure) -> str:
    """Return why a figure is not reproduced; a gap without a reason is an error."""
    is_close = abs(figure.simulated / figure.published - 1) <= CLOSE
    assert is_close or figure.reason, (
        f"{figure.system}, {figure.what}: {figure.simulated:.3g} {figure.unit}"
    )
    return "" if is_close else figure.reason


def main() -> None:
    """Print the figures of each system, and how many are reproduced."""
    print(f"{machine_line()}\n")
    by_system: dict[str, list[Figure]] = {}
    for source in (
        deep_optimizer_states,
        megatron_bridge,
        nemo_rl,
        zenflow,
        superoffload,
        prime_rl,
        torchao,
        zero_infinity,
        mlp_offload,
        megatrain,
        roundpipe,
    ):
        for figure in source():
            by_system.setdefault(figure.system, []).append(figure)
    rows = [
        [
            figure.system,
            figure.what + (" (fitted)" if figure.is_fitted else ""),
            f"{figure.published:.3g} {figure.unit}".strip(),
            f"{figure.simulated:.3g} {figure.unit}".strip(),
            percent(figure.simulated, figure.published),
            _reason(figure),
        ]
        for figures in by_system.values()
        for figure in figures
    ]
    table(
        [
            "system",
            "figure",
            "published",
            "simulated",
            "error",
            "reason of a gap above 15 %",
        ],
        rows,
    )
    counts = []
    for system, figures in by_system.items():
        predicted = [
            abs(f.simulated / f.published - 1) for f in figures if not f.is_fitted
        ]
        close = sum(error <= CLOSE for error in predicted)
        counts.append(
            [system, str(len(predicted)), str(close), f"{100 * max(predicted):.0f} %"]
        )
    table(
        [
            "system",
            "figures that were predicted",
            f"within {100 * CLOSE:.0f} %",
            "largest error",
        ],
        counts,
    )


if __name__ == "__main__":
    main()

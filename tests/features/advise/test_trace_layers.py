"""Layers of a dry run, and the memory of its plans beside dry runs of the job with and
without checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from ebbtide.analysis.findings import find
from ebbtide.analysis.findings.finding import Finding
from ebbtide.analysis.metrics.devices import capacity_bytes
from ebbtide.analysis.metrics.holders.categories import categorized_allocations
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.features.advise.job.sources import BatchSettings, job_of_trace
from ebbtide.features.advise.job.trace_layers import with_trace_layers
from ebbtide.features.advise.machine_plan import plan_for_machine
from ebbtide.features.advise.trace_advice import TraceAdviser
from ebbtide.features.layers.layer_choice import LayerChoice
from ebbtide.features.layers.model import place
from ebbtide.interleave.model.workload import Workload, workload_from
from ebbtide.interleave.replay.replay_trace import replay_trace
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.machines.catalog import find_machine
from ebbtide.profiler import DryRun, DryRunOptions, trace_of_run
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text
from tests.conftest import slow_case

LAYERS, WIDTH, SAMPLES = 4, 512, 4096
# With so many samples the inputs of layers are a tenth of the peak.
NARROW = {"width": 128, "samples": 2**15}


class WideNorm(nn.Module):
    """A norm that keeps an fp32 copy of its input, and not the input, for the
    backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        wide = x.float()
        return self.weight * (
            wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        ).to(x.dtype)


class Layer(nn.Module):
    """A feed-forward layer with a residual connection."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            norm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A stack of layers, each recomputed in the backward or not, from an input on the
    host or not, a norm and a head."""

    def __init__(
        self,
        recomputes: bool,
        offloads: bool,
        norm: Callable[[int], nn.Module],
        width: int,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(Layer(norm, width) for _ in range(LAYERS))
        self.norm, self.head = norm(width), nn.Linear(width, 1000)
        self.recomputes, self.offloads = recomputes, offloads

    def forward(self, tokens: Any) -> Any:
        x = self.token(tokens)
        for layer in self.layers:
            with save_on_cpu() if self.offloads else nullcontext():
                x = (
                    checkpoint(layer, x, use_reentrant=False)
                    if self.recomputes
                    else layer(x)
                )
        return self.head(self.norm(x))


@cache
def _dry_run(
    recomputes: bool,
    micro_steps: int = 1,
    norm: Callable[[int], nn.Module] = nn.LayerNorm,
    width: int = WIDTH,
    samples: int = SAMPLES,
    gib: int = 8,
    offloads: bool = False,
) -> Trace:
    options = DryRunOptions(
        iterations=2, capacity_bytes=gib * 2**30, machine=find_machine("h100-80gb")
    )
    with DryRun(options) as run:
        model = Model(recomputes, offloads, norm, width).to("cuda", torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters())
        while True:
            for _ in range(micro_steps):
                tokens = torch.zeros(samples, dtype=torch.long, device="cuda")
                torch.nn.functional.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    return trace_of_run(run).build("run.ebb")


def _workload(trace: Trace) -> Workload:
    return with_trace_layers(workload_of(trace), trace)


def _peak_bytes(trace: Trace) -> float:
    """Return the peak of the last iteration beside optimizer state."""
    rows = categorized_allocations(trace, 0, "cuda:0")
    rows = rows[rows["category"] != "optimizer_state"]
    phases = trace.phases(0)
    begin = phases.loc[
        phases["iteration"] == phases["iteration"].max(), "start_ns"
    ].min()
    times = np.concatenate([rows["start_ns"], rows["end_ns"]])
    changes = np.concatenate([rows["bytes"], -rows["bytes"]])
    order = np.argsort(times, kind="stable")
    return float(changes[order].cumsum()[times[order] >= begin].max())


@pytest.mark.parametrize(
    ("recorded", "norm"),
    [(False, nn.LayerNorm), slow_case(True, nn.LayerNorm), slow_case(True, WideNorm)],
)
def test_with_trace_layers__has_the_memory_of_a_dry_run_with_that_checkpointing(
    recorded: bool, norm: Callable[[int], nn.Module]
) -> None:
    trace = _dry_run(recorded, norm=norm)
    workload = replace(_workload(trace), gradients_held_until_step=True)
    capacity = (capacity_bytes(trace, 0) or 0) - workload.gpu_slack_bytes
    for recomputes in (False, True):
        plan = LayerChoice((False,) * LAYERS, (int(recomputes),) * LAYERS).plan(
            workload
        )
        placed = place(workload, plan)
        assert capacity - (placed.min_free_bytes or 0.0) == pytest.approx(
            _peak_bytes(_dry_run(recomputes, norm=norm)), rel=0.03
        )


def test_with_trace_layers__has_the_memory_of_a_dry_run_with_inputs_on_the_host() -> (
    None
):
    trace = _dry_run(False, **NARROW)
    workload = replace(_workload(trace), gradients_held_until_step=True)
    capacity = (capacity_bytes(trace, 0) or 0) - workload.gpu_slack_bytes
    # The job's copies end with each layer, so that one slot is the nearest.
    plan = LayerChoice((False,) * LAYERS, (~1,) * LAYERS, activation_slots=1).plan(
        workload
    )
    planned = capacity - (place(workload, plan).min_free_bytes or 0.0)
    assert planned == pytest.approx(
        _peak_bytes(_dry_run(True, offloads=True, **NARROW)), rel=0.03
    )
    assert planned < 0.95 * _peak_bytes(_dry_run(True, **NARROW))


def test_with_trace_layers__takes_recomputation_out_of_the_backward() -> None:
    kept, recomputed = _workload(_dry_run(False)), _workload(_dry_run(True))
    assert [layer.name for layer in kept.layers] == [
        f"layers.{number}" for number in range(LAYERS)
    ]
    assert {layer.params for layer in kept.layers} == {8 * WIDTH**2 + 7 * WIDTH}
    assert recomputed.backward_s == pytest.approx(kept.backward_s, rel=0.1)
    for one, other in zip(kept.layers, recomputed.layers, strict=True):
        assert one.forms[1].nbytes == other.forms[1].nbytes == 2 * SAMPLES * WIDTH
        assert one.forms[0].nbytes == pytest.approx(other.forms[0].nbytes, rel=0.05)
        # Torch leaves out the last product, which the backward does not need.
        assert one.forms[1].recompute_s == one.forward_s
        assert 0.5 < other.forms[1].recompute_s / one.forward_s < 1.0
        assert one.backward_s == pytest.approx(other.backward_s, rel=0.25)


def test_with_trace_layers__has_a_chunk_for_each_micro_step() -> None:
    one, two = _workload(_dry_run(False)), _workload(_dry_run(False, 2))
    assert two.chunk_shares == (0.5, 0.5)
    assert two.layers[1].forms[0].nbytes == 2 * one.layers[1].forms[0].nbytes


def test_with_trace_layers__leaves_traces_of_several_ranks_and_without_kernels() -> (
    None
):
    trace = _dry_run(False)
    workload = workload_of(trace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trace, "kernels", lambda self, rank: trace.ops(rank).head(0))
        assert with_trace_layers(workload, trace) is workload


def _finding(trace: Trace, rule: str) -> Finding | None:
    results = find(trace, TraceAdviser(trace))
    return next(iter(one for one in results.findings if one.rule == rule), None)


def test_advice__is_relative_to_the_iteration_of_the_trace() -> None:
    """All state is on the device: `gpu-only` is the job as it is, in replay and plan,
    and findings begin there."""
    trace = _dry_run(True)
    metrics = JobMetrics(trace)
    (result,) = replay_trace(trace, policies=["gpu-only"]).results
    assert result.update_ms == pytest.approx(metrics.phase_ms("update"))
    assert result.iteration_ms == pytest.approx(metrics.iteration_ms, rel=0.01)
    plan = plan_for_machine(
        job_of_trace(trace, BatchSettings()), find_machine("h100-80gb")
    )
    assert (plan.policy, plan.fits) == ("gpu-only", True)
    assert plan.iteration is not None
    assert plan.iteration.likely == pytest.approx(result.iteration_ms)
    finding = _finding(trace, "recomputation")
    assert finding is not None
    assert finding.action is not None
    before = (finding.action.iteration_ms or 0.0) + (finding.action.gain_ms or 0.0)
    assert before == pytest.approx(metrics.iteration_ms)


def test_recomputation__is_reported_where_activations_could_be_kept() -> None:
    finding = _finding(_dry_run(True), "recomputation")
    assert isinstance(finding, Finding)
    assert finding.action is not None
    assert finding.action.settings == {
        "keep": LAYERS,
        "recompute": 0,
        "offload": 0,
        "recompute-offload": 0,
    }
    # The four layers' forwards are less than a quarter of the iteration.
    assert (
        0.06
        < (finding.potential_gain_ms or 0.0)
        / (JobMetrics(_dry_run(True)).iteration_ms or 1.0)
        < 0.25
    )
    assert _finding(_dry_run(False), "recomputation") is None


# Each of the four layers has 20 GiB of activations.
WIDE = {"width": 4096, "samples": 2**18}


def test_activation_offload__is_reported_where_it_is_faster_than_recomputation_and_fits() -> (
    None
):
    trace = _dry_run(False, gib=88, **WIDE)
    finding = _finding(trace, "activation-offload")
    assert finding is not None
    assert finding.action is not None
    assert finding.action.settings == {
        "keep": 2,
        "recompute": 0,
        "offload": 2,
        "recompute-offload": 0,
    }
    # The last offloaded layer stays in its slot on the device.
    assert (
        f"{bytes_text(_workload(trace).layers[0].forms[0].nbytes)} to the host in the "
        "forward" in finding.advice
    )
    assert finding.potential_gain_ms == finding.action.gain_ms
    assert (finding.potential_gain_ms or 0.0) > 0.06 * (
        finding.action.iteration_ms or 0.0
    )
    # The layers' forwards, which the alternative repeats, bound the gain.
    assert (finding.potential_gain_ms or 0.0) < 1e3 * _workload(trace).forward_s


@pytest.mark.parametrize(
    "gib", [slow_case(128, id="fits"), pytest.param(72, id="too short for offload")]
)
def test_activation_offload__is_silent_where_activations_fit_or_recomputation_is_needed(
    gib: int,
) -> None:
    trace = _dry_run(False, gib=gib, **WIDE)
    assert (JobMetrics(trace).always_free_bytes or 0) * (gib - 100) > 0
    assert _finding(trace, "activation-offload") is None


def test_with_trace_layers__leaves_jobs_without_lists_of_modules() -> None:
    with DryRun(
        DryRunOptions(
            iterations=2, capacity_bytes=2**30, machine=find_machine("h100-80gb")
        )
    ) as run:
        model = nn.Sequential()
        model.add_module("first", nn.Linear(WIDTH, WIDTH))
        model = model.to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        while True:
            model(torch.zeros(64, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = trace_of_run(run).build("run.ebb")
    workload = workload_of(trace)
    assert with_trace_layers(workload, trace) is workload


class Quantized(nn.Module):
    """A linear layer whose weights are 8-bit integers: parameters, as those of
    bitsandbytes, or buffers, as those of GPTQ."""

    def __init__(self, *, has_buffers: bool) -> None:
        super().__init__()
        weights = torch.zeros(WIDTH, WIDTH, dtype=torch.int8)
        if has_buffers:
            self.register_buffer("weight", weights)
        else:
            self.weight = nn.Parameter(weights, requires_grad=False)

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.weight.to(x.dtype))


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)


class Adapted(nn.Module):
    """Frozen layers with a small trained one each, as adapters are."""

    def __init__(self, frozen: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(frozen(), nn.Linear(WIDTH, 8)) for _ in range(LAYERS)
        )

    def forward(self, x: Any) -> Any:
        return sum(block(x).sum() for block in self.blocks)


@pytest.mark.parametrize(
    ("frozen", "frozen_bytes"),
    [
        pytest.param(_linear, 4 * WIDTH**2, id="fp32"),
        pytest.param(partial(Quantized, has_buffers=False), WIDTH**2, id="parameters"),
        pytest.param(partial(Quantized, has_buffers=True), WIDTH**2, id="buffers"),
    ],
)
def test_with_trace_layers__of_frozen_layers_has_their_bytes_and_trained_params(
    frozen: Callable[[], nn.Module], frozen_bytes: int
) -> None:
    machine = find_machine("h100-80gb")
    with DryRun(
        DryRunOptions(iterations=2, capacity_bytes=2**30, machine=machine)
    ) as run:
        model = Adapted(frozen).to("cuda")
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        while True:
            model(torch.zeros(64, WIDTH, device="cuda")).backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = trace_of_run(run).build("run.ebb")
    workload = _workload(trace)
    assert {layer.params for layer in workload.layers} == {8 * WIDTH + 8}
    assert {layer.frozen_bytes for layer in workload.layers} == {frozen_bytes}
    assert workload_from(workload.as_json(), "test").layers == workload.layers
    for policy in ("gpu-only,weights=streamed:2", "adaptive,weights=auto"):
        (result,) = replay_trace(trace, machine, [policy]).results
        assert result.fits
    # Adapters stay on the device.
    (result,) = replay_trace(trace, machine, ["gpu-only,weights=streamed"]).results
    assert result.weights == {"resident": 0, "streamed": LAYERS}
    assert result.h2d_bytes == 2 * (LAYERS - 2) * frozen_bytes
    assert result.d2h_bytes == 0

"""Arguments of public calls: sizes are bytes or text, policies text or an object,
machines and devices a name, too."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.errors import UserError
from ebbtide.features.advise.job.sources import BatchSettings, job_of_workload
from ebbtide.features.advise.machine_plan import PlanRequest, plan_for_machine
from ebbtide.features.deepspeed.engine import patching
from ebbtide.features.sweep.task import Scenario, combinations
from ebbtide.interleave import (
    InterleavedAdamW,
    InterleavedOptimizer,
    move_layers,
    offload_activations,
    stream_weights,
)
from ebbtide.interleave.compare import compare as comparison
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.options import OptimizerOptions
from ebbtide.interleave.policies import as_policy, make_plan
from ebbtide.interleave.replay.replay import replay
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.catalog import find_machine
from ebbtide.profiler import DryRun, DryRunOptions, Tracer, memory_limit
from ebbtide.trace_analysis import TraceAnalysis
from tests.features.layers.stacks import stack
from tests.interleave.job_files import workload

TRACE = Path(__file__).parent.parent / "traces" / "a100-13b-async.ebb"
WORKLOAD = workload()
JOB = job_of_workload(WORKLOAD, BatchSettings())
PIPELINED = as_policy("pipelined")
Call = Callable[..., Any]


def _params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))]


def _enable(**arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(patching, "check_version", lambda: None)
        try:
            return patching.enable(beside=True, **arguments)
        finally:
            patching.disable()


def _limited(limit: Any) -> None:
    with memory_limit(limit, "cpu"):
        pass


def _optimizer(make: Call) -> Call:
    def call(**arguments: Any) -> None:
        make(_params(), policy="pipelined", **arguments).close()

    return call


def _layers(move: Call) -> Call:
    def call(**arguments: Any) -> None:
        move(stack(), **arguments).close()

    return call


def _compare(**arguments: Any) -> None:
    """Take the arguments of a comparison, and end before it trains."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(comparison, "find_testbed", _end)
        with suppress(_Ended):
            comparison.compare(comparison.CompareConfig(**arguments))


class _Ended(Exception):
    """The arguments were taken."""


def _end(*_: Any) -> None:
    raise _Ended


def _replay(**arguments: Any) -> Any:
    return TraceAnalysis(TRACE).replay(**{"policies": "pipelined", **arguments})


def _simulate(**arguments: Any) -> Any:
    machine = arguments["machine"]
    return simulate(
        make_plan("pipelined", WORKLOAD, find_machine("h200")), WORKLOAD, machine
    )


OPTIMIZERS = {
    "InterleavedAdamW": _optimizer(InterleavedAdamW),
    "InterleavedOptimizer": _optimizer(InterleavedOptimizer),
    "enable": _enable,
}
LAYERS = {
    one.__name__: _layers(one)
    for one in (move_layers, offload_activations, stream_weights)
}
# Calls with the argument that is a size.
SIZES: dict[str, tuple[Call, str]] = {
    **{
        name: (call, "memory_budget") for name, call in {**OPTIMIZERS, **LAYERS}.items()
    },
    "EmulatedDevice": (EmulatedDevice, "capacity_bytes"),
    "DryRun": (
        lambda **arguments: DryRun(DryRunOptions(**arguments)),
        "capacity_bytes",
    ),
    "Tracer": (lambda **arguments: Tracer("run.ebb", **arguments), "max_bytes"),
    "compare": (_compare, "memory_budget"),
    "compare on the host": (
        lambda **arguments: _compare(storage=[Path.cwd()], **arguments),
        "host_bytes",
    ),
    "replay": (_replay, "free_bytes"),
    "replay on the host": (_replay, "host_free_bytes"),
    "windows": (
        lambda **arguments: TraceAnalysis(TRACE).windows(**arguments),
        "min_bytes",
    ),
    "memory_limit": (_limited, "limit"),
}
MACHINES: dict[str, Call] = {
    **OPTIMIZERS,
    "DryRun": lambda **arguments: DryRun(DryRunOptions(**arguments)),
    "compare": _compare,
    "make_plan": lambda **arguments: make_plan("pipelined", WORKLOAD, **arguments),
    "plan_for_machine": lambda **arguments: plan_for_machine(
        JOB, **arguments, request=PlanRequest(policies=[PIPELINED])
    ),
    "replay": _replay,
    "replay of a workload": lambda **arguments: replay(
        WORKLOAD, policies=["pipelined"], **arguments
    ),
    "simulate": _simulate,
}
# Calls that take a policy, or several.
POLICIES: dict[str, tuple[Call, str]] = {
    "InterleavedAdamW": (
        lambda **arguments: InterleavedAdamW(_params(), **arguments).close(),
        "policy",
    ),
    "InterleavedOptimizer": (
        lambda **arguments: InterleavedOptimizer(_params(), **arguments).close(),
        "policy",
    ),
    "enable": (_enable, "policy"),
    "compare": (lambda policies: _compare(policies=[policies]), "policies"),
    "make_plan": (lambda policy: make_plan(policy, WORKLOAD, "h200"), "policy"),
    "replay": (lambda policies: _replay(policies=[policies]), "policies"),
    "replay of a workload": (
        lambda policies: replay(WORKLOAD, "h200", [policies]),
        "policies",
    ),
    "sweep": (
        lambda policies: combinations(
            [(WORKLOAD, find_machine("h200"), None)], [Scenario()], [policies]
        ),
        "policies",
    ),
}


def _refused(call: Call, **arguments: Any) -> str:
    with pytest.raises((UserError, EngineError, ValueError)) as error:
        call(**arguments)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", SIZES)
def test_sizes__are_bytes_or_text(name: str) -> None:
    call, argument = SIZES[name]
    call(**{argument: 4 * 2**30})
    call(**{argument: "4GiB"})
    call(**{argument: "4GB"})
    message = _refused(call, **{argument: "4 gigs"})
    assert "'4 gigs' is not a size: write it like 500MB, 2GiB or 1e9" in message
    assert argument in message
    assert argument in _refused(call, **{argument: [4]})
    assert argument in _refused(call, **{argument: -1})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_host_memory_budget__is_bytes_or_text(name: str, tmp_path: Path) -> None:
    call = OPTIMIZERS[name]
    call(storage=tmp_path, host_memory_budget="4GiB", machine="h100-80gb")
    assert "host_memory_budget" in _refused(
        call, storage=tmp_path, host_memory_budget="much"
    )
    assert "host_memory_budget" in _refused(
        call, storage=tmp_path, host_memory_budget=[4]
    )


@pytest.mark.parametrize("name", MACHINES)
def test_machines__are_a_name_a_file_or_an_object(name: str, tmp_path: Path) -> None:
    call, machine, path = (
        MACHINES[name],
        find_machine("h100-80gb"),
        tmp_path / "machine.json",
    )
    path.write_text(json.dumps(machine.as_json()))
    for one in ("h100-80gb", str(path), path, machine):
        call(machine=one)
    assert "there is no machine 'h1oo'" in _refused(call, machine="h1oo")
    assert "machine is 3: it must be a Machine, its file, or the name" in _refused(
        call, machine=3
    )


@pytest.mark.parametrize("name", [*OPTIMIZERS, *LAYERS])
def test_devices__are_a_name_or_a_device(name: str) -> None:
    call = {**OPTIMIZERS, **LAYERS}[name]
    for device in ("cpu", torch.device("cpu"), EmulatedDevice()):
        call(device=device)
    assert "device is 'gpu'" in _refused(call, device="gpu")
    assert "device is 3" in _refused(call, device=3)


def test_offload_activations__takes_the_device_of_streamed_weights_by_name() -> None:
    model = stack()
    with stream_weights(model, device="cpu"), offload_activations(model, device="cpu"):
        pass
    with stream_weights(model), pytest.raises(EngineError, match="the same device"):
        offload_activations(model, device=EmulatedDevice())


def test_trace_analysis__opens_a_path_and_names_the_phases() -> None:
    analysis = TraceAnalysis(str(TRACE))
    assert analysis.phase_ms("forward") == TraceAnalysis(TRACE).phase_ms("forward")
    assert _refused(analysis.phase_ms, phase="forwrd") == (
        "there is no phase 'forwrd': choose from forward, backward, update, other, "
        "iteration"
    )
    assert "is no trace" in _refused(TraceAnalysis, trace=3)


@pytest.mark.parametrize("name", POLICIES)
def test_policies__are_text_or_an_object(name: str) -> None:
    call, argument = POLICIES[name]
    for policy in ("pipelined", PIPELINED):
        call(**{argument: policy})
    assert "there is no policy 'adaptiv'" in _refused(call, **{argument: "adaptiv"})
    assert "policy is 3: it must be text" in _refused(call, **{argument: 3})


OPTIONS = [
    "policy",
    "machine",
    "subgroup_params",
    "memory_budget",
    "max_grad_norm",
    "gradients",
    "loss_scale",
    "device",
    "threads",
    "overlap",
    "model",
    "storage",
    "host_memory_budget",
]


def test_signatures__name_all_options_with_their_defaults() -> None:
    adamw = inspect.signature(InterleavedAdamW).parameters
    assert [*adamw] == [
        "params",
        "lr",
        "betas",
        "eps",
        "weight_decay",
        *OPTIONS,
        "torch_options",
    ]
    assert [*inspect.signature(InterleavedOptimizer).parameters] == [
        "params",
        "rule",
        *OPTIONS,
        "hyperparameters",
    ]
    of_optimizers = {"max_grad_norm", "gradients", "loss_scale", "model"}
    enable = inspect.signature(patching.enable).parameters
    assert {*enable} == {*OPTIONS, "beside", "on_unsupported"} - of_optimizers
    for name in OPTIONS:
        one = adamw[name]
        assert one.kind is one.KEYWORD_ONLY
        default = (
            "adaptive"
            if name == "policy"
            else inspect.signature(OptimizerOptions).parameters[name].default
        )
        assert one.default == default
        assert name not in enable or enable[name].default == default
        assert f"        {name}: " in (OptimizerOptions.__doc__ or ""), (
            "every option is documented"
        )


def test_replay__takes_one_policy_without_a_list() -> None:
    for policy in ("pipelined", PIPELINED):
        assert [result.policy for result in _replay(policies=policy).results] == [
            "pipelined"
        ]


def test_enable__refuses_options_of_optimizers() -> None:
    for name in ("gradients", "master", "fuse"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            _enable(**{name: "kept"})

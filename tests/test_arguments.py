"""Arguments of public calls: sizes are bytes or text, machines and devices a name or an object."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.errors import UserError
from ebbtide.features.deepspeed.engine import patching
from ebbtide.interleave import InterleavedAdamW, InterleavedOptimizer, offload_activations, stream_weights
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.machines.catalog import find_machine
from ebbtide.profiler import memory_limit
from ebbtide.trace_analysis import TraceAnalysis
from tests.features.layers.stacks import stack

TRACE = Path(__file__).parent.parent / "traces" / "a100-13b-async.ebb"
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


OPTIMIZERS = {
    "InterleavedAdamW": _optimizer(InterleavedAdamW),
    "InterleavedOptimizer": _optimizer(InterleavedOptimizer),
    "enable": _enable,
}
LAYERS = {"offload_activations": _layers(offload_activations), "stream_weights": _layers(stream_weights)}
# Calls with the argument that is a size.
SIZES: dict[str, tuple[Call, str]] = {
    **{name: (call, "memory_budget") for name, call in {**OPTIMIZERS, **LAYERS}.items()},
    "windows": (lambda **arguments: TraceAnalysis(TRACE).windows(**arguments), "min_bytes"),
    "memory_limit": (_limited, "limit"),
}
MACHINES: dict[str, Call] = {
    **OPTIMIZERS,
    "replay": lambda **arguments: TraceAnalysis(TRACE).replay(policies="pipelined", **arguments),
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
    assert "host_memory_budget" in _refused(call, storage=tmp_path, host_memory_budget="much")
    assert "host_memory_budget" in _refused(call, storage=tmp_path, host_memory_budget=[4])


@pytest.mark.parametrize("name", MACHINES)
def test_machines__are_a_name_a_file_or_an_object(name: str, tmp_path: Path) -> None:
    call, machine, path = MACHINES[name], find_machine("h100-80gb"), tmp_path / "machine.json"
    path.write_text(json.dumps(machine.as_json()))
    for one in ("h100-80gb", str(path), path, machine):
        call(machine=one)
    assert "there is no machine 'h1oo'" in _refused(call, machine="h1oo")
    assert "machine is 3: it must be a Machine, its file, or the name" in _refused(call, machine=3)


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
        "there is no phase 'forwrd': choose from forward, backward, update, other, iteration"
    )
    assert "is no trace" in _refused(TraceAnalysis, trace=3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_policies__are_refused_at_the_call(name: str) -> None:
    def call(policy: str) -> None:
        if name == "enable":
            _enable(policy=policy)
        else:
            {"InterleavedAdamW": InterleavedAdamW, "InterleavedOptimizer": InterleavedOptimizer}[name](
                _params(), policy=policy
            )

    assert "adaptiv" in _refused(call, policy="adaptiv")

"""Trains while one call of the runtime fails, at each call in turn.

    python -m tests.cuda_runtime -m tests.cuda_runtime.failing_calls MODE [FIRST] [RUNS]

A batch whose backward or step fails is repeated. A run is right if it ends with the bits of the plain run, or in an
error of ebbtide that says why it cannot go on.
"""

import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ebbtide.interleave import InterleavedAdamW, offload_activations, stream_weights
from ebbtide.interleave.engine.errors import EngineError
from tests.cuda_runtime import runtime

STEPS, WIDTH = 4, 24
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {"policy": "zero-offload"},
    "pipelined": {"policy": "pipelined"},
    "forward": {"policy": "interleaved:2", "overlap": "forward"},
    "both": {"policy": "pipelined", "overlap": "both", "gradients": "streamed"},
    "gpu-only": {"policy": "gpu-only"},
    "layers": {},
}
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700
# What torch raises at a call of the job's own.
OF_TORCH = (torch.OutOfMemoryError, torch.AcceleratorError)


class Stopped(Exception):
    """The job cannot go on."""


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers).bfloat16().cuda()


def make_optimizer(model: nn.Module, mode: str) -> Any:
    if mode == "layers":
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    options = {"lr": 1e-2, "subgroup_params": 500, **OPTIONS[mode]}
    if "overlap" in options:
        options["model"] = model
    return InterleavedAdamW(model.parameters(), **options)


def train(mode: str, number: int = 0, error: int = 0) -> Iterator[str]:
    """Train, let a call of the batches fail, yield the errors that were raised, and last a digest.

    It yields an empty text where calls begin to fail, and where they end to; with moved layers that is the first
    step, since torch's own is no transaction."""
    model = make_model()
    layers = []
    if mode == "layers":
        layers = [stream_weights(model, weights="streamed"), offload_activations(model, activations="offload")]
    optimizer = make_optimizer(model, mode)
    batches = torch.randn(STEPS, 6, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    yield ""
    runtime.fail("", number, error=error)
    try:
        done = 0
        while done < STEPS:
            try:
                model(batches[done].cuda()).float().square().mean().backward()
                if mode == "layers":
                    runtime.fail("", 0)
                    yield ""
                optimizer.step()
                done += 1
            except (EngineError, *OF_TORCH) as raised:
                yield f"{type(raised).__name__}: {str(raised).splitlines()[0][:100]}"
                done = _updates_after(optimizer, done)
            optimizer.zero_grad()
        runtime.fail("", 0)
        yield ""
        yield _digest(model, optimizer)
    finally:
        runtime.fail("", 0)
        for one in [*reversed(layers), *([optimizer] if mode != "layers" else [])]:
            one.close()


def _updates_after(optimizer: Any, done: int) -> int:
    """Return how many batches are done after an error."""
    if isinstance(optimizer, torch.optim.SGD):
        return done
    try:
        entries = optimizer.state_dict()["state"].values()
    except EngineError as error:
        raise Stopped(str(error)) from error
    return max((int(entry["step"]) for entry in entries), default=0)


def _digest(model: nn.Module, optimizer: Any) -> str:
    values = [param.detach().float().cpu() for param in model.parameters()]
    for entry in optimizer.state_dict()["state"].values():
        values += [value.float().cpu() for value in entry.values() if isinstance(value, torch.Tensor)]
    return str(hash(tuple(torch.cat([value.flatten() for value in values]).tolist())))


def run(mode: str, expected: str, number: int, error: int) -> tuple[str, str]:
    """Return the verdict on a run, and what it has raised."""
    raised: list[str] = []
    try:
        for line in train(mode, number, error):
            raised += [line] if line else []
    except (Stopped, EngineError) as stop:
        return "stopped", f"{'; '.join(raised)}: {stop}"
    except BaseException:
        return "WRONG ERROR", traceback.format_exc()
    verdict = "equal" if raised.pop() == expected else "DIFFERS"
    return verdict, "; ".join(raised)


def main(mode: str, first: int = 1, runs: int = 10**6) -> None:
    *_, expected = train(mode)
    counts = [runtime.call_count() for line in train(mode) if not line]
    calls = counts[1] - counts[0]
    tally: Counter[str] = Counter()
    numbers = range(first, min(calls, first + runs - 1) + 1)
    for number in numbers:
        error = OUT_OF_MEMORY if number % 2 else ILLEGAL_ADDRESS
        verdict, detail = run(mode, expected, number, error)
        tally[verdict] += 1
        if verdict.isupper():
            print(f"call {number}, error {error}: {verdict}\n{detail}", flush=True)
        elif len(numbers) < 30:
            print(number, verdict, detail)
    print(mode, f"{calls} calls", dict(tally))
    if any(verdict.isupper() for verdict in tally):
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]))

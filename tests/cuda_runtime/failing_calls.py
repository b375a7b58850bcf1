"""Trains while one call of the runtime fails, at each call in turn.

    python -m tests.cuda_runtime -m tests.cuda_runtime.failing_calls MODE [FIRST] [RUNS] [one|sticky]

A batch whose backward or step fails is repeated. A run is right if it ends with the
bits of the plain run, or in an error of ebbtide that says why it cannot go on. With
`sticky` all calls after the first that fails do, too: the job ends in an error, and its
state is one of the plain run, or cannot be read.
"""

import importlib
import json
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
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
    "copied": {"policy": "pipelined", "overlap": "both", "gradients": "copied"},
    "gpu-only": {"policy": "gpu-only"},
    "layers": {},
}
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700
# Of a process whose calls fail.
LIMIT_S = 300
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


class Job:
    """A model, its optimizer, what moves its layers, and batches."""

    def __init__(self, mode: str) -> None:
        self.model = make_model()
        self._layers: list[Any] = []
        if mode == "layers":
            self._layers.append(stream_weights(self.model, weights="streamed"))
            self._layers.append(offload_activations(self.model, activations="offload"))
        self.optimizer = make_optimizer(self.model, mode)
        self.batches = torch.randn(
            STEPS, 6, WIDTH, generator=torch.Generator().manual_seed(1)
        ).bfloat16()

    def backward(self, number: int) -> None:
        """Compute the gradients of a batch."""
        self.model(self.batches[number].cuda()).float().square().mean().backward()

    def state(self) -> str:
        """Return a digest of the optimizer's state."""
        entries = self.optimizer.state_dict()["state"].values()
        return _digest_of(
            value.float().cpu()
            for entry in entries
            for value in entry.values()
            if torch.is_tensor(value)
        )

    def close(self) -> None:
        """Close what is ebbtide's."""
        for one in [*reversed(self._layers), self.optimizer]:
            if not isinstance(one, torch.optim.SGD):
                one.close()


def train(mode: str, number: int = 0, error: int = 0) -> Iterator[str]:
    """Train, let a call of the batches fail, yield the errors that were raised, and
    last a digest.

    It yields an empty text where calls begin to fail, and where they end to; with moved
    layers that is the first step, since torch's own is no transaction."""
    job = Job(mode)
    yield ""
    runtime.fail("", number, error=error)
    try:
        done = 0
        while done < STEPS:
            try:
                job.backward(done)
                if mode == "layers":
                    runtime.fail("", 0)
                    yield ""
                job.optimizer.step()
                done += 1
            except (EngineError, *OF_TORCH) as raised:
                yield _line_of(raised)
                done = _updates_after(job.optimizer, done)
            job.optimizer.zero_grad()
        runtime.fail("", 0)
        yield ""
        yield _digest(job.model, job.optimizer)
    finally:
        runtime.fail("", 0)
        job.close()


def break_job(mode: str, number: int) -> tuple[Job, str]:
    """Train until a call fails, and all after it; return the job as it is then, and the
    error (empty: none)."""
    job = Job(mode)
    runtime.fail("", number, error=ILLEGAL_ADDRESS, sticky=True)
    try:
        for batch in range(STEPS):
            job.backward(batch)
            job.optimizer.step()
            job.optimizer.zero_grad()
    except (EngineError, *OF_TORCH) as raised:
        return job, _line_of(raised)
    return job, ""


def plain_states(mode: str) -> list[str]:
    """Return the digests of the optimizer's state before the first step, and after
    each."""
    job = Job(mode)
    states = [job.state()]
    for batch in range(STEPS):
        job.backward(batch)
        job.optimizer.step()
        job.optimizer.zero_grad()
        states.append(job.state())
    job.close()
    return states


def run_broken(mode: str, states: list[str], number: int) -> tuple[str, str]:
    """Return the verdict on a run whose calls all fail from one on, and the errors that
    it raised.

    The state that can be read then must be one of the plain job. Odd runs are not
    closed: the process ends as it is."""
    try:
        job, raised = break_job(mode, number)
        try:
            verdict = "state" if job.state() in states else "WRONG STATE"
        except (EngineError, *OF_TORCH) as error:
            verdict, raised = "no state", f"{raised}; {_line_of(error)}"
        with suppress(EngineError, *OF_TORCH):
            if number % 2 == 0:
                job.close()
    except BaseException:
        return "WRONG ERROR", traceback.format_exc()
    return verdict if raised else "equal", raised


def import_all() -> None:
    """Import and compile what a job needs, without a device: children do not need
    to."""
    importlib.import_module("ebbtide.interleave.engine.numerics.triton_kernel")
    param = nn.Parameter(torch.zeros(100))
    with closing(
        InterleavedAdamW([param], policy="interleaved:2", subgroup_params=30)
    ) as optimizer:
        # A backward would start threads.
        param.grad = torch.zeros(100)
        optimizer.step()


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function in a process of its own, which has the only
    context of the device."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(LIMIT_S)
        with open(write, "w") as pipe:
            json.dump(function(*args), pipe)
        sys.exit()
    os.close(write)
    with open(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if (
        status
        and os.WIFSIGNALED(status)
        and os.WTERMSIG(status) == signal.SIGABRT
        and text
    ):
        # Python ends threads that want its lock when it ends, and C++ aborts where one
        # is autograd's: it runs what is left of a backward that has failed.
        verdict, detail = json.loads(text)
        return f"{verdict}, aborted at its end", detail
    return ("WRONG END", f"status {status}, {text}") if status else json.loads(text)


def _line_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"


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
        values += [
            value.float().cpu()
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        ]
    return _digest_of(values)


def _digest_of(values: Iterable[torch.Tensor]) -> str:
    return str(
        hash(tuple(number for value in values for number in value.flatten().tolist()))
    )


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


def count_calls(mode: str) -> int:
    """Return how many calls of the runtime the batches of a job have."""
    begin, end, *_ = [runtime.call_count() for line in train(mode) if not line]
    return end - begin


def is_wrong(verdict: str) -> bool:
    return verdict.startswith(("WRONG", "DIFFERS"))


def main(mode: str, first: str = "1", runs: str = "1000000", kind: str = "one") -> None:
    is_sticky = kind == "sticky"
    expected: Any
    if is_sticky:
        import_all()
        expected, calls = in_child(plain_states, mode), in_child(count_calls, mode)
        assert isinstance(calls, int), calls
    else:
        *_, expected = train(mode)
        calls = count_calls(mode)
    tally: Counter[str] = Counter()
    # Errors that stay: calls all over the job.
    stride = max(1, calls // int(runs)) if is_sticky else 1
    numbers = range(int(first), calls + 1, stride)[: int(runs)]
    for number in numbers:
        error = OUT_OF_MEMORY if number % 2 else ILLEGAL_ADDRESS
        arguments = (mode, expected, number)
        verdict, detail = (
            in_child(run_broken, *arguments) if is_sticky else run(*arguments, error)
        )
        tally[verdict] += 1
        if is_wrong(verdict):
            print(f"call {number}, error {error}: {verdict}\n{detail}", flush=True)
        elif len(numbers) < 30:
            print(number, verdict, detail, flush=True)
    print(mode, f"{calls} calls", dict(tally))
    if any(map(is_wrong, tally)):
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:5])

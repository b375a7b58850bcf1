"""Frames of hooks: warnings, logs and tracebacks of a job show what they show
unrecorded."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Recorded, run_process, slow_case
from tests.profiler.agent.jobs import PRELUDE
from tests.profiler.agent.test_isolation import FILES

# Each place of the job warns and logs for all its callers, then raises; it prints the
# traceback, and ends with one.
JOB = """
import contextlib, logging, sys, traceback, warnings
warnings.simplefilter("always")
logging.basicConfig(format="%(pathname)s:%(lineno)d %(message)s", stream=sys.stdout)
fails = None
def speak(place):
    for level in range(1, 12):
        warnings.warn(f"{place} {level}", stacklevel=level)
        logging.warning(f"{place} {level}", stacklevel=level)
    if fails == place:
        raise ValueError(place)
class Talker(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp()
    def forward(self, x, module="head", compiled=0, call=0, self_=0, recorder=0, original=0):
        speak("forward")
        return self.layers(Echo.apply(x.requires_grad_()))
class Echo(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        speak("backward")
        return gradient
class Optimizer(BASE):
    def step(self, closure=None, original=None, optimizer_index=None):
        speak("step")
        return super().step(closure)
model = Talker()
optimizer = Optimizer(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
@contextlib.contextmanager
def printed():
    try:
        yield
    except ValueError:
        traceback.print_exc()
def closure():
    speak("closure")
    optimizer.zero_grad()
    loss = model(batch()[0], module="tail", compiled=1, call=2).sum()
    loss.backward()
    return loss
for fails in (None, "forward", "backward", "step", "closure", "evaluation"):
    with printed():
        closure()
    with printed():
        optimizer.step(original=1, optimizer_index=2)
    with printed():
        optimizer.step(closure)
    with printed():
        scaler.scale(model(batch()[0]).sum()).backward()
        scaler.step(optimizer)
    with printed(), torch.no_grad():
        model(batch()[0], recorder=1, original=2)
fails = sys.argv[1]
optimizer.step(closure)
"""


@pytest.mark.parametrize(
    ("place", "base"),
    [
        ("forward", "PlainSGD"),
        slow_case("backward", "torch.optim.SGD"),
        slow_case("step", "torch.optim.SGD"),
    ],
)
def test_hidden__shows_a_job_the_frames_it_has_unrecorded(
    place: str, base: str, record: Callable[..., Recorded], tmp_path: Path
) -> None:
    recorded = record(PRELUDE + JOB.replace("BASE", base), arguments=(place,))
    bare = run_process([sys.executable, tmp_path / "job.py", place], cwd=tmp_path)
    stderr = "".join(
        line
        for line in recorded.run.stderr.splitlines(keepends=True)
        if not line.startswith("ebbtide: ")
    )
    assert "forward 11" in bare.stdout
    assert "Traceback" in bare.stderr
    assert recorded.run.stdout == bare.stdout
    assert stderr == bare.stderr
    assert recorded.run.returncode == bare.returncode == 1


@pytest.mark.slow
def test_hidden__leaves_the_line_of_a_module_with_a_compiled_call(
    record: Callable[..., Recorded], tmp_path: Path
) -> None:
    job = """
import traceback
class Failing(nn.Module):
    def forward(self, x):
        raise ValueError
for compiled in (False, True):
    model = Failing()
    if compiled:
        model._compiled_call_impl = model._call_impl
    try:
        model(torch.ones(1, 16))
    except ValueError:
        traceback.print_exc()
print(torch.nn.Module.__call__.__code__.co_qualname)
"""
    recorded = record(PRELUDE + job + "mlp()(batch()[0]).sum().backward()\n")
    bare = run_process([sys.executable, tmp_path / "job.py"], cwd=tmp_path)
    assert recorded.run.stdout == bare.stdout
    assert bare.stderr in recorded.run.stderr


def test_hooks__take_no_keyword_argument_from_the_job() -> None:
    for file in FILES:
        for function in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
                and function.args.kwarg is not None
            ):
                own = [
                    argument.arg
                    for argument in (*function.args.args, *function.args.kwonlyargs)
                ]
                assert not own or not _passes_on(function, function.args.kwarg.arg), (
                    function.name,
                    own,
                )


def _passes_on(function: ast.AST, keywords: str) -> bool:
    """Return whether a function calls another with the keyword arguments that it has
    received."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    passed = [
        keyword for call in calls for keyword in call.keywords if keyword.arg is None
    ]
    return any(
        isinstance(keyword.value, ast.Name) and keyword.value.id == keywords
        for keyword in passed
    )

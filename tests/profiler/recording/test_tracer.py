"""`with Tracer(...)`: recording from inside a script."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from ebbtide.profiler import Trace, open_trace
from tests.conftest import run_process
from tests.profiler.agent.jobs import ADAMW, PLAIN, PRELUDE, STEPS

# name: the rest of a script that begins with a model, an optimizer and `train`; it
# writes traces named after it.
SCRIPTS = {
    "block": """
        step = torch.optim.AdamW.step
        train()
        with Tracer("block.ebb") as tracer:
            train()
        assert tracer.trace.ranks == [0] and tracer.warnings == []
        assert torch.nn.Module.__dict__["_compiled_call_impl"] is None
        assert torch.optim.AdamW.step is step
        train()
        with Tracer("second-block.ebb"):
            train()
    """,
    "raises": """
        with Tracer("raises.ebb"):
            train()
            raise KeyError("job")
    """,
    "compiled": """
        compiled = torch.compile(lambda x, y: F.mse_loss(model(x), y), backend="eager")
        with Tracer("compiled.ebb") as tracer:
            for _ in range(STEPS):
                with tracer.phase("forward"):
                    loss = compiled(*batch())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    """,
    "no-optimizer": """
        with Tracer("no-optimizer.ebb") as tracer:
            for _ in range(STEPS):
                F.mse_loss(model(torch.ones(2, 16)), torch.ones(2, 4)).backward()
                with tracer.phase("update"), torch.no_grad():
                    for p in model.parameters():
                        p -= 0.01 * p.grad
                        p.grad = None
    """,
    "wrong-use": """
        from ebbtide.profiler import TraceError
        def fails(call, kind, text):
            try:
                call()
            except kind as error:
                assert text in str(error), error
            else:
                raise AssertionError(text)
        fails(lambda: Tracer("a.ebb").phase("update").__enter__(), RuntimeError, "with block")
        with Tracer("a.ebb") as tracer:
            fails(lambda: tracer.phase("step").__enter__(), ValueError, "forward, backward or update")
            model(torch.ones(1, 16)).sum().backward()
            optimizer.step()
        fails(lambda: Tracer("a.ebb").__enter__(), TraceError, "exists already")
        with Tracer("b.ebb") as tracer:
            pass
        assert tracer.trace is None and "nothing was recorded" in tracer.warnings[0]
    """,
}

# Runs all scripts in one process, since each process would import torch, and writes how
# each ended.
RUN_ALL = """
import json, traceback
errors = {}
for name, script in json.load(open("scripts.json")).items():
    try:
        exec(compile(script, name, "exec"), {"__name__": "__main__"})
        errors[name] = ""
    except Exception:
        errors[name] = traceback.format_exc()
json.dump(errors, open("errors.json", "w"))
"""
LOOP = (
    "from ebbtide.profiler import Tracer\ndef "
    f"train():\n{textwrap.indent(PLAIN, '    ')}\n"
)


@dataclass(frozen=True)
class Outcome:
    """The end of all scripts: the tracebacks by the names of the scripts, and what the
    process printed."""

    folder: Path
    errors: dict[str, str]
    output: str

    def trace(self, name: str) -> Trace:
        return open_trace(self.folder / f"{name}.ebb")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("scripts")
    texts = {
        name: PRELUDE + ADAMW + LOOP + textwrap.dedent(script)
        for name, script in SCRIPTS.items()
    }
    (folder / "scripts.json").write_text(json.dumps(texts))
    run = run_process([sys.executable, "-c", RUN_ALL], cwd=folder)
    assert run.returncode == 0, run.stderr
    return Outcome(
        folder,
        json.loads((folder / "errors.json").read_text()),
        run.stdout + run.stderr,
    )


def test_tracer__records_the_block_only(outcome: Outcome) -> None:
    assert outcome.errors["block"] == ""
    for name in ("block", "second-block"):
        trace = outcome.trace(name)
        assert trace.meta.state == "complete"
        assert (
            list(trace.phases(0)["phase"]) == ["forward", "backward", "update"] * STEPS
        )
        assert trace.phases(0)["iteration"].max() == STEPS - 1
        assert {"heap", "rss"} <= set(trace.memory(0)["pool"])


def test_tracer__prints_nothing_but_the_warning_of_wrong_use(outcome: Outcome) -> None:
    (line,) = outcome.output.splitlines()
    assert line.startswith("wrong-use:")
    assert "UserWarning: ebbtide: nothing was recorded" in line


def test_phase__marks_a_step_compiled_as_one_function(outcome: Outcome) -> None:
    assert outcome.errors["compiled"] == ""
    assert (
        list(outcome.trace("compiled").phases(0)["phase"])
        == ["forward", "backward", "update"] * STEPS
    )


def test_phase__ends_iterations_by_updates_without_a_torch_optimizer(
    outcome: Outcome,
) -> None:
    assert outcome.errors["no-optimizer"] == ""
    assert outcome.trace("no-optimizer").phases(0)["iteration"].nunique() == STEPS


def test_tracer__reports_wrong_use_at_once(outcome: Outcome) -> None:
    assert outcome.errors["wrong-use"] == ""


def test_tracer__writes_the_trace_if_the_block_raises(outcome: Outcome) -> None:
    assert "KeyError: 'job'" in outcome.errors["raises"]
    assert outcome.trace("raises").phases(0)["iteration"].nunique() == STEPS

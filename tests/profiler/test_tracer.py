"""`with Tracer(...)`: recording from inside a script."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from ebbtide.profiler import open_trace
from tests.conftest import Run, run_process
from tests.profiler.agent.jobs import PLAIN, PRELUDE, STEPS


def run_job(tmp_path: Path, body: str) -> Run:
    """Run a script that begins with a model and an optimizer."""
    script = tmp_path / "job.py"
    script.write_text(PRELUDE + textwrap.dedent(body))
    return run_process([sys.executable, script], cwd=tmp_path)


LOOP = f"def train():\n{textwrap.indent(PLAIN, '    ')}\n"


def test_tracer__records_the_block_only(tmp_path: Path) -> None:
    job = run_job(
        tmp_path,
        LOOP
        + textwrap.dedent(
            """
            from ebbtide.profiler import Tracer
            step = torch.optim.AdamW.step
            train()
            with Tracer("run.ebb") as tracer:
                train()
            assert tracer.trace.ranks == [0] and tracer.warnings == []
            assert torch.nn.Module.__dict__["_compiled_call_impl"] is None
            assert torch.optim.AdamW.step is step
            train()
            with Tracer("second.ebb"):
                train()
            """
        ),
    )
    assert job.returncode == 0, job.stderr
    assert (job.stdout, job.stderr) == ("", "")
    for name in ("run.ebb", "second.ebb"):
        trace = open_trace(tmp_path / name)
        assert trace.meta.state == "complete"
        assert list(trace.phases(0)["phase"]) == ["forward", "backward", "update"] * STEPS
        assert trace.phases(0)["iteration"].max() == STEPS - 1
        assert {"heap", "rss"} <= set(trace.memory(0)["pool"])


def test_phase__marks_a_step_compiled_as_one_function(tmp_path: Path) -> None:
    job = run_job(
        tmp_path,
        """
        from ebbtide.profiler import Tracer
        compiled = torch.compile(lambda x, y: F.mse_loss(model(x), y), backend="eager")
        with Tracer("run.ebb") as tracer:
            for _ in range(STEPS):
                with tracer.phase("forward"):
                    loss = compiled(*batch())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
    )
    assert job.returncode == 0, job.stderr
    assert list(open_trace(tmp_path / "run.ebb").phases(0)["phase"]) == ["forward", "backward", "update"] * STEPS


def test_phase__ends_iterations_by_updates_without_a_torch_optimizer(tmp_path: Path) -> None:
    job = run_job(
        tmp_path,
        """
        from ebbtide.profiler import Tracer
        with Tracer("run.ebb") as tracer:
            for _ in range(STEPS):
                F.mse_loss(model(torch.ones(2, 16)), torch.ones(2, 4)).backward()
                with tracer.phase("update"), torch.no_grad():
                    for p in model.parameters():
                        p -= 0.01 * p.grad
                        p.grad = None
        """,
    )
    assert job.returncode == 0, job.stderr
    assert open_trace(tmp_path / "run.ebb").phases(0)["iteration"].nunique() == STEPS


def test_tracer__reports_wrong_use_at_once(tmp_path: Path) -> None:
    job = run_job(
        tmp_path,
        """
        from ebbtide.profiler import Tracer, TraceError
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
    )
    assert job.returncode == 0, job.stderr


def test_tracer__writes_the_trace_if_the_block_raises(tmp_path: Path) -> None:
    job = run_job(
        tmp_path,
        LOOP
        + textwrap.dedent(
            """
            from ebbtide.profiler import Tracer
            with Tracer("run.ebb"):
                train()
                raise KeyError("job")
            """
        ),
    )
    assert "KeyError: 'job'" in job.stderr
    assert open_trace(tmp_path / "run.ebb").phases(0)["iteration"].nunique() == STEPS

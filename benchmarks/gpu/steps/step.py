"""Helpers of all steps: arguments, figures, checks, parts in processes of their own,
and the commands of ebbtide."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import processes

STEPS = Path(__file__).resolve().parent
ROOT = STEPS.parent.parent.parent
BUILD = """
from deepspeed.accelerator import get_accelerator
# The second one is only needed without a GPU.
for name in ("CPUAdamBuilder", "ShareMemCommBuilder"):
    builder = get_accelerator().create_op_builder(name)
    if builder is not None and "NotImplemented" not in type(builder).__name__:
        builder.load(verbose=False)
print("{}")
"""
# Variable with the name of the call of run.py that a step belongs to.
CALL = "EBBTIDE_BENCHMARK_CALL"
# What DeepSpeed compiles, unless TORCH_EXTENSIONS_DIR is set.
EXTENSIONS = Path(tempfile.gettempdir()) / f"ebbtide-gpu-extensions-{os.getuid()}"


@dataclass
class StepContext:
    """The run of a step.

    Attributes:
        out: Folder of the results of all steps.
        rehearse: Whether to use tiny sizes, on the CPU and the emulated device.
        file: File of the figures.
        end_s: End of the step by time.monotonic().
        figures: Figures so far. They are written to `file` at once, so that a step that
            is stopped loses nothing.
    """

    out: Path
    rehearse: bool
    file: Path
    end_s: float
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, **figures: Any) -> None:
        """Add figures, and write all of them."""
        self.figures.update(figures)
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.figures, indent=1))
        new.replace(self.file)

    def check(self, name: str, holds: bool | None) -> None:
        """Add the result of a check, which fails the step if it is False; None if it
        needs a GPU."""
        self.add(checks={**self.figures.get("checks", {}), name: holds})

    def aim(self, name: str, reached: bool | None) -> None:
        """Add whether an aim of this project is reached, which does not decide whether
        the step has failed."""
        self.add(aims={**self.figures.get("aims", {}), name: reached})

    def left_s(self) -> float:
        return self.end_s - time.monotonic()


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every step; `doc`: docstring of its
    script."""
    flags = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    flags.add_argument("out", type=Path, help="folder of the results")
    flags.add_argument(
        "--rehearse", action="store_true", help="tiny sizes, without a GPU"
    )
    flags.add_argument(
        "--figures", type=Path, help="file of the figures (default: OUT/figures.json)"
    )
    flags.add_argument(
        "--seconds",
        type=float,
        default=3600.0,
        help="time limit in seconds (default: an hour)",
    )
    return flags


def start(args: argparse.Namespace) -> StepContext:
    """Start a step with parsed arguments, with the figures that an earlier call has
    left for it to continue."""
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.figures or args.out / "figures.json"
    figures = json.loads(file.read_text()) if args.figures and file.exists() else {}
    return StepContext(
        args.out, args.rehearse, file, time.monotonic() + args.seconds, figures
    )


def run_command(
    command: list[str | Path], expected: tuple[int, ...] = (0,), **env: str
) -> str:
    """Run a command and return its stdout; its stderr is that of the step. A status not
    in `expected` ends the step."""
    words = list(map(str, command))
    print("$", shlex.join(words), flush=True)
    done = subprocess.run(
        words, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in expected:
        print(done.stdout[-4000:])
        raise SystemExit(f"exit status {done.returncode} of: {shlex.join(words)}")
    return done.stdout


def run_part(
    words: Sequence[str | Path], limit_s: float, under: Sequence[str] = (), **env: str
) -> dict[str, Any]:
    """Run a part of a step, a Python script that prints its result as the last line,
    and end all that it has left.

    Args:
        words: The script and its arguments.
        limit_s: Time limit in seconds.
        under: Command that runs it.
        env: Variables to set.

    Returns:
        The result and its `seconds`; in place of the result `why`, the reason, if the
            part has failed.
    """
    command = [*under, sys.executable, *map(str, words)]
    print("$", shlex.join(command), flush=True)
    begin = time.monotonic()
    mark, variable = processes.marked()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env, **variable},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            output = None
        finally:
            processes.end(mark, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        text = errors.read()
    seconds = {"seconds": round(time.monotonic() - begin, 1)}
    lines = (output or "").strip().splitlines()
    if output is not None and process.returncode == 0 and lines:
        return {**json.loads(lines[-1]), **seconds}
    print(text[-4000:], flush=True)
    if output is None:
        return {"why": f"it took more than {limit_s:.0f} s", **seconds}
    if process.returncode < 0:
        return {
            "why": f"it died of {signal.Signals(-process.returncode).name}",
            **seconds,
        }
    return {
        "why": (text.strip().splitlines() or ["it printed nothing"])[-1][:400],
        **seconds,
    }


def ebbtide(*words: str | Path) -> str:
    """Run a command of ebbtide and return its stdout."""
    return run_command([sys.executable, "-m", "ebbtide", *words])


def build_extensions(limit_s: float) -> dict[str, Any]:
    """Compile what DeepSpeed otherwise compiles at its first use. Returns the result as
    `run_part` does.

    Once in a call of run.py: who asks while it compiles waits for it, and later ones
    get the same result. Nothing else compiles into the folder of these benchmarks, so
    that a lock there is that of a killed process.
    """
    call = os.environ.get(CALL)
    EXTENSIONS.mkdir(parents=True, exist_ok=True)
    with (EXTENSIONS / "built.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        built = json.loads(file.read() or "{}")
        if call is not None and built.get("call") == call:
            return {**built["result"], "seconds": 0.0}
        for lock in EXTENSIONS.rglob("lock"):
            lock.unlink(missing_ok=True)
        # Without the current folder on sys.path, whatever lies there.
        result = run_part(["-P", "-c", BUILD], limit_s)
        file.truncate(0)
        file.write(json.dumps({"call": call, "result": result}))
    return result


def load(path: Path) -> Any:
    """Import a script by its path.

    Some scripts have the name of a package that they import, so their folder is not
    left on sys.path.
    """
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    finally:
        # A script may have removed it itself.
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
    return module


def removed(folder: Path) -> Path:
    """Remove a folder that an earlier attempt may have left, and return its path."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def use_deterministic_algorithms() -> None:
    """Let torch compute the same gradients in every run.

    It raises where that is impossible. With `warn_only` the backward of attention would
    not be deterministic.
    """
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False

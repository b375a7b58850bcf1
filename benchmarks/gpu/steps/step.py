"""Helpers of all steps: arguments, figures, checks, and the commands of ebbtide."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS = Path(__file__).resolve().parent
ROOT = STEPS.parent.parent.parent


@dataclass
class StepContext:
    """The run of a step.

    Attributes:
        out: Folder of the results of all steps.
        rehearse: Whether to use tiny sizes, on the CPU and the emulated device.
        file: File of the figures.
        figures: Figures so far. They are written to `file` at once, so that a step that is stopped loses nothing.
    """

    out: Path
    rehearse: bool
    file: Path
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, **figures: Any) -> None:
        """Add figures, and write all of them."""
        self.figures.update(figures)
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.figures, indent=1))
        new.replace(self.file)

    def check(self, name: str, holds: bool | None) -> None:
        """Add the result of a check; None if it needs a GPU."""
        self.add(checks={**self.figures.get("checks", {}), name: holds})


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every step; `doc`: docstring of its script."""
    flags = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    flags.add_argument("out", type=Path, help="folder of the results")
    flags.add_argument("--rehearse", action="store_true", help="tiny sizes, without a GPU")
    flags.add_argument("--figures", type=Path, help="file of the figures (default: OUT/figures.json)")
    return flags


def start(args: argparse.Namespace) -> StepContext:
    """Start a step with parsed arguments."""
    args.out.mkdir(parents=True, exist_ok=True)
    return StepContext(args.out, args.rehearse, args.figures or args.out / "figures.json")


def run_command(command: list[str | Path], expected: tuple[int, ...] = (0,), **env: str) -> str:
    """Run a command and return its stdout; its stderr is that of the step. A status not in `expected` ends the step."""
    words = list(map(str, command))
    print("$", shlex.join(words), flush=True)
    done = subprocess.run(words, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in expected:
        print(done.stdout[-4000:])
        raise SystemExit(f"exit status {done.returncode} of: {shlex.join(words)}")
    return done.stdout


def ebbtide(*words: str | Path) -> str:
    """Run a command of ebbtide and return its stdout."""
    return run_command([sys.executable, "-m", "ebbtide", *words])


def load(path: Path) -> Any:
    """Import a script by its path.

    Some scripts have the name of a package that they import, so their folder is not left on sys.path.
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

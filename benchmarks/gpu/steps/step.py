"""What every step has: its arguments, a place for its figures, and ebbtide's commands."""

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
class Step:
    """out: the folder of all results. rehearse: tiny sizes, on the CPU and the emulated device. figures: what is known
    so far; it stands in `file` as soon as it is told, so that a step that is stopped loses nothing."""

    out: Path
    rehearse: bool
    file: Path
    figures: dict[str, Any] = field(default_factory=dict)

    def tell(self, **figures: Any) -> None:
        self.figures.update(figures)
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.figures, indent=1))
        new.replace(self.file)

    def check(self, name: str, holds: bool | None) -> None:
        """What should hold; None where only a GPU can tell."""
        self.tell(checks={**self.figures.get("checks", {}), name: holds})


def arguments(doc: str | None) -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    flags.add_argument("out", type=Path, help="the folder of all results")
    flags.add_argument("--rehearse", action="store_true", help="tiny sizes, without a GPU")
    flags.add_argument("--figures", type=Path, help="where the figures go (default: OUT/figures.json)")
    return flags


def begin(args: argparse.Namespace) -> Step:
    args.out.mkdir(parents=True, exist_ok=True)
    return Step(args.out, args.rehearse, args.figures or args.out / "figures.json")


def run(command: list[str | Path], right: tuple[int, ...] = (0,), **env: str) -> str:
    """Run a command and return what it prints; its stderr goes to ours. Ends the step where it fails."""
    words = list(map(str, command))
    print("$", shlex.join(words), flush=True)
    done = subprocess.run(words, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in right:
        print(done.stdout[-4000:])
        raise SystemExit(f"exit status {done.returncode} of: {shlex.join(words)}")
    return done.stdout


def ebbtide(*words: str | Path) -> str:
    return run([sys.executable, "-m", "ebbtide", *words])


def load(path: Path) -> Any:
    """A script as a module. By its path: some have the names of what they import, and so their folder, where they find
    each other, is not left among those that are searched."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    finally:
        # A script may have taken it out itself.
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
    return module


def fresh(folder: Path) -> Path:
    """A folder that is not there, whatever an earlier attempt left."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder

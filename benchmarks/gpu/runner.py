"""Runs steps, each a process group of its own with a hard limit, and keeps what is known of each in a JSON file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from listing import Step

ROOT = Path(__file__).resolve().parent.parent.parent
DONE, FAILED, TIMED_OUT, SKIPPED = "done", "failed", "timed out", "skipped"
# Between asking a group to end and ending it: a recorder closes its trace then.
GRACE_S = 4.0
TAIL_CHARS = 6000
# An archive that can be carried: what would make it larger is left out, and named.
MOST_BYTES = 15 << 20


@dataclass(frozen=True)
class Run:
    """out: the folder of all results. end_s: by time.monotonic(), when all must be over. pack: an archive of the
    results that is written anew after each step."""

    out: Path
    end_s: float
    rehearse: bool = False
    pack: Path | None = None

    def all(self, steps: Sequence[Step]) -> list[dict[str, Any]]:
        self.out.mkdir(parents=True, exist_ok=True)
        results = []
        for step in steps:
            before = read(self.out, step.name)
            if before and before["status"] == DONE and before["rehearsed"] == self.rehearse:
                results.append(before)
                continue
            print(f"{step.name}: {step.about}", file=sys.stderr, flush=True)
            results.append(self._one(step))
            print(f"  {line(results[-1])}", file=sys.stderr, flush=True)
            if self.pack is not None:
                pack(self.out, self.pack)
        return results

    def _one(self, step: Step) -> dict[str, Any]:
        why = self._why_not(step)
        result = {"name": step.name, "about": step.about, "rehearsed": self.rehearse}
        if why is None:
            result |= self._ran(step)
        else:
            result |= {"status": SKIPPED, "why": why, "seconds": 0.0}
        write(self.out, result)
        return result

    def _why_not(self, step: Step) -> str | None:
        missing = [name for name in step.after if (read(self.out, name) or {}).get("status") != DONE]
        if missing:
            return f"it needs what {', '.join(missing)} makes, which is not done"
        left = self.end_s - time.monotonic()
        needs = 0.0 if self.rehearse else step.needs_s
        if left <= needs:
            return f"{max(left, 0):.0f} s are left, and it needs about {step.needs_s:.0f}"
        return None

    def _ran(self, step: Step) -> dict[str, Any]:
        figures, log = self.out / f"{step.name}.figures", self.out / f"{step.name}.log"
        figures.unlink(missing_ok=True)
        command = [sys.executable, *step.command, str(self.out), "--figures", str(figures)]
        command += ["--rehearse"] if self.rehearse else []
        limit = step.rehearse_s if self.rehearse else step.limit_s
        # Its end comes before ours.
        limit = min(limit, self.end_s - time.monotonic() - GRACE_S)
        begun, at = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
        with log.open("wb") as file:
            status = bounded(command, limit, file, environment(self.rehearse))
        seconds = time.monotonic() - begun
        one_file_each(self.out)
        told = json.loads(figures.read_text()) if figures.exists() else {}
        tail = log.read_text(errors="replace")[-TAIL_CHARS:]
        figures.unlink(missing_ok=True)
        log.unlink()
        why = None
        if status is None:
            why = f"stopped after {seconds:.0f} s"
        elif status:
            why = (tail.strip().splitlines() or ["it said nothing"])[-1][:400]
        return {
            "status": TIMED_OUT if status is None else FAILED if status else DONE,
            "why": why,
            "seconds": round(seconds, 1),
            "begun": at,
            "command": command,
            "figures": told,
            "tail": tail,
        }


def environment(rehearse: bool) -> dict[str, str]:
    """Of every step: the repository before all else, so that nothing need be installed."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        # Else matrix products on a GPU differ from run to run.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # DeepSpeed builds its operations although torch's CUDA and the compiler's differ by a minor version.
        "DS_SKIP_CUDA_CHECK": "1",
        # Tiny operations of several threads take a hundred times as long where others have the cores.
        **({"OMP_NUM_THREADS": "1"} if rehearse else {}),
    }


def bounded(command: Sequence[str], limit_s: float, output: Any, env: dict[str, str]) -> int | None:
    """Run a command as a group of its own, and end what is left of the group. Its exit status; None where it was
    stopped at the limit."""
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return None
    finally:
        _signal(process.pid, signal.SIGKILL)
        process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def read(out: Path, name: str) -> dict[str, Any] | None:
    """What is known of a step; None where it has not been tried."""
    try:
        found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return found if "status" in found else None


def write(out: Path, result: dict[str, Any]) -> None:
    new = out / f"{result['name']}.new"
    new.write_text(json.dumps(result, indent=1))
    new.replace(out / f"{result['name']}.json")


def line(result: dict[str, Any]) -> str:
    """A step in one line."""
    wrong = [name for name, holds in result.get("figures", {}).get("checks", {}).items() if holds is False]
    said = [result["why"]] if result["why"] else [f"not so: {'; '.join(wrong)}"] if wrong else []
    return ", ".join([f"{result['status']} in {result['seconds']:.0f} s", *said])


def one_file_each(out: Path) -> None:
    """FOLDER.tar.gz in the place of each folder that a step made: traces, the one of a step that was stopped too."""
    for folder in [entry for entry in out.iterdir() if entry.is_dir()]:
        with tarfile.open(out / f"{folder.name}.tar.gz", "w:gz") as tar:
            tar.add(folder, folder.name)
        shutil.rmtree(folder)


def pack(out: Path, archive: Path) -> None:
    """An archive of the results, the smallest files first, as far as it can be carried."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    files = sorted(
        (file for file in out.iterdir() if file.is_file() and file != archive), key=lambda f: f.stat().st_size
    )
    new = archive.with_name(f".{archive.name}")
    left, taken = [], 0
    with tarfile.open(new, "w:gz") as tar:
        for file in files:
            if taken + file.stat().st_size > MOST_BYTES:
                left.append(file.name)
                continue
            taken += file.stat().st_size
            tar.add(file, file.name)
    new.replace(archive)
    if left:
        print(f"  too large for {archive.name}: {', '.join(left)}", file=sys.stderr, flush=True)

"""Runs steps, each in its own process group with a hard time limit, and keeps the result of each in a JSON file."""

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

from listing import BenchmarkStep

ROOT = Path(__file__).resolve().parent.parent.parent
DONE, FAILED, TIMED_OUT, SKIPPED = "done", "failed", "timed out", "skipped"
# Time between SIGTERM and SIGKILL, in which a recorder closes its trace.
GRACE_S = 4.0
TAIL_CHARS = 6000
# Limit of the archive; larger files are left out and listed.
MAX_ARCHIVE_BYTES = 15 << 20


@dataclass(frozen=True)
class StepRunner:
    """Runs steps one after the other.

    Attributes:
        out: Folder of the results.
        end_s: End of all steps by time.monotonic().
        rehearse: Whether to use tiny sizes, without a GPU.
        pack: Archive of the results, written after each step; None for none.
    """

    out: Path
    end_s: float
    rehearse: bool = False
    pack: Path | None = None

    def run_all(self, steps: Sequence[BenchmarkStep]) -> list[dict[str, Any]]:
        """Run the steps that are not done yet, and return the results of all."""
        self.out.mkdir(parents=True, exist_ok=True)
        results = []
        for step in steps:
            before = read_result(self.out, step.name)
            if before and before["status"] == DONE and before["rehearsed"] == self.rehearse:
                results.append(before)
                continue
            print(f"{step.name}: {step.about}", file=sys.stderr, flush=True)
            results.append(self._run(step))
            print(f"  {status_text(results[-1])}", file=sys.stderr, flush=True)
            if self.pack is not None:
                pack(self.out, self.pack)
        return results

    def _run(self, step: BenchmarkStep) -> dict[str, Any]:
        reason = self._skip_reason(step)
        result = {"name": step.name, "about": step.about, "rehearsed": self.rehearse}
        if reason is None:
            result |= self._run_process(step)
        else:
            result |= {"status": SKIPPED, "why": reason, "seconds": 0.0}
        write_result(self.out, result)
        return result

    def _skip_reason(self, step: BenchmarkStep) -> str | None:
        missing = [name for name in step.after if (read_result(self.out, name) or {}).get("status") != DONE]
        if missing:
            return f"it reads results of {', '.join(missing)}, which are not done"
        left = self.end_s - time.monotonic()
        needs = 0.0 if self.rehearse else step.needs_s
        if left <= needs:
            return f"{max(left, 0):.0f} s left, but it needs about {step.needs_s:.0f} s"
        return None

    def _run_process(self, step: BenchmarkStep) -> dict[str, Any]:
        figures, log = self.out / f"{step.name}.figures", self.out / f"{step.name}.log"
        figures.unlink(missing_ok=True)
        command = [sys.executable, *step.command, str(self.out), "--figures", str(figures)]
        command += ["--rehearse"] if self.rehearse else []
        limit = step.rehearse_s if self.rehearse else step.limit_s
        # The step ends before this process.
        limit = min(limit, self.end_s - time.monotonic() - GRACE_S)
        begin, start_time = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
        with log.open("wb") as file:
            status = run_bounded(command, limit, file, environment(self.rehearse))
        seconds = time.monotonic() - begin
        pack_folders(self.out)
        step_figures = json.loads(figures.read_text()) if figures.exists() else {}
        tail = log.read_text(errors="replace")[-TAIL_CHARS:]
        figures.unlink(missing_ok=True)
        log.unlink()
        reason = None
        if status is None:
            reason = f"stopped after {seconds:.0f} s"
        elif status:
            reason = (tail.strip().splitlines() or ["no output"])[-1][:400]
        return {
            "status": TIMED_OUT if status is None else FAILED if status else DONE,
            "why": reason,
            "seconds": round(seconds, 1),
            "begun": start_time,
            "command": command,
            "figures": step_figures,
            "tail": tail,
        }


def environment(rehearse: bool) -> dict[str, str]:
    """Return the environment of a step. The repository is first on PYTHONPATH, so nothing has to be installed."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        # Otherwise matrix products on a GPU differ from run to run.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # DeepSpeed compiles its operations even if the CUDA versions of torch and of the compiler differ slightly.
        "DS_SKIP_CUDA_CHECK": "1",
        # Tiny operations with several threads take a hundred times as long if other processes use the cores.
        **({"OMP_NUM_THREADS": "1"} if rehearse else {}),
    }


def run_bounded(command: Sequence[str], limit_s: float, output: Any, env: dict[str, str]) -> int | None:
    """Run a command in its own process group, and end all processes of the group.

    Returns:
        The exit status; None if the command was stopped at the time limit.
    """
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


def read_result(out: Path, name: str) -> dict[str, Any] | None:
    """Return the result of a step; None if it has not been run."""
    try:
        result: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return result if "status" in result else None


def write_result(out: Path, result: dict[str, Any]) -> None:
    """Write the result of a step."""
    new = out / f"{result['name']}.new"
    new.write_text(json.dumps(result, indent=1))
    new.replace(out / f"{result['name']}.json")


def status_text(result: dict[str, Any]) -> str:
    """Return the status of a step in one line."""
    failed = [name for name, holds in result.get("figures", {}).get("checks", {}).items() if holds is False]
    notes = [result["why"]] if result["why"] else [f"failed checks: {'; '.join(failed)}"] if failed else []
    return ", ".join([f"{result['status']} in {result['seconds']:.0f} s", *notes])


def pack_folders(out: Path) -> None:
    """Replace each folder of a step (traces, also of a stopped step) by FOLDER.tar.gz."""
    for folder in [entry for entry in out.iterdir() if entry.is_dir()]:
        with tarfile.open(out / f"{folder.name}.tar.gz", "w:gz") as tar:
            tar.add(folder, folder.name)
        shutil.rmtree(folder)


def pack(out: Path, archive: Path) -> None:
    """Write an archive of the results, the smallest files first, up to its size limit."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    files = sorted(
        (file for file in out.iterdir() if file.is_file() and file != archive), key=lambda f: f.stat().st_size
    )
    new = archive.with_name(f".{archive.name}")
    omitted, packed_bytes = [], 0
    with tarfile.open(new, "w:gz") as tar:
        for file in files:
            if packed_bytes + file.stat().st_size > MAX_ARCHIVE_BYTES:
                omitted.append(file.name)
                continue
            packed_bytes += file.stat().st_size
            tar.add(file, file.name)
    new.replace(archive)
    if omitted:
        print(f"  too large for {archive.name}: {', '.join(omitted)}", file=sys.stderr, flush=True)

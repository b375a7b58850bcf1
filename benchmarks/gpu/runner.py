"""Runs steps, each as a process with a hard time limit, and keeps the result of each in
a JSON file."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import Any

from listing import STEPS, BenchmarkStep

sys.path.append(str(STEPS))
import processes
from step import CALL, EXTENSIONS

ROOT = Path(__file__).resolve().parent.parent.parent
DONE, FAILED, TIMED_OUT, SKIPPED, RUNNING, UNFINISHED = (
    "done",
    "failed",
    "timed out",
    "skipped",
    "cut off",
    "unfinished",
)
# Not run again unless they are asked for: what failed must not take the time of the
# others.
ENDED = (DONE, FAILED, TIMED_OUT)
# Exit status of a step that continues in the next call.
CONTINUES = 75
# Time between SIGTERM and SIGKILL, in which a recorder closes its trace; the least time
# that a step is given.
GRACE_S, LEAST_S = 4.0, 5.0
# What a running step has measured is kept so often.
KEEP_S = 5.0
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
        pack: Archive of the results, written after each step and during it; None for
            none.
        report: Function that prints all results as Markdown, for OUT/report.md.
        call: Name of this run of steps, which no other has.
        keeping: Held while results are written.
        stopped: Set when this process ends before its steps.
    """

    out: Path
    end_s: float
    rehearse: bool = False
    pack: Path | None = None
    report: Callable[[Path], None] | None = None
    call: str = field(default_factory=lambda: uuid.uuid4().hex)
    keeping: Any = field(default_factory=Lock)
    stopped: Event = field(default_factory=Event)

    def run_all(
        self, steps: Sequence[BenchmarkStep], again: bool = False
    ) -> list[dict[str, Any]]:
        """Run the steps that have not ended yet, those that a call was cut off in last.
        Returns the results of all.

        Args:
            steps: The steps.
            again: Whether to run also those that have failed.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        before = {step.name: self._earlier(step) for step in steps}
        order = sorted(
            steps, key=lambda step: before[step.name].get("status") == RUNNING
        )
        with ThreadPoolExecutor() as pool:
            try:
                beside = [
                    pool.submit(self._run_shown, step, {})
                    for step in steps
                    if step.beside
                ]
                for step in order:
                    status = before[step.name].get("status")
                    if not (
                        step.beside or status == DONE or (status in ENDED and not again)
                    ):
                        self._run_shown(step, before[step.name])
            except BaseException:
                # The end of this process also ends what runs beside.
                self.stopped.set()
                raise
            for future in beside:
                future.result()
        return [self._earlier(step) for step in steps]

    def _run_shown(self, step: BenchmarkStep, before: dict[str, Any]) -> None:
        print(f"{step.name}: {step.about}", file=sys.stderr, flush=True)
        result = self._run(step, before)
        print(f"  {step.name}: {status_text(result)}", file=sys.stderr, flush=True)

    def _earlier(self, step: BenchmarkStep) -> dict[str, Any]:
        """Return the result of a step so far, which is empty if there is none of this
        kind."""
        result = read_result(self.out, step.name) or {}
        return result if result.get("rehearsed") == self.rehearse else {}

    def _run(self, step: BenchmarkStep, before: dict[str, Any]) -> dict[str, Any]:
        reason = self._skip_reason(step)
        result = {"name": step.name, "about": step.about, "rehearsed": self.rehearse}
        if reason is not None:
            # What it has measured in earlier calls stays.
            result = (
                {**result, "seconds": 0.0, **before}
                if before
                else result | {"status": SKIPPED, "seconds": 0.0}
            )
            result["why"] = reason
        else:
            result |= self._run_process(step, result, before)
        self._keep(result)
        return result

    def _skip_reason(self, step: BenchmarkStep) -> str | None:
        missing = [name for name in step.reads if not (self.out / name).exists()]
        if missing:
            return f"it reads {', '.join(missing)}, which is not there"
        left = self.end_s - time.monotonic()
        needs = LEAST_S + GRACE_S if self.rehearse else step.needs_s
        if left <= needs:
            return f"{max(left, 0):.0f} s left, but it needs about {step.needs_s:.0f} s"
        return None

    def _run_process(
        self, step: BenchmarkStep, head: dict[str, Any], before: dict[str, Any]
    ) -> dict[str, Any]:
        figures, log = self.out / f"{step.name}.figures", self.out / f"{step.name}.log"
        figures.unlink(missing_ok=True)
        if step.continues and "figures" in before:
            # Where it had ended, what failed is tried again.
            stale = ("failed", "checks") if before["status"] in ENDED else ()
            figures.write_text(
                json.dumps(
                    {k: v for k, v in before["figures"].items() if k not in stale}
                )
            )
        own_limit = step.rehearse_s if self.rehearse else step.limit_s
        # The step ends before this process.
        limit = min(own_limit, self.end_s - time.monotonic() - GRACE_S)
        command = [
            sys.executable,
            *step.command,
            str(self.out),
            "--figures",
            str(figures),
            "--seconds",
            f"{limit:.0f}",
        ]
        command += ["--rehearse"] if self.rehearse else []
        begin, start_time = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S%z")

        def result(status: str, reason: str | None) -> dict[str, Any]:
            return {
                "status": status,
                "why": reason,
                "seconds": round(
                    before.get("seconds", 0.0) * step.continues
                    + time.monotonic()
                    - begin,
                    1,
                ),
                "begun": start_time,
                "command": command,
                "figures": json.loads(figures.read_text()) if figures.exists() else {},
                "tail": log.read_text(errors="replace")[-TAIL_CHARS:],
            }

        written: list[float] = []

        def keep() -> None:
            # Only if there is something new: compressing takes a core from what is
            # measured.
            time_s = figures.stat().st_mtime if figures.exists() else 0.0
            if written != [time_s]:
                written[:] = [time_s]
                self._keep(head | result(RUNNING, "the call ended while it ran"))

        with log.open("wb") as file:
            status = run_bounded(
                command,
                limit,
                file,
                environment(self.rehearse, self.call),
                keep,
                self.stopped,
            )
        # Folders of those that run beside them are theirs.
        if not step.beside:
            pack_folders(self.out)
        ended = result(*self._outcome(status, limit < own_limit, log, figures))
        figures.unlink(missing_ok=True)
        log.unlink()
        return ended

    def _outcome(
        self, status: int | None, limited: bool, log: Path, figures: Path
    ) -> tuple[str, str | None]:
        """Return the status of a step that has ended, and the reason. status: its exit
        status; None: out of time."""
        if status == CONTINUES:
            return UNFINISHED, "it continues in the next call"
        if status is None:
            return (
                (RUNNING, "the time of the call was over")
                if limited
                else (TIMED_OUT, "stopped at its time limit")
            )
        if status:
            return FAILED, (
                log.read_text(errors="replace").strip().splitlines() or ["no output"]
            )[-1][:400]
        checks = (
            json.loads(figures.read_text()).get("checks", {})
            if figures.exists()
            else {}
        )
        failed = [name for name, holds in checks.items() if holds is False]
        return (
            (FAILED, f"failed checks: {'; '.join(failed)}") if failed else (DONE, None)
        )

    def _keep(self, result: dict[str, Any]) -> None:
        """Write the result of a step, the report and the archive."""
        with self.keeping:
            write_result(self.out, result)
            if self.report is not None:
                text = io.StringIO()
                with contextlib.redirect_stdout(text):
                    self.report(self.out)
                (self.out / "report.md").write_text(text.getvalue())
            if self.pack is not None:
                pack(self.out, self.pack)


def environment(rehearse: bool, call: str) -> dict[str, str]:
    """Return the environment of a step. The repository is first on PYTHONPATH, so
    nothing has to be installed."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        CALL: call,
        # ninja is there, which compiles DeepSpeed's operations.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        # Otherwise matrix products on a GPU differ from run to run.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # DeepSpeed compiles its operations even if the CUDA versions of torch and of
        # the compiler differ slightly.
        "DS_SKIP_CUDA_CHECK": "1",
        # In the user's folder a lock that a killed process left behind would make
        # DeepSpeed wait without a limit.
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(EXTENSIONS)),
        # Tiny operations with several threads take a hundred times as long if other
        # processes use the cores.
        **({"OMP_NUM_THREADS": "1"} if rehearse else {}),
    }


def run_bounded(
    command: Sequence[str],
    limit_s: float,
    output: Any,
    env: dict[str, str],
    keep: Callable[[], None],
    stopped: Event,
) -> int | None:
    """Run a command, and end all processes that it has left.

    Args:
        command: The command.
        limit_s: Time limit in seconds.
        output: File of its output.
        env: Its environment.
        keep: Function that is called at the start, and again every few seconds while it
            runs.
        stopped: Whether to stop it before its time.

    Returns:
        The exit status; None if the command was stopped at the time limit.
    """
    mark, variable = processes.marked()
    process = subprocess.Popen(
        command,
        env=env | variable,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        # Ctrl-C ends the step through this process.
        start_new_session=True,
    )
    end_s = time.monotonic() + limit_s
    try:
        while (left := end_s - time.monotonic()) > 0 and not stopped.is_set():
            keep()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(left, KEEP_S))
        processes.end(mark, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return None
    finally:
        processes.end(mark, signal.SIGKILL)
        process.wait()


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
    return ", ".join(
        [
            f"{result['status']} in {result['seconds']:.0f} s",
            *filter(None, [result["why"]]),
        ]
    )


def pack_folders(out: Path) -> None:
    """Replace each folder of a step (traces, also of a stopped step) by
    FOLDER.tar.gz."""
    for folder in [entry for entry in out.iterdir() if entry.is_dir()]:
        with tarfile.open(out / f"{folder.name}.tar.gz", "w:gz") as tar:
            tar.add(folder, folder.name)
        shutil.rmtree(folder)


def pack(out: Path, archive: Path) -> None:
    """Write an archive of the results, the smallest files first, up to its size
    limit."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    # A step that runs may remove its files meanwhile.
    sizes = {}
    for file in out.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if file.is_file() and file != archive:
                sizes[file] = file.stat().st_size
    new = archive.with_name(f".{archive.name}")
    omitted, packed_bytes = [], 0
    with tarfile.open(new, "w:gz") as tar:
        for file, size in sorted(sizes.items(), key=lambda item: item[1]):
            if packed_bytes + size > MAX_ARCHIVE_BYTES:
                omitted.append(file.name)
                continue
            packed_bytes += size
            with contextlib.suppress(FileNotFoundError):
                tar.add(file, file.name)
    new.replace(archive)
    if omitted:
        print(
            f"  too large for {archive.name}: {', '.join(omitted)}",
            file=sys.stderr,
            flush=True,
        )

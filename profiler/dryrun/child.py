"""Runs the job of a dry run in this process, which the command starts for it.

python -m ebbtide.profiler.dryrun OUTPUT OPTIONS train.py ARGUMENTS...
"""

import json
import os
import re
import runpy
import shutil
import sys
import threading
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from ebbtide.errors import UserError
from ebbtide.foreign_text import printable_line
from ebbtide.machines.machine import machine_from
from ebbtide.profiler.dryrun.errors import CannotFakeError, DryRunFinished
from ebbtide.profiler.dryrun.jobs.models import complete_stand_ins
from ebbtide.profiler.dryrun.launch import JobLaunched, become_dry_run, launcher_followed

_CANNOT_FAKE, _DOES_NOT_FIT = 2, 3
_INTERRUPTED = 130
_PROGRESS_S = 30.0
# Messages of torch about a tensor without memory, or an operation without an implementation for it -> a remedy.
_MESSAGES = (
    (
        re.compile(r"Could not run '([\w:.]+)' with arguments from the '(?:Meta|CUDA|AutogradCUDA)' backend"),
        "it has no implementation for fake tensors: register one with torch.library.register_fake",
    ),
    (
        re.compile(r"(data pointer|data_ptr)"),
        "it reads the memory of a tensor, and fake tensors have none: custom kernels need torch.library.register_fake",
    ),
    (
        re.compile(r"(\.?numpy\(\)) is not supported for tensor subclasses"),
        "fake tensors have no values: leave out what needs them, such as metrics, for the dry run",
    ),
    (
        re.compile(r"(DispatchStub: missing kernel|(?<=dummy base class )\w+)"),
        "it needs a build of torch with CUDA: leave it out for the dry run",
    ),
    (
        re.compile(r"(\d+ active drivers)"),
        "a Triton kernel needs a device: wrap it with torch.library.triton_op, and register a fake implementation",
    ),
    (
        re.compile(r"no rule registered for HigherOrderOperator (\w+)"),
        "it has no form without compilation that the dry run knows: use scaled_dot_product_attention for the dry run",
    ),
    (
        re.compile(r"^(Wait timeout)$"),
        "it waits for a key of the group's store that another rank sets, and there is no other rank",
    ),
)


def main(arguments: list[str]) -> int:
    """Run the job, write its trace, and return the exit status: 2 for what cannot be faked, else the job's own.

    `arguments`: path of the trace, settings as JSON, and the job (a script, `-m MODULE` or `-c CODE`, and its
    arguments)."""
    try:
        from ebbtide.profiler.dryrun.session import DryRun, DryRunOptions
        from ebbtide.profiler.dryrun.trace_of_run import trace_of_run
    except ImportError as error:
        return _fail(f"a dry run needs torch 2.13 in the environment of ebbtide: {error}")
    output, words, *job = arguments
    settings = json.loads(words)
    own = {name: settings.pop(name, None) for name in ("force", "machine", "printer", "check", "scratch")}
    force, machine, printer = own["force"], own["machine"], own["printer"]
    options = DryRunOptions(**settings, machine=machine_from(machine, "the machine") if machine else None)
    try:
        run = DryRun(options)
        if sys.stderr.isatty():
            threading.Thread(target=_show_progress, args=(run,), daemon=True).start()
        with run, launcher_followed(job):
            if own["scratch"]:
                for line in complete_stand_ins(Path(own["scratch"])):
                    print(line, file=sys.stderr)
                run.user_files.opened.clear()
            status = _run_job(job)
        if status == _CANNOT_FAKE:
            return status
        if status not in (0, _INTERRUPTED):
            print(f"ebbtide: incomplete: the job ended with status {status}; no trace is written", file=sys.stderr)
            return status
        builder = trace_of_run(run, ["python", *job])
        builder.meta["exit"] = {"code": status}
        builder.write(Path(output), force)
    except JobLaunched as job_launched:
        ranks = {"ranks": job_launched.ranks or options.ranks, "ranks_per_node": job_launched.ranks_per_node}
        settings |= {**ranks, **own}
        try:
            become_dry_run(job_launched.command, Path(output), settings, job_launched.environment)
        except UserError as error:
            return _fail(str(error))
    except UserError as error:
        return _fail(str(error))
    finally:
        if own["scratch"]:
            shutil.rmtree(own["scratch"], ignore_errors=True)
    for line in run.user_files.lines():
        print(f"ebbtide: {printable_line(line)}", file=sys.stderr)
    if printer is not None:
        module, function = printer.split(":")
        fits = getattr(import_module(module), function)(Path(output))
        if own["check"] and not fits and not status:
            return _DOES_NOT_FIT
    return status


def _show_progress(run: Any) -> None:
    """Say every half minute how far a dry run is, until its job ends."""
    start = time.monotonic()
    while True:
        time.sleep(_PROGRESS_S)
        if run.clock.closed:
            return
        print(
            f"ebbtide: {time.monotonic() - start:.0f} s: {run.tracker.rule.index + 1} of "
            f"{run.options.iterations} iterations, {len(run.clock.kernels):,} kernels so far",
            file=sys.stderr,
        )


def _run_job(job: list[str]) -> int:
    """Run a script, `-m MODULE` or `-c CODE` as Python does, and return its exit status."""
    try:
        if job[0] == "-m":
            sys.argv = job[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(job[1], run_name="__main__", alter_sys=True)
        elif job[0] == "-c":
            sys.argv = ["-c", *job[2:]]
            sys.path.insert(0, "")
            exec(compile(job[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = job
            sys.path.insert(0, str(Path(job[0]).resolve().parent))
            runpy.run_path(job[0], run_name="__main__")
    except DryRunFinished:
        return 0
    except KeyboardInterrupt:
        print("ebbtide: interrupted: the trace has what ran so far", file=sys.stderr)
        return _INTERRUPTED
    except SystemExit as error:
        return _status(error.code)
    except UserError:
        raise
    except Exception as error:
        reason = explain_failure(error)
        if reason is not None:
            return _fail(reason)
        traceback.print_exception(_without_own_frames(error))
        return 1
    return 0


def _status(code: object) -> int:
    """Return the exit status of `sys.exit(code)`."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _without_own_frames(error: BaseException) -> BaseException:
    """Return an exception without the frames that run the job."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return error.with_traceback(frames)


def _fail(message: str) -> int:
    print(f"ebbtide: {printable_line(' '.join(message.split()))}", file=sys.stderr)
    return _CANNOT_FAKE


def explain_failure(error: BaseException) -> str | None:
    """Return the line on what a real device would not have raised: operation, place, remedy; None for the job's own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CannotFakeError):
            return f"{cause}{_place(error)}"
        if isinstance(cause, RuntimeError | NotImplementedError | TypeError):
            for pattern, remedy in _MESSAGES:
                match = pattern.search(str(cause))
                if match:
                    return f"cannot dry-run {match[1]}: {remedy}{_place(error)}"
        cause = cause.__cause__
    return None


def _place(error: BaseException) -> str:
    """Return the innermost line of the job's own code; without any, that of a library."""
    own, torch = str(Path(__file__).resolve().parents[1]), f"{os.sep}torch{os.sep}"
    libraries = []
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = str(Path(frame.filename).resolve())
        if file.startswith(own) or frame.filename.startswith("<"):
            continue
        if "site-packages" not in file:
            return f" ({frame.filename}:{frame.lineno})"
        if torch not in file:
            libraries.append(f" ({frame.filename}:{frame.lineno})")
    return next(iter(libraries), "")

"""Runs the job of a dry run in this process, which the command starts for it.

python -m ebbtide.features.dryrun OUTPUT OPTIONS train.py ARGUMENTS...
"""

import contextlib
import functools
import json
import os
import runpy
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbtide.errors import UserError
from ebbtide.features.dryrun.errors import DryRunError
from ebbtide.features.dryrun.failures import explain_failure, job_traceback
from ebbtide.features.dryrun.files.view import FileView
from ebbtide.features.dryrun.jobs import notebooks
from ebbtide.features.dryrun.jobs.models import complete_stand_ins
from ebbtide.features.dryrun.launch import (
    JobLaunched,
    become_dry_run,
    launcher_followed,
)
from ebbtide.features.dryrun.peers import Peers, PeersNeeded
from ebbtide.features.dryrun.record import RunRecord, save_record
from ebbtide.features.dryrun.result import exit_status
from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.foreign_text import printable_line
from ebbtide.machines.machine import machine_from
from ebbtide.terminal_lines import print_note

_CANNOT_FAKE = 2
_INTERRUPTED = 130
# Settings beside those of `DryRunOptions`; `guest`: the path of the program of a dry
# run in another environment, which writes a record; None: in the environment of
# ebbtide; `peers`: the ranks that are run beside each other; None: rank 0 alone.
_OWN_SETTINGS = ("force", "machine", "prints", "check", "scratch", "guest", "peers")
_PROGRESS_S = 30.0


def main(arguments: list[str]) -> int:
    """Run the job, write its trace, and return the exit status: 2 for what cannot be
    faked, else the job's own.

    `arguments`: path of the trace, settings as JSON, and the job (a script, `-m MODULE`
    or `-c CODE`, and its arguments)."""
    output, words, *job = arguments
    settings = json.loads(words)
    own = {name: settings.pop(name, None) for name in _OWN_SETTINGS}
    machine, environment = own["machine"], dict(os.environ)
    options = DryRunOptions(
        **settings, machine=machine_from(machine, "the machine") if machine else None
    )
    try:
        with _peers_of(own["peers"]) as peers:
            options = replace(options, peers=peers)
            return _run(options, own, Path(output), job)
    except PeersNeeded as needed:
        line = f"ranks {', '.join(map(str, needed.ranks))} send tensors: all are run"
        print_note(line)
        settings |= {**own, "peers": needed.ranks}
        changed = {arguments[1]: json.dumps(settings)}
        again = [changed.get(word, word) for word in sys.orig_argv[1:]]
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *again], environment)
    except SystemExit as ended:
        return _status(ended.code)
    except JobLaunched as launched:
        settings |= {
            "ranks": launched.ranks or options.ranks,
            "ranks_per_node": launched.ranks_per_node,
            **own,
        }
        try:
            become_dry_run(
                launched.command, Path(output), settings, launched.environment
            )
        except UserError as error:
            return fail(str(error))
    except UserError as error:
        return fail(str(error))


@contextlib.contextmanager
def _peers_of(ranks: list[int] | None) -> Iterator[Peers]:
    """Yield the ranks that are run, with a process for each."""
    if ranks is None:
        yield Peers()
        return
    first = os.getpid()
    folder = tempfile.mkdtemp(prefix="ranks-", dir=FileView.parent)
    peers = Peers(ranks[0], ranks, folder)
    peers.start()
    try:
        yield peers
    finally:
        if os.getpid() == first:
            shutil.rmtree(folder, ignore_errors=True)


def _run(
    options: DryRunOptions, own: dict[str, Any], output: Path, job: list[str]
) -> int:
    # What it imports is not imported while the job runs.
    write = save_record if own["guest"] else _trace_writer(own["force"])
    run = DryRun(options)
    if sys.stderr.isatty():
        threading.Thread(target=_show_progress, args=(run,), daemon=True).start()
    status = 0
    with contextlib.chdir("."), run, launcher_followed(job):
        if own["scratch"]:
            for line in complete_stand_ins(Path(own["scratch"])):
                print(line, file=sys.stderr)
            run.user_files.opened.clear()
        status = _run_job(job)
        if not status and not run.finished:
            _wait_for_threads()
    if status not in (0, _INTERRUPTED):
        print_note(
            f"incomplete: the job ended with status {status}; no trace is written"
        )
        return status
    assert options.peers is not None
    record = options.peers.finish(run.record(), job)
    write(record, ["python", *job], status, output)
    for line in run.user_files.lines():
        print_note(line)
    return exit_status(output, own, status)


def _trace_writer(force: bool) -> Callable[[RunRecord, list[str], int, Path], None]:
    from ebbtide.features.dryrun.trace_of_run import write_trace

    return functools.partial(write_trace, force=force)


def _show_progress(run: Any) -> None:
    """Say every half minute how far a dry run is, until its job ends."""
    start = time.monotonic()
    while True:
        time.sleep(_PROGRESS_S)
        if run.clock.closed:
            return
        print_note(
            f"{time.monotonic() - start:.0f} s: {run.tracker.iterations} of "
            f"{run.options.iterations} iterations, {len(run.clock.kernels):,} kernels "
            "so far"
        )


def _run_job(job: list[str]) -> int:
    """Run a script, `-m MODULE` or `-c CODE` as Python does, and return its exit
    status."""
    try:
        if job[0] == "-m":
            sys.argv = job[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(job[1], run_name="__main__", alter_sys=True)
        elif job[0] == "-c":
            sys.argv = ["-c", *job[2:]]
            sys.path.insert(0, "")
            exec(compile(job[1], "<string>", "exec"), {"__name__": "__main__"})
        elif job[0].endswith(notebooks.SUFFIX):
            sys.argv = job
            sys.path.insert(0, os.getcwd())
            notebooks.run_notebook(Path(job[0]))
        else:
            sys.argv = job
            sys.path.insert(0, str(Path(job[0]).resolve().parent))
            runpy.run_path(job[0], run_name="__main__")
    except KeyboardInterrupt:
        print_note("interrupted: the trace has what ran so far")
        return _INTERRUPTED
    except SystemExit as error:
        return _status(error.code)
    except UserError:
        raise
    except Exception as error:
        if (reason := explain_failure(error)) is not None:
            raise DryRunError(reason) from error
        print(job_traceback(error), end="", file=sys.stderr)
        return 1
    return 0


def _wait_for_threads() -> None:
    """Wait for the threads that Python waits for at its end, but not for threads of
    pools, which it ends itself."""
    pools = getattr(sys.modules.get("concurrent.futures.thread"), "_threads_queues", ())
    for thread in threading.enumerate():
        if (
            not thread.daemon
            and thread is not threading.main_thread()
            and thread not in pools
        ):
            thread.join()


def _status(code: object) -> int:
    """Return the exit status of `sys.exit(code)`."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def fail(message: str) -> int:
    """Print a line on what ended the dry run, and return its exit status."""
    print(f"ebbtide: {printable_line(' '.join(message.split()))}", file=sys.stderr)
    return _CANNOT_FAKE

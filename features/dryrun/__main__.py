"""The two processes of a dry run: one runs the job; the other waits for it, and says in
a line if a signal ended it.

Compiled code that reads the address of a fake tensor ends its process, which can say
nothing about it then.
"""

import ctypes
import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Set
from types import FrameType
from typing import IO, NoReturn

from ebbtide.features.dryrun.child import fail, main
from ebbtide.features.dryrun.failures import explain_crash
from ebbtide.features.dryrun.files.view import FileView, made_in, remove_made, status_of

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_FORWARDED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# How long a job may take to end after SIGTERM, and the longest time that can be waited.
_PATIENCE_S = 5.0
_FOR_EVER_S = 3e6
# An interrupt that follows another one sooner is the same, sent to the process group.
_REPEATED_S = 1.0


def run_apart(arguments: list[str]) -> int:
    """Run the job in a process of its own, and return the exit status: 128 and more if
    a signal ended it."""
    signals = {signal.SIGCHLD, *_FORWARDED}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    output, scratch = arguments[0], json.loads(arguments[1])["scratch"]
    before = status_of(output)
    with (
        tempfile.TemporaryFile() as dump,
        tempfile.TemporaryDirectory(prefix="ebbtide-dry-run-") as folder,
    ):
        FileView.parent = folder
        job = os.fork()
        if not job:
            _be_job(arguments, dump, mask)
        ended = status = 0
        patience_s = _FOR_EVER_S
        while not ended:
            arrived = signal.sigtimedwait(signals, patience_s)
            if arrived is None:
                # It waits in compiled code, where no handler of Python runs.
                os.kill(job, signal.SIGKILL)
                patience_s = _FOR_EVER_S
                continue
            _pass_on(arrived, job)
            if arrived.si_signo == signal.SIGTERM:
                patience_s = _PATIENCE_S
            ended, status = os.waitpid(job, os.WNOHANG)
        dump.seek(0)
        stack = dump.read().decode(errors="replace")
        for left in os.listdir(folder):
            remove_made(made_in(os.path.join(folder, left)))
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    if -code in _CRASHES:
        return fail(explain_crash(signal.Signals(-code).name, stack))
    if code < 0:
        fail(
            f"incomplete: signal {-code} ({signal.strsignal(-code)}) ended the job; no "
            "trace is written"
        )
    if not code and status_of(output) == before:
        return fail(
            "incomplete: the job ended its process by os._exit or exec; no trace is "
            "written: take sys.exit"
        )
    return code if code >= 0 else 128 - code


def _pass_on(arrived: signal.struct_siginfo, job: int) -> None:
    """Send a signal to the job. What the kernel sends, for keys of the terminal, it
    gets itself."""
    if arrived.si_signo != signal.SIGCHLD and arrived.si_code <= 0:
        os.kill(job, arrived.si_signo)


def _be_job(arguments: list[str], dump: IO[bytes], mask: Set[int]) -> NoReturn:
    """Run the job, and end this process; before a crash, the last lines of Python are
    written to `dump`."""

    def end(*_: object) -> None:
        # one for the whole process group arrives twice
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + signal.SIGTERM)

    last_s = -_REPEATED_S

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last_s
        before_s, last_s = last_s, time.monotonic()
        if last_s - before_s >= _REPEATED_S:
            signal.default_int_handler(number, frame)

    # PR_SET_PDEATHSIG: end when the other process ends
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    faulthandler.enable(dump, all_threads=False)
    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    status = 1
    try:
        status = main(arguments)
    except KeyboardInterrupt:
        fail("interrupted before the end of the job: no trace is written")
        status = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the end of the interpreter: what is left of the faked device may be
        # used while modules are torn down. Nor may an exception go on in the code of
        # the process that waits.
        os._exit(status)


sys.exit(run_apart(sys.argv[1:]))

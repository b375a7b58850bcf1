"""Explains in a line why a job cannot be dry-run: the operation, the place, and what to
do."""

import functools
import os
import re
import signal
import subprocess
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from ebbtide.features.dryrun.errors import CannotFakeError, DryRunFinished
from ebbtide.profiler.agent.patches import Patches

_NEEDS_DEVICE = "it needs a device: leave it out for the dry run"
_COMPILED = (
    "it is compiled for CUDA: leave it out for the dry run, or choose the "
    "implementation in PyTorch"
)
# Messages about what a host without a device cannot do, with the operation -> a remedy.
_MESSAGES = (
    (
        re.compile(
            r"Could not run '([\w:.]+)' with arguments from the "
            r"'(?:Meta|CUDA|AutogradCUDA)' backend"
        ),
        "it has no implementation for fake tensors: register one with "
        "torch.library.register_fake",
    ),
    (
        re.compile(r"(data pointer|data_ptr)"),
        "it reads the memory of a tensor, and fake tensors have none: custom kernels "
        "need torch.library.register_fake",
    ),
    (
        re.compile(r"(\.?numpy\(\)) is not supported for tensor subclasses"),
        "fake tensors have no values: leave out what needs them, such as metrics, for "
        "the dry run",
    ),
    (
        re.compile(r"(DispatchStub: missing kernel|(?<=dummy base class )\w+)"),
        _NEEDS_DEVICE,
    ),
    (re.compile(r"module '(torch\._C)' has no attribute '(\w+)'"), _NEEDS_DEVICE),
    # An error of this dry run that a library quotes in one of its own.
    (
        re.compile(r"cannot dry-run (torch\.utils\.cpp_extension\.\w+\([^)]*\))"),
        _COMPILED,
    ),
    (
        re.compile(
            r"(CUDA) is not available|not compiled with (CUDA)|only available on (CUDA)"
            r"|(CUDA) driver version is insufficient|no (CUDA)-capable device"
        ),
        _NEEDS_DEVICE,
    ),
    (
        re.compile(
            r"(lib(?:c10_cuda|torch_cuda|cu[a-z]+|nv\w+|nccl)\.so[.\d]*): cannot open"
        ),
        _COMPILED,
    ),
    (
        re.compile(r"(\d+ active drivers|libcuda\.so)"),
        "a Triton kernel needs a device: wrap it with torch.library.triton_op, and "
        "register a fake implementation",
    ),
    (
        re.compile(r"no rule registered for HigherOrderOperator (\w+)"),
        "it has no form without compilation that the dry run knows: use "
        "scaled_dot_product_attention for the dry run",
    ),
    (
        re.compile(r"(fake mode) from fake tensor input"),
        "torch.export traces with fake tensors of its own: leave it out for the dry "
        "run",
    ),
    (
        re.compile(r"^(Wait timeout)$"),
        "it waits for a key of the group's store that another rank sets, and there is "
        "no other rank",
    ),
)
_PACKAGES = re.compile(
    r"(flash_attn|FlashAttention\d?|xformers|apex|transformer_engine|gptqmodel|awq)"
)
_LIBRARIES = (
    f"{os.sep}site-packages{os.sep}",
    f"{Path(sysconfig.get_path('stdlib')).resolve()}{os.sep}",
)
_OWN = tuple(
    f"{Path(__file__).resolve().parents[2] / name}{os.sep}"
    for name in ("profiler", "features")
)
# Calls of Python's file functions pass through here, with arguments of the job.
_FILES = f"{Path(__file__).resolve().parent / 'files'}{os.sep}"
_TORCH = f"{os.sep}torch{os.sep}"
_DUMPED_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
# Interrupts what the main thread waits for; jobs have other signals. From a process
# that it has forked: that trains.
WAKE = signal.SIGRTMAX
_FORKED = (
    "cannot dry-run a training in a process that the job forks: start it in the "
    "script's own, or by "
)
# Errors of the job itself, wherever they are raised: a file, a package or a device that
# it names is not there.
_OF_THE_JOB = (OSError, ImportError, SyntaxError, RecursionError)
_TEXTS_OF_THE_JOB = (
    "Expected all tensors to be on the same device",
    "found two different devices",
    "invalid device ordinal",
)


def explain_failure(error: BaseException) -> str | None:
    """Return the line on what a real device would not have raised: operation, place,
    remedy; None for the job's own."""
    if reason := next(filter(None, map(_reason, _causes(error))), None):
        return (
            f"{reason}{_place([*reversed(traceback.extract_tb(error.__traceback__))])}"
        )
    return None


def place_of_call() -> str:
    """Return where the job is, as at the end of a line on what it cannot do."""
    return _place([*reversed(traceback.extract_stack())])


def explain_crash(signal_name: str, dump: str) -> str:
    """Return the line on a signal that has ended the job in compiled code. `dump`: the
    stack by faulthandler."""
    # the last one is of the job itself
    frames = _DUMPED_FRAME.findall(dump.rpartition("Fatal Python error")[2])
    stack = [
        traceback.FrameSummary(file, int(line), name) for file, line, name in frames
    ]
    callers = (
        frame.name
        for frame in stack
        if not _is_own(frame.filename) and _TORCH not in frame.filename
    )
    return (
        f"cannot dry-run a call in {next(callers, 'compiled code')}: it ended the job "
        f"with {signal_name}, as code does "
        "that reads the memory of a fake tensor, which has none: leave it out for the "
        "dry run, or register a fake "
        f"implementation with torch.library.register_fake{_place(stack)}"
    )


def follow_threads(patches: Patches, has_ended: Callable[[], bool]) -> None:
    """Let what ends a dry run in a thread of the job end it in the main one, which may
    wait for that for ever."""
    main, report = threading.main_thread(), threading.excepthook
    ends: list[DryRunFinished] = []

    def receive(failed: threading.ExceptHookArgs) -> None:
        error = failed.exc_value
        if (
            isinstance(error, Exception)
            and not has_ended()
            and (reason := explain_failure(error))
        ):
            error = DryRunFinished(reason)
        if not isinstance(error, DryRunFinished):
            report(failed)
            return
        ends.append(error)
        signal.pthread_kill(main.ident or 0, WAKE)

    def end(*_: object) -> None:
        raise (
            ends[0]
            if ends
            else DryRunFinished(
                f"{_FORKED}torch.multiprocessing.spawn{place_of_call()}"
            )
        )

    if threading.current_thread() is main:
        signal.signal(WAKE, end)
        # Another process that the job has forked may still send it.
        patches.on_undo(functools.partial(signal.signal, WAKE, signal.SIG_IGN))
        patches.set(threading, "excepthook", receive)


def job_traceback(error: BaseException) -> str:
    """Return the traceback of an exception of the job, without the frames of the dry
    run."""
    report = traceback.TracebackException.from_exception(error)
    parts: list[traceback.TracebackException | None] = [report]
    for part in parts:
        if part is not None:
            parts += part.__cause__, part.__context__
            frames = (frame for frame in part.stack if not _is_own(frame.filename))
            part.stack = traceback.StackSummary.from_list(frames)
    return "".join(report.format())


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (
            None if cause.__suppress_context__ else cause.__context__
        )


def _reason(error: BaseException) -> str | None:
    if isinstance(error, CannotFakeError):
        return str(error)
    if isinstance(error, subprocess.CalledProcessError):
        return _of_process(error)
    text = str(error)
    for pattern, remedy in _MESSAGES:
        if match := pattern.search(text):
            return f"cannot dry-run {'.'.join(filter(None, match.groups()))}: {remedy}"
    if isinstance(error, ImportError) and (match := _PACKAGES.search(text)):
        return f"cannot dry-run {match[1]}: {_COMPILED}"
    is_of_the_job = isinstance(error, _OF_THE_JOB) or any(
        one in text for one in _TEXTS_OF_THE_JOB
    )
    return None if is_of_the_job else _of_fakes(error)


def _of_process(error: subprocess.CalledProcessError) -> str | None:
    """Return the line on a process of the job that runs Python, which has no faked
    device."""
    words = (
        error.cmd.split()
        if isinstance(error.cmd, str)
        else [os.fspath(word) for word in error.cmd]
    )
    if not words or not Path(words[0]).name.startswith("python"):
        return None
    return (
        f"cannot dry-run {' '.join(words[:3])}: another process, which ended with "
        f"status {error.returncode}, has no "
        "device: start the training in the script's own process"
    )


def _of_fakes(error: BaseException) -> str | None:
    """Return the line on an error that fake tensors or functions of CUDA have raised
    themselves."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return None
    file = frames[-1].f_code.co_filename
    if str(Path(file).resolve()).startswith(_FILES):
        return None
    in_cuda = f"{_TORCH}cuda{os.sep}" in file
    if not (in_cuda or _is_own(file) or f"{_TORCH}_subclasses{os.sep}" in file):
        return None
    remedy = (
        _NEEDS_DEVICE
        if in_cuda
        else "fake tensors do not support it: leave it out for the dry run"
    )
    message = next(iter(str(error).splitlines()), "")
    return (
        f"cannot dry-run {_operation(frames)} ({type(error).__name__}: {message}): "
        f"{remedy}"
    )


def _operation(frames: list[FrameType]) -> str:
    """Return the operation of torch whose fake form has failed, else the function."""
    for frame in frames:
        if (
            _is_own(frame.f_code.co_filename)
            and frame.f_code.co_name == "__torch_dispatch__"
        ):
            return str(frame.f_locals["func"])
    return f"{frames[-1].f_globals['__name__']}.{frames[-1].f_code.co_name}"


def _is_own(filename: str) -> bool:
    return filename.startswith((*_OWN, "<frozen runpy>")) or str(
        Path(filename).resolve()
    ).startswith(_OWN)


def _place(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line of the job's own code, else of a library; the innermost
    frame comes first."""
    libraries = []
    for frame in stack:
        if _is_own(frame.filename) or frame.filename.startswith("<"):
            continue
        place = f" ({frame.filename}:{frame.lineno})"
        if not any(part in str(Path(frame.filename).resolve()) for part in _LIBRARIES):
            return place
        if _TORCH not in frame.filename:
            libraries.append(place)
    return next(iter(libraries), "")

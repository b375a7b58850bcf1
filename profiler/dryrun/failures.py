"""Tells which exceptions of a job come from its dry run, and says so in one line."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from ebbtide.profiler.dryrun.errors import CannotFakeError

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
        re.compile(
            r"(DispatchStub: missing kernel|(?<=dummy base class )\w+|(?<=type )torch\.cuda\.\w+(?= not available))"
        ),
        "it needs a build of torch with CUDA",
    ),
    (
        re.compile(r"doesn't have (NCCL) built in"),
        "a dry run has one rank and no process group; leave out torch.distributed",
    ),
)


def explain_failure(error: BaseException) -> str | None:
    """Return the line about an exception that a real device would not have raised; None for the job's own.

    It names the operation, the line of the job and what to do.
    """
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
    """Return the innermost line of the job's own code."""
    own = str(Path(__file__).resolve().parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = str(Path(frame.filename).resolve())
        if not file.startswith(own) and "site-packages" not in file and not frame.filename.startswith("<"):
            return f" ({frame.filename}:{frame.lineno})"
    return ""

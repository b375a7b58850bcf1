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

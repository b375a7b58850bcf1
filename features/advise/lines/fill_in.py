"""Marks in lines to paste for values of a job that are not known. No line with a mark
runs before it is replaced."""

from types import EllipsisType
from typing import Any

_PREFIX = "fill in: "
# The value by its key in a configuration or its argument.
_VALUES = {
    "lr": "your learning rate, and betas, eps, weight_decay where you set them",
    "max_grad_norm": (
        "your largest norm of the gradients; leave it out without clipping"
    ),
    "gradient_clipping": (
        "your largest norm of the gradients; leave it out without clipping"
    ),
    "train_micro_batch_size_per_gpu": "your samples of a micro-step on a rank",
    "storage": "a folder on each drive",
    "nvme_path": "a folder on the drive",
}
NOTE = "values marked `fill in` are not known: replace them by those of your job"
# Stands for the value of an argument that is not known.
UNKNOWN: EllipsisType = ...


def mark(key: str) -> str:
    """Return the value of a key in a configuration whose value is not known."""
    return _PREFIX + _VALUES[key]


def argument(key: str, value: Any) -> str:
    """Return a keyword argument as code; `UNKNOWN`: `...`, which `call` marks."""
    return f"{key}=..." if value is UNKNOWN else f"{key}={value!r}"


def argument_line(text: str) -> str:
    """Return a line of a call for an argument, with the mark where its value is not
    known; comments stay."""
    if text.startswith("#"):
        return text
    key, _, value = text.partition("=")
    return f"{text},  # {mark(key)}" if value == "..." else f"{text},"


def is_marked(lines: str) -> bool:
    """Return whether lines or a configuration have a mark."""
    return _PREFIX in lines

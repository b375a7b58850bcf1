"""The line of a job's own code that is running."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType

import torch

import ebbtide


def user_line() -> str:
    """Return file and line of the innermost function outside of torch, DeepSpeed, ebbtide and the standard library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_of_user(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of Python"


@cache
def _is_of_user(file: str) -> bool:
    libraries = [torch, ebbtide, *filter(None, [sys.modules.get("deepspeed")])]
    if file.startswith(("<", *_folders(*(path for library in libraries for path in library.__path__)))):
        return False
    installed = _folders(sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return file.startswith(installed) or not file.startswith(_folders(sysconfig.get_path("stdlib")))


def _folders(*paths: str) -> tuple[str, ...]:
    return tuple(str(Path(path)) + "/" for path in paths)

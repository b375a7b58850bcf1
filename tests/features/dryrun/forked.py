"""Runs a function in a forked process: a dry run changes torch, and a fork costs less
than another import of it."""

from __future__ import annotations

import gc
import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import torch

# With its first backward, autograd starts a thread for each device, and a process that
# has such threads cannot fork. This one comes before any test has made a device known.
torch.zeros(1, requires_grad=True).sum().backward()


def run_forked(function: Callable[[], Any]) -> Any:
    """Return the result of a function that ran in a child. Raises AssertionError with
    its traceback if it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            torch.set_num_threads(1)
            gc.freeze()
            answer = True, function()
        except BaseException:
            answer = False, traceback.format_exc()
        with os.fdopen(writer, "wb") as file:
            file.write(pickle.dumps(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    succeeded, result = pickle.loads(data)
    assert succeeded, result
    return result

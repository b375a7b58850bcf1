"""Plugs the driver of `ebbtide run` into the agent."""

from __future__ import annotations

import json
import os
import sys
from typing import Callable

from ebbtide.profiler.agent.recorder import Recorder

# The options of `ebbtide run`, as JSON, in the environment of its job.
RUN = "EBBTIDE_RUN"


def install(recorder: Recorder) -> Callable[[], None]:
    """Drive torch's optimizers if the environment asks for it.

    Return a function that does nothing: the end of a recording is not that of the run.
    """
    text = os.environ.get(RUN)
    if text:
        try:
            from ebbtide.features.run.driver.install import install_driver
            from ebbtide.features.run.driver.phase_memory import PhaseMemory
            from ebbtide.features.run.options import RunOptions
        except ImportError as error:
            _write_reason(text, error)
        else:
            memory = PhaseMemory(recorder.flush)
            recorder.on_records.append(memory.add)
            install_driver(RunOptions.parse(text), recorder.note_once, memory)
    return lambda: None


def _write_reason(text: str, error: ImportError) -> None:
    """Tell the command why this Python cannot drive optimizers."""
    reason = (
        f"{sys.executable} has no ebbtide ({error}): install it there, pip install "
        "ebbtide"
    )
    path = os.path.join(json.loads(text)["folder"], f"0-{os.getpid()}.jsonl")
    with open(path, "w") as file:
        file.write(json.dumps({"kind": "left", "reason": reason}) + "\n")

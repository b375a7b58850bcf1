"""Call stacks of the job, by which memory is told apart."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ENGINE

_MAX_FRAMES = 40


class CallStacks:
    """The different call stacks so far.

    Args:
        root: The folder of torch; what it does inside an operation is left out.
        running_node: Returns the name of autograd's node that runs; None: none does.

    Attributes:
        texts: Each stack, from the outermost frame to the innermost one, a line per
            frame; what autograd runs without Python frames has the node of the graph
            instead, as in recordings.
    """

    def __init__(self, root: str, running_node: Callable[[], str | None]) -> None:
        self.texts: list[str] = []
        self._running_node = running_node
        # The name of autograd's node, and instruction and line of each frame -> number.
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._numbers_of_texts: dict[str, int] = {}
        folders = (Path(__file__).parents[3], Path(__file__).resolve().parents[3])
        own = (
            str(folder / name)
            for folder in folders
            for name in ("profiler", "features")
        )
        self._left_out = (
            *own,
            f"{root}/utils/_",
            f"{root}/_subclasses",
            f"{root}/_ops.py",
            f"{root}/nn/modules/module.py",
            f"{root}/_compile.py",
            f"{root}/_dynamo",
            "<frozen runpy>",
        )

    def current(self) -> int:
        """Return the number of the stack of the caller."""
        node = self._running_node()
        frame: FrameType | None = sys._getframe(1)
        parts: list[Any] = [node]
        # Each read of `f_code` calls the hook of `FileGuard`, which takes ten times as
        # long as this loop.
        while frame is not None and len(parts) < 2 * _MAX_FRAMES:
            parts += frame.f_lasti, frame.f_lineno
            frame = frame.f_back
        key = tuple(parts)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._number_of(
                self._text(sys._getframe(1), node)
            )
        return number

    def _number_of(self, text: str) -> int:
        number = self._numbers_of_texts.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number

    def _text(self, frame: FrameType | None, node: str | None) -> str:
        lines: list[str] = []
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            if not code.co_filename.startswith(self._left_out):
                lines.append(f"{code.co_name} ({code.co_filename}:{frame.f_lineno})")
            frame = frame.f_back
        from_engine = (
            node is not None
            and lines[:1]
            and lines[0].startswith("_engine_run_backward ")
        )
        return f"{ENGINE}\n{node}" if from_engine else "\n".join(reversed(lines))

"""Call stacks of the job as text, each kept once."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_MAX_FRAMES = 40


class CallStacks:
    """The different call stacks so far.

    Args:
        torch: The module `torch`; what it does inside an operation is left out.

    Attributes:
        texts: Each stack, from the outermost frame to the innermost one, a line per frame.
    """

    def __init__(self, torch: Any) -> None:
        self.texts: list[str] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        root = str(Path(torch.__file__).parent)
        self._left_out = (
            str(Path(__file__).parents[1]),
            str(Path(__file__).resolve().parents[1]),
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
        frame: FrameType | None = sys._getframe(1)
        places: list[tuple[CodeType, int]] = []
        while frame is not None and len(places) < _MAX_FRAMES:
            places.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        key = tuple(places)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.texts)
            self.texts.append(self._text(places))
        return number

    def _text(self, places: list[tuple[CodeType, int]]) -> str:
        frames = [
            f"{code.co_name} ({code.co_filename}:{line})"
            for code, line in reversed(places)
            if not code.co_filename.startswith(self._left_out)
        ]
        return "\n".join(frames)

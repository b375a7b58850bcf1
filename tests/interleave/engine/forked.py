"""Calls in forked children, with a time limit."""

import os
import select
import signal
from collections.abc import Callable
from typing import NamedTuple

from ebbtide.interleave.engine.errors import EngineError

TIMEOUT_S = 30.0


class ForkedCall(NamedTuple):
    """The result of a call in a child, or the EngineError that it has raised."""

    result: str | None
    error: str | None


def forked(call: Callable[[], object]) -> ForkedCall:
    """Fork, and call a function in the child. Fails if the child raises another error,
    or does not end in time."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        kind = b"?"
        text = ""
        try:
            text, kind = str(call()), b"r"
        except EngineError as error:
            text, kind = str(error), b"e"
        except BaseException as error:
            text = repr(error)
        finally:
            os.write(writer, kind + text.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        is_ready, _, _ = select.select([answers], [], [], TIMEOUT_S)
        if not is_ready:
            os.kill(child, signal.SIGKILL)
        answer = answers.read()
        os.waitpid(child, 0)
    assert is_ready, f"the child has not ended within {TIMEOUT_S} s"
    kind, text = answer[:1], answer[1:]
    assert kind in ("r", "e"), answer
    return ForkedCall(text, None) if kind == "r" else ForkedCall(None, text)

"""Keeps the frames of hooks out of warnings, logs and tracebacks of the job, which show
what they show unrecorded."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from types import CodeType, FunctionType, TracebackType
from typing import Any, Callable

# Python's `warnings` (for a stacklevel above 1) and `logging` pass over files with both
# of these words in their names, as the files of its import system have.
_HIDDEN = ".importlib._bootstrap"


def hide_frame(function: Any) -> Any:
    """Make warnings and logs pass over the frames of a function, and return it."""
    code = function.__code__
    function.__code__ = code.replace(co_filename=code.co_filename + _HIDDEN)
    return function


def hidden(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a hook and stays out of tracebacks.

    The hook does not show in the traceback of an exception that passes.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except BaseException as error:
            error.__traceback__ = without_hidden(error.__traceback__)
            raise  # adds no entry for this frame

    if isinstance(hook, FunctionType):
        hide_frame(hook)
        functools.update_wrapper(call, hook)
    return hide_frame(call)  # type: ignore[no-any-return]


def without_hidden(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its entries of hidden frames."""
    entries = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.endswith(_HIDDEN):
            entries.append(traceback)
        traceback = traceback.tb_next
    following = None
    for entry in reversed(entries):
        if entry.tb_next is not following:
            entry.tb_next = following
        following = entry
    return following


def code_with_hook(call: Any) -> CodeType:
    """Return the code of `torch.nn.Module._wrapped_call_impl` with a hook.

    The code has a third way to go on: in a module without a compiled call of its own
    (`Module.compile`), a hook is called at the line of the call without hooks. Raises
    ValueError or OSError if its source is another, or is not there.
    """
    lines, first_line = inspect.getsourcelines(call)
    tree = ast.parse("class Module:\n" + "".join(lines))
    (method,) = tree.body[0].body  # type: ignore[attr-defined]
    (branch,) = method.body
    (compiled,), (plain,) = branch.body, branch.orelse
    hooked = copy.deepcopy(compiled)
    for node in ast.walk(hooked):
        ast.copy_location(node, plain if node is hooked else plain.value)
    test = ast.parse("'_compiled_call_impl' in self.__dict__", mode="eval").body
    for node in ast.walk(test):
        ast.copy_location(node, branch.test)
    branch.body = [ast.copy_location(ast.If(test, [compiled], [hooked]), branch)]
    ast.increment_lineno(tree, first_line - 2)
    code = compile(tree, call.__code__.co_filename, "exec", dont_inherit=True)
    for name in ("Module", call.__name__):
        (code,) = [
            part
            for part in code.co_consts
            if isinstance(part, CodeType) and part.co_name == name
        ]
    return code

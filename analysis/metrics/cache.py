"""Results that are computed once per trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from ebbtide.profiler.trace import Trace

P = ParamSpec("P")
Result = TypeVar("Result")


def once_per_trace(
    function: Callable[Concatenate[Trace, P], Result],
) -> Callable[Concatenate[Trace, P], Result]:
    """Decorate a function of a trace and hashable arguments so that each result is kept as long as its trace.

    Callers share the result and must not change it. What is computed must depend on nothing but the trace and the
    arguments.
    """
    results: WeakKeyDictionary[Trace, dict[Any, Result]] = WeakKeyDictionary()

    @wraps(function)
    def cached(trace: Trace, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        of_trace = results.setdefault(trace, {})
        key = args, tuple(sorted(kwargs.items()))
        if key not in of_trace:
            of_trace[key] = function(trace, *args, **kwargs)
        return of_trace[key]

    return cached

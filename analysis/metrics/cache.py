"""Results that are computed once per trace, or kept while they are in use."""

from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import wraps
from threading import Lock
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from ebbtide.profiler.trace import Trace

P = ParamSpec("P")
Result = TypeVar("Result")
# Results by the name of a function and its arguments, as processes exchange them.
KeptResults = dict[str, dict[Any, Any]]
_KEPT: dict[str, WeakKeyDictionary[Trace, dict[Any, Any]]] = {}


def once_per_trace(
    function: Callable[Concatenate[Trace, P], Result],
) -> Callable[Concatenate[Trace, P], Result]:
    """Decorate a function of a trace so that each result is kept as long as its trace.

    Its further arguments are hashable. It must depend on these alone, and callers, who
    share it, must not change it.
    """
    results: WeakKeyDictionary[Trace, dict[Any, Result]] = WeakKeyDictionary()
    _KEPT[f"{function.__module__}.{function.__qualname__}"] = results

    @wraps(function)
    def cached(trace: Trace, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        of_trace = results.setdefault(trace, {})
        key = args, tuple(sorted(kwargs.items()))
        if key not in of_trace:
            of_trace[key] = function(trace, *args, **kwargs)
        return of_trace[key]

    return cached


def kept_results(trace: Trace, ranks: Collection[int] | None = None) -> KeptResults:
    """Return the results that `once_per_trace` keeps of a trace for some ranks.

    If `ranks` is None, return the results without arguments.
    """
    firsts = {()} if ranks is None else {(rank,) for rank in ranks}
    selected = {
        name: {
            key: result
            for key, result in results.get(trace, {}).items()
            if key[0][:1] in firsts
        }
        for name, results in _KEPT.items()
    }
    return {name: results for name, results in selected.items() if results}


def keep_results(trace: Trace, kept: KeptResults) -> None:
    """Keep results that another process has computed of the same trace."""
    for name, results in kept.items():
        _KEPT[name].setdefault(trace, {}).update(results)


# Time series that a function keeps: those of 8 ranks with 3 pools, and more; with small
# tables up to this many bytes.
_MIN_SERIES = 32
_SERIES_BYTES = 64e6


def recent_per_trace(
    function: Callable[Concatenate[Trace, P], Result],
) -> Callable[Concatenate[Trace, P], Result]:
    """Decorate a function like `once_per_trace`, but keep only the last results.

    Results that are as long as a table would not fit into memory for all ranks of a
    large job."""
    results: WeakKeyDictionary[Trace, OrderedDict[Any, Result]] = WeakKeyDictionary()
    lock = Lock()

    @wraps(function)
    def cached(trace: Trace, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        key = args, tuple(sorted(kwargs.items()))
        with lock:
            of_trace = results.setdefault(trace, OrderedDict())
            if key in of_trace:
                of_trace.move_to_end(key)
                return of_trace[key]
        result = function(trace, *args, **kwargs)
        with lock:
            of_trace[key] = result
            if len(of_trace) > max(
                _MIN_SERIES,
                _SERIES_BYTES * len(trace.ranks) / max(trace.stored_bytes, 1),
            ):
                of_trace.popitem(last=False)
        return result

    return cached

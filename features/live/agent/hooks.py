"""Plugs the figures of the last iterations into the agent."""

from __future__ import annotations

import functools
from typing import Callable
from weakref import WeakKeyDictionary

from ebbtide.profiler.agent.recorder import Recorder

from .iteration_figures import IterationFigures

_figures: WeakKeyDictionary[Recorder, IterationFigures] = WeakKeyDictionary()


def install(recorder: Recorder) -> Callable[[], object]:
    """Keep the figures of a recorder; return a function that forgets them."""

    def listen() -> None:
        _figures[recorder] = figures = IterationFigures()
        recorder.on_records.append(figures.add)

    listen()
    recorder.on_restart.append(listen)
    return functools.partial(_figures.pop, recorder, None)


def read_figures(recorder: Recorder) -> IterationFigures | None:
    """Return the figures of a recorder up to now; None where it keeps none."""
    figures = _figures.get(recorder)
    if figures is not None:
        recorder.flush()
        figures.read()
    return figures

"""Runs the view without a terminal, and reads its screen as text."""

from __future__ import annotations

import asyncio
import html
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ebbtide.features.live.trace import LiveTrace
from ebbtide.features.live.view.app import LiveView
from ebbtide.features.live.view.snapshot import (
    MAX_ITERATIONS,
    RecordingSnapshot,
    SnapshotReader,
)

_TEXT = re.compile(r'<text [^>]*x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>')
# Until the thread of the view has read what changed.
_WAIT_S = 30.0


def make_view(path: Path) -> LiveView:
    """Make the view of a trace, with its first snapshot read."""
    reader = SnapshotReader(LiveTrace(path, MAX_ITERATIONS))
    return LiveView(reader, reader.read(0) or RecordingSnapshot(path))


def screen_rows(view: LiveView) -> list[str]:
    """Return the rows of the screen as text, from the picture that the view exports."""
    rows: dict[float, list[tuple[float, str]]] = defaultdict(list)
    for x, y, text in _TEXT.findall(view.export_screenshot()):
        rows[float(y)].append((float(x), html.unescape(text).replace("\xa0", " ")))
    return ["".join(text for _, text in sorted(rows[y])) for y in sorted(rows)]


def drive(
    view: LiveView, size: tuple[int, int], keys: Sequence[str] = ()
) -> list[list[str]]:
    """Run the view at a size (columns, rows), press keys, and return its rows: once
    looked for findings, and after each key."""

    async def run() -> list[list[str]]:
        async with view.run_test(size=size) as pilot:
            for _ in range(round(_WAIT_S / 0.05)):
                if view.snapshot.findings is not None or view.snapshot.trace is None:
                    break
                await pilot.pause(0.05)
            await pilot.pause()
            shown = [screen_rows(view)]
            for key in keys:
                await pilot.press(key)
                await pilot.pause()
                shown.append(screen_rows(view))
            return shown

    return asyncio.run(run())

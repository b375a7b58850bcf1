"""The published runs with asynchronous gradient copies, as traces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ebbtide.profiler.importers.load import Hardware, import_trace
from ebbtide.profiler.trace import Trace

FOLDER = Path(__file__).parents[3] / "shared" / "published" / "deep-optimizer-states"
# Of each preset the folder of its runs, and what the files do not tell of the cards.
PRESETS = {
    "h100-80gb-sxm-published": ("h100-20B", Hardware(link=(5, 16))),
    "a100-40gb-published": ("a100-13B", Hardware(capacity_bytes=40 * 2**30, link=(4, 16))),
}
needs_published = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the published measurements are not here (shared/published)"
)


def runs(preset: str, where: Path) -> dict[str, Trace]:
    """The traces of a preset's runs, written to a folder; by the offloaded share and the stride, `ratio1.0-gap2`."""
    folder, hardware = PRESETS[preset]
    found = {}
    for log in sorted((FOLDER / folder).glob("*-flush_async1-*.log")):
        ratio, gap = re.findall(r"ratio([\d.]+)-.*opt_gaps(\d+)", log.name)[0]
        monitor = log.with_name(f"{log.stem}-monitor.csv")
        sources = [log, monitor] if monitor.exists() else [log]
        name = f"ratio{ratio}-gap{gap}"
        found[name] = import_trace(sources, where / f"{name}.ebb", hardware=hardware)
    return found

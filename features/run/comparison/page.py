"""The folder of a comparison: a page, traces, and outputs of the job."""

from __future__ import annotations

import base64
import io
import json
import shutil
from html import escape
from pathlib import Path

from ebbtide.analysis.plot import save
from ebbtide.features.run.comparison.comparison import JobComparison
from ebbtide.features.run.comparison.picture import draw_job_comparison
from ebbtide.features.run.comparison.view import job_comparison_view

_PAGE, _FIGURES = "comparison.html", "comparison.json"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto;
  padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto; }
caption { text-align: left; font-weight: bold; }
td, th { padding: .2em .8em; text-align: right; border-bottom: 1px solid #ccc; }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
img { max-width: 100%; }
"""


def write_page(comparison: JobComparison, folder: Path) -> None:
    """Write the page and the figures into a folder, and remove what else is there.

    The page has everything in it.
    """
    for path in folder.glob("*.logs"):
        shutil.rmtree(path, ignore_errors=True)
    file = io.BytesIO()
    save(draw_job_comparison(comparison), file, "png")
    picture = base64.b64encode(file.getvalue()).decode()
    parts = [
        f"<p>{escape(part)}</p>" if isinstance(part, str) else part._repr_html_()
        for part in job_comparison_view(comparison)
    ]
    command = escape(" ".join(comparison.command))
    page = (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'>"
        f"<title>ebbtide: {command}</title><style>{_STYLE}</style>"
        f"<h1>Policies on <code>{command}</code></h1>"
        f"<img alt='Iterations of each policy' src='data:image/png;base64,{picture}'>"
        f"{''.join(parts)}</html>"
    )
    (folder / _PAGE).write_text(page)
    (folder / _FIGURES).write_text(json.dumps(comparison.as_json(), indent=1) + "\n")


def is_folder_of_comparison(folder: Path) -> bool:
    """Return whether a comparison has written a folder."""
    return (folder / _PAGE).is_file()

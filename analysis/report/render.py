"""The page as HTML that needs nothing else: styles, scripts, data and Bokeh stand inside."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ebbtide.analysis.findings import Findings
from ebbtide.analysis.report.page import Page, page
from ebbtide.output_files import new_output
from ebbtide.profiler.trace import Trace
from ebbtide.units import ms_text

_SCRIPTS = ("tables.js", "readout.js", "controls.js", "timeline.js")


def write_report(
    trace: Trace, findings: Findings, output: Path, min_bytes: int, rank: int | None = None, force: bool = False
) -> None:
    """Write the page of a trace; it stands whole at `output` or not at all.

    min_bytes: how much must be free in a window. rank: the only one to draw. Raises UserError where the output
    stands already (without `force`) or cannot be written, TraceError for a rank that is not there.
    """
    with new_output(output, force, Path.is_file, "a file") as new:
        new.write_text(render(page(trace, findings, min_bytes, rank)), encoding="utf-8")


def render(content: Page) -> str:
    """The page as HTML. All that comes from a trace is escaped, and no script runs but those named by their hashes."""
    environment = Environment(
        loader=PackageLoader("ebbtide.analysis.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Bokeh resolves references in the order in which they stand.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= {"ms": ms_text, "code": _code, "sentence": _sentence}
    scripts = [_source(environment, name) for name in _SCRIPTS]
    if any(view.timeline for view in content.ranks):
        scripts = [*_bokeh(), *scripts]
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {' '.join(map(_hash, scripts))}"
    template = environment.get_template("page.html.j2")
    styles = _source(environment, "page.css")
    return template.render(page=content, policy=policy, scripts=scripts, styles=styles)


def _code(text: str) -> Markup:
    """Text with its `commands` as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _sentence(text: str) -> Markup:
    """Text that begins with a word begins with a capital; a command, a file or h2d stays as it is."""
    word = text.split(" ")[0].rstrip(",:;")
    return _code(text[:1].upper() + text[1:] if word.isalpha() and word != "ebbtide" else text)


def _bokeh() -> list[str]:
    """bokeh.min.js alone: neither widgets nor tables nor fonts."""
    return list(Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw)


def _source(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"

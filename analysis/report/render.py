"""Renders the page as one HTML file with everything in it: styles, scripts, data and Bokeh."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ebbtide.analysis.findings import Findings
from ebbtide.analysis.report.colors import color_styles
from ebbtide.analysis.report.page import Page, build_page
from ebbtide.output_files import new_output
from ebbtide.profiler.trace import Trace
from ebbtide.units import ms_text

_SCRIPTS = ("tables.js", "readout.js", "controls.js", "timeline.js")


def write_report(
    trace: Trace, findings: Findings, output: Path, min_bytes: int, ranks: Sequence[int] = (), force: bool = False
) -> None:
    """Write the page of a trace, complete or not at all.

    Args:
        trace: The trace.
        findings: Its findings.
        output: File to write.
        min_bytes: Least free memory of a window, bytes.
        ranks: Ranks to show: see `shown_ranks`.
        force: Replace a file that exists.

    Raises:
        UserError: The output exists (without `force`) or cannot be written.
        TraceError: The trace has no such rank.
    """
    with new_output(output, force, Path.is_file, "a file") as new:
        new.write_text(render_page(build_page(trace, findings, min_bytes, ranks)), encoding="utf-8")


def render_page(content: Page) -> str:
    """Return the page as HTML. All text of a trace is escaped, and only scripts run whose hashes the policy lists."""
    environment = Environment(
        loader=PackageLoader("ebbtide.analysis.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Bokeh resolves references in their order.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= {"ms": ms_text, "code": _code, "sentence": _sentence}
    scripts = [_source(environment, name) for name in _SCRIPTS]
    if any(view.timeline for view in content.ranks):
        scripts = [*_bokeh(), *scripts]
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {' '.join(map(_hash, scripts))}"
    template = environment.get_template("page.html.j2")
    styles = color_styles() + _source(environment, "page.css")
    return template.render(page=content, policy=policy, scripts=scripts, styles=styles)


def _code(text: str) -> Markup:
    """Return text with its `commands` as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _sentence(text: str) -> Markup:
    """Return text with a capital if it begins with a word; a command, a file or h2d is not changed."""
    word = text.split(" ")[0].rstrip(",:;")
    return _code(text[:1].upper() + text[1:] if word.isalpha() and word != "ebbtide" else text)


def _bokeh() -> list[str]:
    """Return bokeh.min.js alone, without widgets, tables and fonts."""
    return list(Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw)


def _source(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"

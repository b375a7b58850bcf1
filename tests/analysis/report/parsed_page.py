"""Pages of traces, as HTML and parsed."""

import functools
from html.parser import HTMLParser
from typing import Any

from ebbtide.analysis.findings import Findings
from ebbtide.analysis.report import build_page, render_page
from ebbtide.analysis.report.page import Page
from ebbtide.profiler.trace import Trace
from tests.analysis.report.report_traces import GIB, trained

NONE = Findings((), ())


class ParsedPage(HTMLParser):
    """The elements of a page, with their attributes and the text in them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(
        self, tag: str, attributes: list[tuple[str, str | None]]
    ) -> None:
        self.elements.append((tag, dict(attributes)))
        self.texts.setdefault(tag, []).append("")
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.texts[tag][-1] += data

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return " ".join(self.texts["main"][0].split())


def html_of(trace: Trace, findings: Findings = NONE, **options: Any) -> str:
    """Return the page of a trace as HTML."""
    return render_page(build_page(trace, findings, GIB, **options))


def parse(trace: Trace, findings: Findings = NONE, **options: Any) -> ParsedPage:
    """Return the page of a trace, parsed."""
    return ParsedPage(html_of(trace, findings, **options))


@functools.cache
def plain_page() -> tuple[Page, str]:
    """Return the content and the HTML of the page of a small trace, which several tests
    read."""
    content = build_page(trained().build("run.ebb"), NONE, GIB)
    return content, render_page(content)

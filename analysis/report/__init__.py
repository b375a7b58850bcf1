"""One HTML file that explains a trace to a person."""

from __future__ import annotations

from ebbtide.analysis.report.page import Page, page
from ebbtide.analysis.report.render import render, write_report

__all__ = ["Page", "page", "render", "write_report"]

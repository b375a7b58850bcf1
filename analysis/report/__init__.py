"""Writes one HTML file that explains a trace."""

from ebbtide.analysis.report.page import Page, build_page, render_page, write_report

__all__ = ["Page", "build_page", "render_page", "write_report"]

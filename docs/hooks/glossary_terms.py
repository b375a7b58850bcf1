"""MkDocs hook: make each term of the glossary a heading, so that the search of the site
finds it by its name."""

from __future__ import annotations

import re
from typing import Any

PAGE = "glossary.md"
# Among pages that use a term, the one that defines it comes first.
BOOST = 20
_HEAD = re.compile(r"\| \w+ \| definition \|\n\| --- \| --- \|\n")
_ROW = re.compile(r"^\| (?:\*\*)?(.+?)(?:\*\*)? \| (.+) \|$", re.MULTILINE)


def with_headings(markdown: str) -> str:
    """Return Markdown whose tables of terms are headings with a paragraph each."""
    return _ROW.sub(
        lambda row: f"\n### {row[1]}\n\n{row[2]}", _HEAD.sub("", markdown)
    ).replace("\\|", "|")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the glossary, and nothing else."""
    if page.file.src_uri != PAGE:
        return markdown
    page.meta["search"] = {"boost": BOOST}
    return with_headings(markdown)

"""MkDocs hook: take the navigation of the site from the tables in docs/README.md.

Headings of the second level become sections, those of the third level sections in
these, and each row whose first cell is a link becomes a page. So a page is added in one
place, for readers on the code host and on the site.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from repository_files import site_path

HEADING = re.compile(r"(##|###) (.+)")
ROW = re.compile(r"\| \[([^\]]+)\]\(([^)#]+)(#[^)]*)?\) \|")

NavItem = dict[str, Any]


def read_navigation(index: str, path_of: Callable[[str], str]) -> list[NavItem]:
    """Return the navigation in MkDocs' form.

    Args:
        index: Markdown of the index page.
        path_of: Function from a link of the index to the path of its page on the site.

    Returns:
        One dict per section, with its title and a list of sections and pages. Links to
            a heading are left out.
    """
    sections: list[NavItem] = []
    entries: list[NavItem] = []
    for line in index.splitlines():
        if match := HEADING.fullmatch(line):
            level, title = match.groups()
            parent = sections if level == "##" else next(iter(sections[-1].values()))
            entries = []
            parent.append({title: entries})
        elif match := ROW.match(line):
            title, link, heading = match.groups()
            if heading is None:
                entries.append({title: path_of(link)})
    return [section for section in sections if next(iter(section.values()))]


def on_config(config: Any) -> Any:
    """Set the navigation, with the index itself as the home page."""
    docs = Path(config.docs_dir)
    index = docs / "README.md"
    sections = read_navigation(
        index.read_text(), lambda link: site_path(docs.parent, docs / link)
    )
    config.nav = [{"Home": "README.md"}, *sections]
    return config

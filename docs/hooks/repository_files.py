"""MkDocs hook: make pages of files outside docs/ that pages link to, and let the links
lead to them.

Links in Markdown are relative to the file, as code hosts want it:
`../traces/README.md`. On the site such a file is a page below `project/`: Markdown as
it is, any other text as a block of code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

FENCE = re.compile(r"\s*(```|~~~)")
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
LANGUAGES = {
    ".py": "python",
    ".json": "json",
    ".sh": "bash",
    ".toml": "toml",
    ".md": "markdown",
}
PROJECT = "project"


def site_path(root: Path, path: Path) -> str:
    """Return the path of the page for a file of the repository, as MkDocs wants it:
    relative to docs/.

    Pages of notebooks end with `.md`, too (`notebook_pages.py`).
    """
    relative = os.path.relpath(os.path.normpath(path), root)
    if relative.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", relative.removeprefix("docs/"))
    return (
        f"{PROJECT}/{relative}"
        if relative.endswith(".md")
        else f"{PROJECT}/{relative}.md"
    )


def map_links(markdown: str, replace: Callable[[str], str]) -> str:
    """Return Markdown with each relative link outside code blocks replaced. Headings
    after `#` stay."""
    lines = []
    in_code = False
    for line in markdown.splitlines():
        if FENCE.match(line):
            in_code = not in_code
        elif not in_code:
            line = LINK.sub(
                lambda match: (
                    match[0]
                    if "://" in match[2]
                    else match[1] + replace(match[2]) + match[3]
                ),
                line,
            )
        lines.append(line)
    return "\n".join(lines)


def linked_files(root: Path, pages: list[Path]) -> list[Path]:
    """Return files outside docs/ that pages link to, directly or through Markdown files
    among them.

    Raises:
        FileNotFoundError: A link leads to no file of the repository.
    """
    linked: dict[Path, None] = {}
    queue = list(pages)
    while queue:
        page = queue.pop(0)
        targets: list[str] = []
        map_links(
            page.read_text(), lambda link, targets=targets: targets.append(link) or link
        )  # type: ignore[misc]
        for target in targets:
            path = Path(os.path.normpath(page.parent / target))
            if not path.is_file():
                raise FileNotFoundError(
                    f"{page.relative_to(root)} links to {target}, which is no file of "
                    "the repository"
                )
            if path not in linked and not path.is_relative_to(root / "docs"):
                linked[path] = None
                if path.suffix == ".md":
                    queue.append(path)
    return list(linked)


def source_page(root: Path, path: Path) -> str:
    """Return a page that shows a text file as a block of code."""
    text = path.read_text()
    fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", text)), 3)
    return (
        "# "
        f"{path.relative_to(root)}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"
    )


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each linked file outside docs/."""
    docs = Path(config.docs_dir)
    root = docs.parent
    for path in linked_files(root, sorted(docs.rglob("*.md"))):
        content = path.read_text() if path.suffix == ".md" else source_page(root, path)
        uri = site_path(root, path)
        files.append(
            File.generated(
                config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV
            )
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links lead to the pages of the site."""
    docs = Path(config.docs_dir)
    origin = docs / page.file.src_uri
    if page.file.src_uri.startswith(f"{PROJECT}/"):
        origin = docs.parent / page.file.src_uri.removeprefix(f"{PROJECT}/")
        if not origin.is_file():  # a page of a file that is not Markdown
            return markdown
    here = os.path.dirname(page.file.src_uri)
    return map_links(
        markdown,
        lambda link: os.path.relpath(
            site_path(docs.parent, origin.parent / link), here or "."
        ),
    )

"""The manual as a site: its navigation, its pages in a browser, and that they request
nothing from elsewhere."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.analysis.report.chromium import chromium, requests
from tests.docs.run_page import ROOT

DOCS = ROOT / "docs"
MARKDOWN = [
    *sorted(DOCS.glob("*.md")),
    *(
        ROOT / name
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "traces/README.md",
            "examples/streaming/README.md",
        )
    ),
]
LIST_ITEM = re.compile(r"( *)(?:[-*]|\d+\.) ")


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The hooks of MkDocs by name."""
    monkeypatch.syspath_prepend(DOCS / "hooks")
    names = [path.stem for path in (DOCS / "hooks").glob("*.py")]
    yield {name: __import__(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


def pages_of(navigation: object) -> list[str]:
    """Return the paths of all pages of a navigation."""
    if isinstance(navigation, str):
        return [navigation]
    entries = navigation if isinstance(navigation, list) else list(navigation.values())  # type: ignore[attr-defined]
    return [page for entry in entries for page in pages_of(entry)]


def test_navigation__has_every_page_of_docs_once(hooks: dict[str, ModuleType]) -> None:
    def path_of(link: str) -> str:
        return hooks["repository_files"].site_path(ROOT, DOCS / link)

    pages = pages_of(
        hooks["navigation"].read_navigation((DOCS / "README.md").read_text(), path_of)
    )
    written = {
        str(path.relative_to(DOCS).with_suffix(".md"))
        for kind in ("md", "ipynb")
        for path in DOCS.rglob(f"*.{kind}")
    }
    assert len(pages) == len(set(pages))
    assert written - {"README.md"} == {
        page for page in pages if not page.startswith("project/")
    }


def test_read_navigation__nests_sections_and_leaves_out_links_to_headings(
    hooks: dict[str, ModuleType],
) -> None:
    index = (
        "## A\n| [One](1.md) | what |\n### B\n| [Two](2.md) | what |\n| "
        "[Three](3.md#x) | what |\n## C\ntext\n"
    )
    assert hooks["navigation"].read_navigation(index, str) == [
        {"A": [{"One": "1.md"}, {"B": [{"Two": "2.md"}]}]}
    ]


def test_map_links__changes_links_outside_of_code(hooks: dict[str, ModuleType]) -> None:
    page = "[a](../b.md#c) ![p](p.png) [web](https://a.org)\n```\n[a](b)\n```\n[d](e)"
    mapped = hooks["repository_files"].map_links(page, str.upper)
    assert (
        mapped
        == "[a](../B.MD#c) ![p](P.PNG) [web](https://a.org)\n```\n[a](b)\n```\n[d](E)"
    )


def test_linked_files__refuses_links_to_no_file(
    hooks: dict[str, ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text("[a](../a.py)")
    with pytest.raises(FileNotFoundError, match=r"page\.md links to \.\./a\.py"):
        hooks["repository_files"].linked_files(tmp_path, [page])


def test_command_reference__has_every_option_of_every_command(
    hooks: dict[str, ModuleType],
) -> None:
    import typer

    from ebbtide.cli import make_app
    from ebbtide.cli.help import is_listed

    pages = hooks["command_reference"].command_pages()
    assert set(pages) == set(
        re.findall(r"\(commands/(.+)\.md\)", hooks["command_reference"].command_list())
    )
    app: typer.core.TyperGroup = typer.main.get_command(make_app())  # type: ignore[assignment]
    for name, command in app.commands.items():
        shown = [parameter for parameter in command.params if is_listed(parameter)]
        options = {
            option
            for parameter in shown
            for option in parameter.opts
            if option.startswith("-")
        }
        assert {
            option for option in options if f"`{option}" not in pages[name]
        } == set()
    least = (
        "| `--min-bytes SIZE` | Minimum free memory of a window in bytes, e.g. 500MB "
        "or 2GiB. | `1GiB` |"
    )
    assert least in pages["windows"]
    assert (
        "| `--rank N` | Rank to show. | the first one; all with --json |"
        in pages["windows"]
    )


def test_glossary__has_a_heading_for_each_term(hooks: dict[str, ModuleType]) -> None:
    glossary = (DOCS / "glossary.md").read_text()
    headings = re.findall(
        "^### (.+)$", hooks["glossary_terms"].with_headings(glossary), re.MULTILINE
    )
    assert {"iteration", "window", "`device`", "policy", "`zero-offload`"} <= set(
        headings
    )
    terms = sum(line.startswith(("| **", "| `")) for line in glossary.splitlines())
    assert len(headings) == terms + glossary.count("\n### ")


def test_table_pipes__are_shown_without_their_escapes(
    hooks: dict[str, ModuleType],
) -> None:
    html = r"<p>a\|b</p><td><code>c\|d</code></td>"
    assert (
        hooks["table_pipes"].on_page_content(html)
        == r"<p>a\|b</p><td><code>c|d</code></td>"
    )


def test_lists__read_alike_on_code_hosts_and_on_the_site() -> None:
    for page in MARKDOWN:
        # Python-Markdown wants a blank line before a list, and lists in lists four
        # spaces further right.
        problems = []
        previous, in_code = "", False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            in_code ^= line.lstrip().startswith("```")
            item = LIST_ITEM.match(line)
            if item and not in_code:
                if len(item[1]) % 4:
                    problems.append(
                        f"line {number}: {len(item[1])} spaces before an item"
                    )
                if (
                    previous.strip()
                    and not LIST_ITEM.match(previous)
                    and not previous.startswith(" ")
                ):
                    problems.append(f"line {number}: no blank line before the list")
            previous = line
        assert problems == [], page


@pytest.mark.parametrize(
    "path", sorted(DOCS.rglob("*.ipynb")), ids=lambda path: path.name
)
def test_notebooks__are_kept_with_the_outputs_of_one_run(path: Path) -> None:
    cells = [
        cell
        for cell in json.loads(path.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any(
        "image/png" in output.get("data", {})
        for cell in cells
        for output in cell["outputs"]
    )
    assert path.stat().st_size < 1_000_000


def printed_text(notebook: dict[str, Any]) -> list[str]:
    """Return what each cell of a notebook prints as text, without pictures."""
    outputs = [
        output
        for cell in notebook["cells"]
        for output in cell.get("outputs", ())
        if "png" not in str(output)
    ]
    texts = (output.get("text") or output["data"]["text/plain"] for output in outputs)
    return ["".join(text) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted(DOCS.rglob("*.ipynb")), ids=lambda path: path.name
)
def test_notebooks__print_what_is_stored(
    hooks: dict[str, ModuleType], path: Path
) -> None:
    stored = json.loads(path.read_text())
    assert printed_text(
        hooks["notebook_pages"].run_notebook(path, ROOT)
    ) == printed_text(stored)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this host and yield its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_site__builds_without_warnings_and_fits_narrow_screens(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(site),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert (build.returncode, build.stdout + build.stderr) == (0, "")
    pages = sorted(
        path.relative_to(site)
        for path in site.rglob("*.html")
        if "project" not in path.parts
    )
    assert len(pages) > 25
    # The build has run the notebooks: this figure is in the tutorial, too.
    assert (
        "bound: 3,337 ms" in (site / "notebooks" / "plan-an-offload.html").read_text()
    )
    with served(site) as address, chromium(tmp_path / "profile") as chrome:
        screen = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        for page in pages:
            chrome.get(f"{address}/{page}")
            assert (
                chrome.execute_script("return document.documentElement.scrollWidth")
                <= 400
            ), page
        wanted = (
            "return [...document.images].filter(i => !i.complete || "
            "!i.naturalWidth).map(i => i.src)"
        )
        chrome.get(f"{address}/tutorial.html")
        assert chrome.execute_script(wanted) == []
        assert {
            url
            for url in requests(chrome)
            if url.startswith("http") and not url.startswith(address)
        } == set()

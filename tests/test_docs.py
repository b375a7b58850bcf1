"""README and docs: links resolve, commands exist, pictures are up to date."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ebbtide.cli.command import ALIASES, find_commands
from tests.conftest import needs_all_features

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "traces" / "README.md",
    ROOT / "examples" / "streaming" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def script(name: str) -> ModuleType:
    """Import a script of docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    return script("pictures")


def test_links__lead_to_files_of_the_project() -> None:
    for page in PAGES:
        targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        missing = [
            target
            for target in targets
            if "://" not in target and not (page.parent / target).exists()
        ]
        assert missing == [], page


@needs_all_features
def test_commands__in_pages_exist() -> None:
    for page in PAGES:
        # An example on a page may be a command of its own.
        commands = {*(entry.name for entry in find_commands(None)), *ALIASES}
        commands |= set(
            re.findall(r"file: ebbtide/cli/commands/(\w+)\.py", page.read_text())
        )
        named = re.findall(
            r"(?:^\$ |`)ebbtide ([a-z][a-z-]+)", page.read_text(), re.MULTILINE
        )
        assert set(named) <= commands, page


def test_readme__is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1500


def test_pages__are_short_and_have_short_sentences() -> None:
    words = script("words")
    pages = words.count_pages()
    assert sum(page.total for page in pages) <= words.MAX_WORDS
    assert {
        page.name: page.long_sentences for page in pages if page.long_sentences
    } == {}


def test_count__leaves_out_bars_and_comments() -> None:
    text = """# A heading
<!-- setup
x = 1
-->
One sentence. Two
lines, [one link](page.md)!

| cell | other cell |
| --- | --- |

```console
$ a command
```
"""
    page = script("words").count(text)
    assert (page.prose, page.tables, page.code) == (8, 3, 3)
    assert page.sentences == ("One sentence.", "Two lines, one link!")


def test_index__names_every_command() -> None:
    text = (ROOT / "docs" / "README.md").read_text()
    assert [
        entry.name
        for entry in find_commands(None)
        if f"ebbtide {entry.name}" not in text
    ] == []


# Every twentieth picture, or all.
@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_pictures__equal_those_of_the_script(
    pictures: ModuleType, tmp_path: Path, step: int
) -> None:
    from matplotlib.testing.compare import compare_images

    for name in list(pictures.COMMANDS)[::step]:
        assert pictures.run_command(name, tmp_path / name) == 0
        assert (
            compare_images(
                str(ROOT / "docs" / "pictures" / name), str(tmp_path / name), tol=1.0
            )
            is None
        )

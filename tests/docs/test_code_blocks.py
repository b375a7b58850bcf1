"""The code blocks of README and docs run and print what the pages say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.doc_blocks import matches, read_blocks
from tests.docs.run_page import ROOT, BlockError, read_commands, run_page

PAGES = [
    ROOT / "README.md",
    ROOT / "traces" / "README.md",
    ROOT / "examples" / "streaming" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
TIMEOUT_S = 600


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def is_run(page: Path, quick: bool) -> bool:
    """Return whether a block of a page runs, also in quick runs."""
    code = [
        block
        for block in read_blocks(page.read_text())
        if block.is_run and block.kind in ("console", "python")
    ]
    return any(not (quick and block.slow) for block in code)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if is_run(page, quick=True)], ids=page_id
)
def test_quick_blocks__print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    assert run_page(page, tmp_path, quick=True) > 0


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if is_run(page, quick=False)], ids=page_id
)
def test_all_blocks__print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    # In a process of its own: pages register policies, rules and importers.
    command = [sys.executable, "-m", "tests.docs.run_page", str(page), str(tmp_path)]
    process = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert process.returncode == 0, process.stderr


def test_read_blocks__reads_marks_and_outputs() -> None:
    page = """<!-- setup slow
a = 1
-->
<!-- slow -->
<!-- numbers vary -->
```python
print(a)
```

```
2
```

<!-- not run: needs a GPU -->
```console
$ nvidia-smi
```

```json
{}
```
"""
    setup, code, output, shell = read_blocks(page)
    assert (setup.kind, setup.code, setup.slow) == ("setup", "a = 1", True)
    assert (code.kind, code.line, code.slow, code.numbers_vary) == (
        "python",
        6,
        True,
        True,
    )
    assert (output.kind, output.code) == ("output", "2")
    assert (shell.kind, shell.not_run) == ("console", "needs a GPU")


@pytest.mark.parametrize(
    "page",
    ["<!-- not run: -->\n```python\n```\n", "<!-- slow -->\ntext\n```python\n```\n"],
)
def test_read_blocks__refuses_marks_without_reason_or_block(page: str) -> None:
    with pytest.raises(ValueError, match="line"):
        read_blocks(page)


def test_read_commands__joins_continued_lines_and_outputs() -> None:
    code = "$ ebbtide plot \\\n    a.ebb\none\ntwo\n$ ls"
    assert list(read_commands(code)) == [("ebbtide plot a.ebb", "one\ntwo"), ("ls", "")]


def test_matches__dots_stand_for_lines() -> None:
    assert matches("a\n...\nc\n", "a \n\nb\nb\nc")
    assert not matches("a\n...\nc\n", "a\nb")
    assert not matches("a 1.5 ms", "a 2 ms")
    assert matches("a   1.5 ms", "a 20,000 ms", numbers_vary=True)
    assert not matches("a 1.5 ms", "a 2 s", numbers_vary=True)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```python\nprint(1)\n```\n```\n2\n```\n", "differs"),
        ("```python\n1 + 1  # 3, wrong\n```\n", "is 2, not 3"),
        ("```python\n'a'\n# 'b'\n```\n", "differs"),
        ("```console\n$ ebbtide summary missing.ebb\n```\n", "exit status 2"),
        ("```console\n$ echo a\nb\n```\n", "differs"),
        ("<!-- exit codes: 1 -->\n```console\n$ true\n```\n", "exit status 0"),
    ],
)
def test_run_page__finds_what_is_wrong(page: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(page)
    (tmp_path / "run").mkdir()
    with pytest.raises(BlockError, match=message):
        run_page(path, tmp_path / "run")

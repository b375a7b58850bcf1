"""Count the words of README.md and docs/*.md, and find long sentences.

    python docs/words.py [--sentences]

Words are separated by white space and have a letter or a digit, so the bars of tables are
none; comments, which readers do not see, do not count. Sentences are those of prose:
paragraphs and list items, without tables, code, pictures and lists of fields, whose items
begin with code. The exit status is 1 if there are more words, or longer sentences, than
the limits allow.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_WORDS = 69_000
MAX_SENTENCE_WORDS = 35

_FENCE = re.compile(r" *```")
_LIST_ITEM = re.compile(r" *(?:[-*]|\d+\.) +")
_FIELD = re.compile(r" *[-*] +\**`")
# A full stop or question mark, and what may close it.
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*]*\s+")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class PageCount:
    """The words of a page.

    Attributes:
        name: Path of the page from the root of the repository.
        prose: Words of paragraphs, lists and headings.
        tables: Words of tables.
        code: Words of code blocks.
        sentences: The sentences of its prose.
    """

    name: str
    prose: int
    tables: int
    code: int
    sentences: tuple[str, ...]

    @property
    def total(self) -> int:
        """All words."""
        return self.prose + self.tables + self.code

    @property
    def long_sentences(self) -> list[str]:
        """Sentences over the limit."""
        return [
            sentence
            for sentence in self.sentences
            if len(sentence.split()) > MAX_SENTENCE_WORDS
        ]


def pages() -> list[Path]:
    """Return README.md and the pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def count(text: str, name: str = "") -> PageCount:
    """Count the words of a page.

    Args:
        text: Its Markdown.
        name: Its name.
    """
    words = {"prose": 0, "tables": 0, "code": 0}
    paragraphs: list[str] = []
    in_code = in_comment = False
    is_open = False
    for line in text.splitlines():
        is_fence = _FENCE.match(line) is not None
        in_comment |= line.startswith("<!--")
        is_indented = line.startswith("    ") and not is_open
        is_indented &= _LIST_ITEM.match(line) is None
        is_code = in_code or is_fence or in_comment or is_indented
        is_table = not is_code and line.lstrip().startswith("|")
        kind = "code" if is_code else "tables" if is_table else "prose"
        words[kind] += 0 if in_comment else sum(map(_is_word, line.split()))
        in_code ^= is_fence
        in_comment &= "-->" not in line
        is_sentence = kind == "prose" and bool(line.strip())
        if not is_sentence or line.startswith(("#", "![")) or _FIELD.match(line):
            is_open = False
        elif is_open and not _LIST_ITEM.match(line):
            paragraphs[-1] += " " + line.strip()
        else:
            item = _LIST_ITEM.match(line)
            paragraphs.append(line[item.end() if item else 0 :].strip())
            is_open = True
    sentences = [
        sentence
        for paragraph in paragraphs
        for sentence in _SENTENCE_END.split(_LINK.sub(r"\1", paragraph))
        if sentence.strip()
    ]
    return PageCount(name, **words, sentences=tuple(sentences))


def _is_word(token: str) -> bool:
    return any(map(str.isalnum, token))


def count_pages() -> list[PageCount]:
    """Count the words of all pages."""
    return [
        count(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
        for path in pages()
    ]


def main() -> int:
    """Print the words of each page, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sentences", action="store_true", help="Print the long sentences, too."
    )
    options = parser.parse_args()
    counts = sorted(count_pages(), key=lambda page: page.total)
    row = "{:<28}{:>8}{:>8}{:>8}{:>8}{:>6}{:>9}"
    print(row.format("page", "words", "prose", "tables", "code", "mean", "longest"))
    for page in counts:
        lengths = [len(sentence.split()) for sentence in page.sentences] or [0]
        mean, longest = f"{sum(lengths) / len(lengths):.1f}", max(lengths)
        columns = (page.total, page.prose, page.tables, page.code)
        print(row.format(page.name, *columns, mean, longest))
    total = sum(page.total for page in counts)
    number = sum(len(page.long_sentences) for page in counts)
    print(f"{total:,} words (at most {MAX_WORDS:,})")
    print(f"{number} sentences of more than {MAX_SENTENCE_WORDS} words (at most 0)")
    if options.sentences:
        for page in counts:
            for sentence in page.long_sentences:
                print(f"{page.name}: {len(sentence.split())}: {sentence}")
    return int(total > MAX_WORDS or number > 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""Reads configurations of training programs, alone or inside of other text: objects in
JSON or Python, YAML, TOML, printed arguments, flags of a command.

`configurations.toml` has the settings that programs are recognized by.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ebbtide.features.explain.line_formats import file_content
from ebbtide.features.explain.pasted import PastedText
from ebbtide.features.explain.record import Place, Record, reader
from ebbtide.units import counted

_FILE = "readers/configurations.toml"
_ENTRY = re.compile(
    r"^(?P<indent> *)(?:- )?['\"]?(?P<name>[A-Za-z_][\w.-]{0,80})['\"]?"
    r"(?:\s?\.{3,120}\s+|\s*[:=]\s*)(?P<value>\S.{0,4000})?$"
)
_TOKEN = re.compile(
    r"(?:(?<![\w.])['\"]?(?P<name>[A-Za-z_][\w.]{0,80})['\"]?\s{0,4}[:=]\s{0,4})?\{|\}"
    r"|(?<![\w.])['\"]?(?P<key>[A-Za-z_][\w.]{0,80})['\"]?\s{0,4}[:=]\s{0,4}"
    r"(?P<value>\[[^\]\[{}]{0,500}\]|\"[^\"]{0,300}\"|'[^']{0,300}'|[^\s,{}][^,{}]{0,300})"
)
_PREFIX = re.compile(r"^(?:\[[^\]]{1,80}\]\s?){1,8}")
_SECTION = re.compile(r"^\[([a-z_][\w.]{0,60})\]$")
_FLAG = re.compile(
    r"--([A-Za-z][\w.-]{1,80})['\"]?(?:[\s=,]+['\"]?((?!-)[^\s\\'\",]{1,200}))?"
)
_MARKS = re.compile(r"[:={]|--|\.\.\.|^\[")
_FILLER = re.compile(r"^\s*(?:[\[\](){},]*|#.*|```.*|-( .*)?|\S*[({])\s*$")
_MAX_SETTINGS, _MAX_DEPTH = 2000, 8
_MAX_LINE_CHARS = 1 << 13


@dataclass(frozen=True, kw_only=True)
class Configuration(Record):
    """Settings of a program.

    Attributes:
        program: The program that has such settings.
        settings: Values as text by their paths, as in `fp16.enabled`; true and false
            are in lower case, and none is empty.
        facts: Statements on `sharding`, `offload`, `checkpointing`, `precision` and
            `method`; a kind that the settings do not tell of is missing.
    """

    program: str
    settings: dict[str, str]
    facts: dict[str, list[str]]

    @property
    def title(self) -> str:
        return f"{counted(len(self.settings), 'setting')} of {self.program}"


def setting(settings: dict[str, str], name: str) -> str:
    """Return the value of a setting whose path ends in a name; empty if missing."""
    ends = (value for path, value in settings.items() if path.endswith(f".{name}"))
    return settings.get(name, next(ends, ""))


def fitting_values(settings: dict[str, str], where: dict[str, str]) -> list[str] | None:
    """Return the values of the settings of a condition; None where it does not hold."""
    values = [setting(settings, name) for name in where]
    tests = zip(where.values(), values, strict=True)
    holds = all(re.fullmatch(test, value, re.IGNORECASE) for test, value in tests)
    return values if holds else None


@dataclass
class _Block:
    """Settings of lines that follow each other."""

    settings: dict[str, str] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    section: str = ""
    # The names that enclose the next setting: by braces, or by their indentation.
    braces: list[str] = field(default_factory=list)
    path: list[tuple[int, str]] = field(default_factory=list)

    def add(self, names: list[str], value: str) -> None:
        text = value.strip().strip("'\"")
        text = text.lower() if text in ("True", "False") else text
        if len(self.settings) < _MAX_SETTINGS:
            path = ".".join(filter(None, names))
            self.settings[path] = "" if text in ("None", "null") else text

    def read(self, number: int, line: str) -> bool:
        """Read a line; return whether it belongs to a configuration."""
        count = len(self.settings)
        belongs = self._read_line(line)
        if len(self.settings) > count:
            self.numbers.append(number)
        return belongs

    def _read_line(self, line: str) -> bool:
        if len(line) > _MAX_LINE_CHARS:
            return False
        text = _PREFIX.sub("", line)
        if section := _SECTION.match(line):
            self.section, self.path = section[1], []
            return True
        if self.braces or "{" in text:
            return self._read_tokens(text) or _FILLER.match(text) is not None
        entry = _ENTRY.match(text)
        if entry is not None:
            self._read_entry(entry)
            return True
        flags = _FLAG.findall(line)
        for name, value in flags:
            self.add([name.replace("-", "_")], value or "true")
        return bool(flags) or _FILLER.match(text) is not None

    def _read_tokens(self, text: str) -> bool:
        """Read settings between braces, as those of JSON and Python."""
        has_token = False
        for token in _TOKEN.finditer(text):
            has_token = True
            if token[0] == "}":
                self.braces = self.braces[:-1]
            elif token[0].endswith("{"):
                self.braces.append(token["name"] or "")
            else:
                self.add([*self.braces, token["key"]], token["value"])
            if len(self.braces) > _MAX_DEPTH:
                return False
        return has_token

    def _read_entry(self, entry: re.Match[str]) -> None:
        indent, name = len(entry["indent"]), entry["name"]
        while self.path and self.path[-1][0] >= indent:
            self.path.pop()
        names = [self.section, *(outer for _, outer in self.path), name]
        value = (entry["value"] or "").split(" #")[0].rstrip(" \\").rstrip(",")
        if value in ("", "[", "dict("):
            self.path.append((indent, name))
        else:
            self.add(names, value)


@reader
def read_configurations(text: PastedText) -> Iterator[Configuration]:
    block = _Block()
    last = 0
    for line in text.lines:
        if not block.settings and not _MARKS.search(line.text):
            continue
        # Blank lines are left out of a text.
        is_near = line.number - last <= 3
        if not is_near or not block.read(line.number, line.text):
            yield from _configurations(text, block)
            block = _Block()
            block.read(line.number, line.text)
        last = line.number
    yield from _configurations(text, block)


def _configurations(text: PastedText, block: _Block) -> Iterator[Configuration]:
    settings = block.settings
    if len(settings) < 2:
        return
    ends = {path.split(".", at)[-1] for path in settings for at in range(4)}
    # Those with names of their own come before the one whose names others take.
    programs = [
        program
        for program, names in file_content(_FILE)["programs"].items()
        if len(ends.intersection(names)) > 1
    ]
    if not programs:
        return
    facts: dict[str, list[str]] = {}
    for fact in file_content(_FILE)["fact"]:
        values = fitting_values(settings, fact["where"])
        if values is not None:
            texts = facts.setdefault(fact["kind"], [])
            texts.append(fact["text"].format(*values))
    place = Place(
        text_name=text.name, first_line=block.numbers[0], last_line=block.numbers[-1]
    )
    yield Configuration(
        place=place, program=programs[0], settings=settings, facts=facts
    )

"""Reads the lines in which programs that scale the loss say that it overflowed.

They are those of DeepSpeed 0.3 to 0.19 (runtime/fp16/loss_scaler.py), and of apex.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ebbtide.features.explain.pasted import PastedText
from ebbtide.features.explain.record import Place, Record, reader
from ebbtide.units import counted

_LINE = re.compile(
    r"OVERFLOW!.{0,40}Skipping step.{0,40}?scale: ?(?P<before>[\d.e+]{1,24})"
    r"(?:.{0,60}?(?:R|r)educing to (?P<after>[\d.e+]{1,24}))?"
    r"|Gradient overflow\..{0,10}Skipping step.{0,60}?loss scale to "
    r"(?P<scale>[\d.e+]{1,24})"
)


@dataclass(frozen=True, kw_only=True)
class Overflows(Record):
    """Steps that were skipped because gradients overflowed in fp16.

    `last_scale`: the loss scale after the last of them; None if no line says it.
    """

    count: int
    last_scale: float | None

    @property
    def title(self) -> str:
        return f"{counted(self.count, 'step')} skipped by overflow"


@reader
def read_overflows(text: PastedText) -> Iterator[Overflows]:
    matches = []
    numbers = []
    for line in text.lines:
        for match in _LINE.finditer(line.text):
            matches.append(match)
            numbers.append(line.number)
    if not matches:
        return
    last = matches[-1]
    scale = last["after"] or last["scale"] or last["before"]
    yield Overflows(
        place=Place(text_name=text.name, first_line=numbers[0], last_line=numbers[-1]),
        count=len(matches),
        last_scale=_number(scale),
    )


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("."))
    except ValueError:
        return None

"""Damages folders of traces at random: the bytes, lengths, types and values of their
files, and what files are."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_TEXTS = (
    "",
    "\x1b[2J",
    "two\nlines",
    "n" * 10_000,
    "cuda:99",
    "\u202e",
    "update",
    "nan",
)
_NUMBERS = (0, -1, 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -1.0, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"))
_OTHER_TYPES = (
    pa.string(),
    pa.float64(),
    pa.float16(),
    pa.int8(),
    pa.int32(),
    pa.uint64(),
    pa.bool_(),
    pa.binary(),
)
_OTHERS = (
    None,
    True,
    -1,
    0,
    1.5,
    1e308,
    10**30,
    2**63,
    *_TEXTS,
    [],
    {},
    [[]],
    [{}],
    [None, -1],
    {"rank": 0},
)


def mutate(folder: Path, generator: random.Random) -> None:
    """Damage one file of a trace."""
    file = generator.choice(_files(folder))
    kinds: list[Callable[[Path, random.Random], Any]] = [_mutate_bytes, _replace_file]
    values = _mutate_object if file.suffix == ".json" else _mutate_rows
    try:
        generator.choice([*kinds, values, values])(file, generator)
    except (ValueError, pa.ArrowException, OSError, OverflowError, TypeError):
        # The file was damaged before, or the value has no place in it.
        file.write_bytes(b"")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _mutate_bytes(file: Path, generator: random.Random) -> None:
    data = bytearray(file.read_bytes())
    position = generator.randrange(len(data))
    kind = generator.randrange(3)
    if kind == 0:
        for _ in range(generator.randrange(1, 20)):
            data[generator.randrange(len(data))] = generator.randrange(256)
    elif kind == 1:
        del data[position:]
    else:
        data[position:position] = generator.randbytes(generator.randrange(1, 200))
    file.write_bytes(data)


def _replace_file(file: Path, generator: random.Random) -> None:
    other = generator.choice(_files(file.parents[1]))
    data = other.read_bytes()
    file.unlink()
    generator.choice(
        (
            lambda: file.symlink_to("/dev/zero"),
            lambda: file.symlink_to(file.name),
            lambda: file.symlink_to(other),
            lambda: os.mkfifo(file),
            lambda: file.mkdir(),
            lambda: file.write_bytes(data),
            lambda: None,
        )
    )()


def _mutate_object(file: Path, generator: random.Random) -> None:
    """Replace or remove a random value of an object of JSON."""
    whole = json.loads(file.read_bytes())
    parents = [(whole, generator.choice(list(whole)))]
    while (
        generator.random() < 0.8
        and isinstance(child := parents[-1][0][parents[-1][1]], (dict, list))
        and child
    ):
        key = generator.choice(
            list(child) if isinstance(child, dict) else range(len(child))
        )
        parents.append((child, key))
    parent, key = parents[-1]
    if generator.random() < 0.15:
        del parent[key]
    else:
        parent[key] = generator.choice((*_OTHERS, [parent[key]] * 2))
    file.write_text(json.dumps(whole))


def _mutate_rows(file: Path, generator: random.Random) -> None:
    """Change the values, the types or the number of the rows of a table."""
    rows = pq.read_table(file)
    position = generator.randrange(rows.num_columns)
    field = rows.schema.field(position)
    values = rows.column(position).to_pylist()
    kind = generator.randrange(8)
    if kind == 0:
        rows = rows.remove_column(position)
    elif kind == 1:
        rows = rows.append_column(field, rows.column(position))
    elif kind == 2:
        rows = pa.concat_tables([rows] * generator.choice((0, 2, 50)))
    elif kind == 3:
        rows = rows.take(generator.choices(range(len(rows)), k=len(rows)))
    elif kind == 4:
        other = generator.choice(_OTHER_TYPES)
        rows = rows.set_column(
            position, field.name, rows.column(position).cast(other, safe=False)
        )
    else:
        text = any(isinstance(value, str) for value in values)
        others = (
            _TEXTS
            if text
            else _FLOATS
            if pa.types.is_floating(field.type)
            else _NUMBERS
        )
        count = generator.choice((1, 1, 2, len(values)))
        for row in generator.sample(range(len(values)), min(count, len(values))):
            values[row] = generator.choice((*others, None, generator.choice(values)))
        column = pa.array(
            values,
            field.type.value_type if pa.types.is_dictionary(field.type) else field.type,
        )
        rows = rows.set_column(position, pa.field(field.name, column.type), column)
    pq.write_table(rows, file)

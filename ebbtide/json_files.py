"""Reads JSON files that people write, and converts them to constrained types with
one-line errors."""

import difflib
import json
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec

from ebbtide.errors import UserError

T = TypeVar("T")

# A machine or workload file is far shorter than this.
_MAX_BYTES = 16 << 20


def read_object(path: Path, kind: str, error: type[UserError]) -> dict[str, Any]:
    """Read the JSON object in a file. Raises `error` where that is not possible."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise error(f"{path} is too large for a {kind} file")
        content = json.loads(path.read_bytes(), parse_constant=_refuse)
    except OSError as reason:
        raise error(
            f"{kind} file {path} cannot be read: {reason.strerror or reason}"
        ) from None
    except (ValueError, RecursionError):
        raise error(f"{kind} file {path} is not JSON") from None
    if not isinstance(content, dict):
        raise error(f"{kind} file {path} is not a JSON object")
    return content


def misspelled_keys(
    values: Collection[str], keys: Collection[str], where: str
) -> Iterator[str]:
    """Yield a note for each key of a file that is nearly one of the read keys.

    `where` names the file.
    """
    for key in values:
        if key not in keys and (
            near := difflib.get_close_matches(key, keys, 1, cutoff=0.8)
        ):
            yield f"{where}: unknown key {key:.80}: did you mean {near[0]}?"


def _refuse(constant: str) -> Any:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(constant)


def number_range(minimum: float, maximum: float) -> msgspec.Meta:
    """Return the constraint of a number, both bounds included, with a description for
    messages."""
    return msgspec.Meta(
        ge=minimum, le=maximum, description=f"a number from {minimum:g} to {maximum:g}"
    )


def convert_object(values: Any, kind: type[T], name: str, error: type[UserError]) -> T:
    """Convert a JSON object to a dataclass or struct with constrained fields.

    Fields are constrained with msgspec: null counts as missing, 2.0 as an integer,
    other keys are ignored. Raises `error`, with the key, the value and what is allowed.
    """
    hints = get_type_hints(kind, include_extras=True)
    if not isinstance(values, dict):
        raise error(
            f"{name} is {values!r:.40}; it must be an object with {', '.join(hints)}"
        )
    whole = {
        key: int(value)
        for key, value in values.items()
        if isinstance(value, float) and value.is_integer()
    }
    values = values | {
        key: value
        for key, value in whole.items()
        if int in (hints.get(key), *get_args(hints.get(key)))
    }
    try:
        return msgspec.convert(
            {key: values[key] for key in hints if values.get(key) is not None}, kind
        )
    except msgspec.ValidationError as reason:
        location, text = validation_problem(reason)
        key = re.split(r"[.\[]", location)[0]
        if missing := re.search(r"missing required field (\w+)", text):
            raise error(
                f"{name}{f': an entry of {key}' if key else ''} has no {missing[1]}"
            ) from None
        shown = (
            f"{values[key]:g}"
            if isinstance(values[key], float)
            else reprlib.repr(values[key])
        )
        # Of a constrained type, or of a member of a union.
        metas = [
            meta
            for part in (hints[key], *get_args(hints[key]))
            for meta in getattr(part, "__metadata__", ())
        ]
        allowed = next((meta.description for meta in metas if meta.description), text)
        raise error(f"{name}: {key} is {shown}; it must be {allowed}") from None


class ValidationProblem(NamedTuple):
    """A JSON value that was refused.

    `location` is as in `ranks[0].devices[1].name`, empty for the whole object.
    """

    location: str
    reason: str


def validation_problem(error: msgspec.ValidationError) -> ValidationProblem:
    """Split the message of msgspec into its parts.

    An example is "Expected `int`, got `str` - at `$.ranks[0].rank`".
    """
    reason, _, location = str(error).partition(" - at `$")
    reason = reason.replace("`", "")
    return ValidationProblem(
        location.rstrip("`").lstrip("."), reason[:1].lower() + reason[1:]
    )


def section(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object in an object of a file; an empty one where the file has another
    value, or none."""
    value = values.get(key)
    return value if isinstance(value, dict) else {}

"""Converts the object of a meta.json to its typed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ebbtide.errors import TraceError
from ebbtide.json_files import validation_problem
from ebbtide.profiler.trace.metadata import DeepSpeedInfo, TraceMeta


def parse_meta(raw: dict[str, Any], path: Path) -> TraceMeta:
    """Convert the object of a meta.json. Values of `deepspeed` that are malformed count as not recorded.

    Args:
        raw: The object.
        path: The trace, for the error.

    Raises:
        TraceError: A value does not fit the format.
    """
    try:
        values = {key: without_nulls(value) if key in ("host", "ranks") else value for key, value in raw.items()}
        if isinstance(deepspeed := raw.get("deepspeed"), dict):
            values["deepspeed"] = _lenient_deepspeed(deepspeed)
        meta = msgspec.convert(values, TraceMeta)
    except msgspec.ValidationError as error:
        problem = validation_problem(error)
        where = f"{problem.location} in its meta.json" if problem.location else "its meta.json"
        raise TraceError(f"{path} is damaged: {where} is not valid ({problem.reason})") from None
    except (UnicodeEncodeError, RecursionError):
        raise TraceError(f"{path} is damaged: its meta.json is not valid (bad Unicode, or nested too deeply)") from None
    if meta.state == "recording" and "host" not in raw:
        raise TraceError(f"{path} is damaged: host in its meta.json is missing")
    return meta


def without_nulls(value: Any) -> Any:
    """Drop the keys whose value is null: null and a missing key both mean that something was not recorded."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _lenient_deepspeed(values: dict[str, Any]) -> DeepSpeedInfo:
    """Convert each key by itself. DeepSpeed and its logs write these values, in forms that differ by version."""
    valid = {}
    for field in msgspec.structs.fields(DeepSpeedInfo):
        try:
            valid[field.name] = msgspec.convert(values[field.name], field.type)
        except (KeyError, msgspec.ValidationError):
            continue
    return DeepSpeedInfo(**valid)

"""Dicts of commits: whether they are whole."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ebbtide.interleave.engine.errors import EngineError

_DIGEST = "digest"
_KEYS = ("run", "files", "paths", "sequences")


def with_digest(commit: Mapping[str, Any]) -> dict[str, Any]:
    """Return a commit with a digest of all that it has."""
    return {**commit, _DIGEST: _digest(commit)}


def check_digest(commit: Any) -> None:
    """Raise EngineError if a commit is incomplete, or was changed since it was made."""
    if not isinstance(commit, Mapping) or not set(_KEYS) <= commit.keys():
        raise EngineError(
            f"this is not a whole commit, which has {', '.join(_KEYS)}: load what "
            "commit() has returned"
        )
    others = {key: value for key, value in commit.items() if key != _DIGEST}
    # Commits of version 0.2 have none.
    if commit.get(_DIGEST, _digest(others)) != _digest(others):
        raise EngineError(
            "this commit was changed since it was made: load what commit() has returned"
        )


def commit_place(commit: Mapping[str, Any]) -> str:
    """Return where the state of a commit is, for messages."""
    folders = commit.get("folders") or ["a folder of storage"]
    return f"the state of this commit was written to {' and '.join(folders)}"


def _digest(commit: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(commit, sort_keys=True, default=str).encode()
    ).hexdigest()

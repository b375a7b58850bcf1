"""Sends files that compiled libraries write through Python's functions, which a `FileView` follows."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ebbtide.profiler.agent.imports import when_imported
from ebbtide.profiler.agent.patches import Patches
from ebbtide.profiler.dryrun.errors import CannotFakeError
from ebbtide.profiler.dryrun.file_system.view import FileView


def patch_writers(patches: Patches, view: FileView) -> Callable[[], None]:
    """Replace what writes tokenizers and SQLite databases, until `patches.undo()` and the function that is returned."""
    cancels = [
        when_imported("transformers.tokenization_utils_tokenizers", lambda module: _write_tokenizers(module, patches)),
        when_imported("sqlite3", lambda module: _copy_databases(module, patches, view)),
    ]

    def cancel() -> None:
        for function in cancels:
            function()

    return cancel


def _write_tokenizers(module: Any, patches: Patches) -> None:
    def save(tokenizer: Any, save_directory: Any, file_names: Any, filename_prefix: Any = None, **_options: Any) -> Any:
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        path = os.path.join(str(save_directory), prefix + module.TOKENIZER_FILE)
        with open(path, "w", encoding="utf-8") as file:
            file.write(tokenizer.backend_tokenizer.to_str(pretty=True))
        return (*file_names, path)

    patches.set(module.TokenizersBackend, "_save_pretrained", save)


def _copy_databases(module: Any, patches: Patches, view: FileView) -> None:
    """Open copies of databases that exist; one that is too large to be copied can be read only."""
    original = module.connect

    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("uri") or not isinstance(database, (str, os.PathLike)) or not os.path.isfile(database):
            return original(database, *args, **kwargs)
        path = os.path.abspath(database)
        try:
            return original(view.writable(path, empties=False), *args, **kwargs)
        except CannotFakeError:
            return original(f"file:{path}?mode=ro", *args, **{**kwargs, "uri": True})

    for owner in (module, module.dbapi2):
        patches.set(owner, "connect", connect)

"""Writers of files beside Python's file functions, and in processes without them."""

import os
from typing import Any

from ebbtide.features.dryrun.errors import CannotFakeError
from ebbtide.features.dryrun.files.view import FileView
from ebbtide.profiler.agent.patches import Patches


def patch_writers(patches: Patches, view: FileView) -> None:
    """Replace what writes beside Python's file functions, or in processes without them,
    until `patches.undo()`."""
    # the second one serves `datasets`
    for package in ("multiprocessing", "multiprocess"):
        patches.when_imported(
            f"{package}.context", lambda module: fork_processes(module, patches)
        )
    tokenizers = "transformers.tokenization_utils_tokenizers"
    patches.when_imported(tokenizers, lambda module: _write_tokenizers(module, patches))
    patches.when_imported(
        "sqlite3", lambda module: _copy_databases(module, patches, view)
    )


def fork_processes(module: Any, patches: Patches) -> None:
    """Fork processes that the job would start afresh: those would have the real files,
    and no device."""
    contexts = module._concrete_contexts
    patches.set(module, "_concrete_contexts", dict.fromkeys(contexts, contexts["fork"]))


def _write_tokenizers(module: Any, patches: Patches) -> None:
    def save(
        tokenizer: Any,
        save_directory: Any,
        file_names: Any,
        filename_prefix: Any = None,
        **_options: Any,
    ) -> Any:
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        path = os.path.join(str(save_directory), prefix + module.TOKENIZER_FILE)
        with open(path, "w", encoding="utf-8") as file:
            file.write(tokenizer.backend_tokenizer.to_str(pretty=True))
        return (*file_names, path)

    patches.set(module.TokenizersBackend, "_save_pretrained", save)


def _copy_databases(module: Any, patches: Patches, view: FileView) -> None:
    """Open copies of databases that exist; one that is too large to be copied can be
    read only."""
    original = module.connect

    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            kwargs.get("uri")
            or not isinstance(database, (str, os.PathLike))
            or not os.path.isfile(database)
        ):
            return original(database, *args, **kwargs)
        path = os.path.abspath(database)
        try:
            return original(view.writable(path, empties=False), *args, **kwargs)
        except CannotFakeError:
            return original(f"file:{path}?mode=ro", *args, **{**kwargs, "uri": True})

    for owner in (module, module.dbapi2):
        patches.set(owner, "connect", connect)

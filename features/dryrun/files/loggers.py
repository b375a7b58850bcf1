"""Replaces experiment loggers, so that a dry run writes no experiment and contacts
nobody."""

import contextlib
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

from ebbtide.profiler.agent.patches import Patches

# Libraries that record experiments on a server or on the disk. Where one is installed,
# an `InertModule` is imported.
_INERT = frozenset(
    {
        "aim",
        "clearml",
        "comet_ml",
        "dvclive",
        "mlflow",
        "neptune",
        "swanlab",
        "trackio",
        "tensorboardX",
    }
)
_SWITCHES = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DISABLE_TELEMETRY": "1",
}
# Beginnings of the names of what changes repositories of the Hugging Face hub.
_HUB_CHANGES = ("create_", "delete_", "upload_", "run_as_future")
# Special methods of an `Inert`, and what they return.
_SPECIAL_METHODS = {
    **dict.fromkeys(("__setitem__", "__exit__"), None),
    **dict.fromkeys(("__lt__", "__gt__", "__le__", "__ge__"), False),
    **dict.fromkeys(("__fspath__", "__str__"), "dry-run"),
    "__len__": 0,
    "__index__": 1,
}


class Inert:
    """An object that takes every call and attribute, and does nothing; as a decorator
    it returns the function."""

    def __new__(cls, *args: Any, **_kwargs: Any) -> Any:
        return args[0] if _decorates(args) else super().__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **_kwargs: Any) -> Any:
        return args[0] if _decorates(args) else Inert()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert()

    def __getitem__(self, _key: Any) -> Any:
        return Inert()

    def __enter__(self) -> Any:
        return self

    def __iter__(self) -> Any:
        return iter(())


for _name, _value in _SPECIAL_METHODS.items():
    setattr(Inert, _name, lambda *_args, value=_value: value)


class InertModule(ModuleType):
    """A module whose functions and classes do nothing."""

    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (Inert,), {})
        setattr(self, name, value)
        return value


class InertFinder:
    """A finder on `sys.meta_path`, and the loader, of `InertModule`s."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        """Return the spec of a logger that is installed, or of a module in it; None for
        other modules."""
        root = name.partition(".")[0]
        if root not in _INERT or importlib.machinery.PathFinder.find_spec(root) is None:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        return InertModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def disable_loggers(patches: Patches) -> None:
    """Disable loggers that the job imports from now on, until `patches.undo()`."""
    finder = InertFinder()
    sys.meta_path.insert(0, finder)
    patches.set_variables(_SWITCHES)

    def disable_wandb(module: Any) -> None:
        start = module.init

        def init(*args: Any, **kwargs: Any) -> Any:
            return start(*args, **{**kwargs, "mode": "disabled"})

        patches.set(module, "init", init)
        patches.set(module, "login", lambda *_args, **_kwargs: True)

    def disable_uploads(module: Any) -> None:
        for owner in (module, module.HfApi):
            for name in [name for name in dir(owner) if name.startswith(_HUB_CHANGES)]:
                patches.set(owner, name, lambda *_args, **_kwargs: Inert())

    def restore() -> None:
        with contextlib.suppress(ValueError):  # of a job that has replaced the list
            sys.meta_path.remove(finder)
        for name in [
            name
            for name, module in sys.modules.items()
            if isinstance(module, InertModule)
        ]:
            del sys.modules[name]

    patches.on_undo(restore)
    patches.when_imported("wandb", disable_wandb)
    patches.when_imported("huggingface_hub.hf_api", disable_uploads)


def _decorates(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and callable(args[0]) and not isinstance(args[0], type)

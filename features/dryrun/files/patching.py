"""Replaces Python's file functions by ones that go through a `FileView`."""

import builtins
import errno
import functools
import io
import os
import posix
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from ebbtide.features.dryrun.files.view import FileView, real_entry
from ebbtide.profiler.agent.patches import Patches

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND | os.O_CREAT
# Functions that read at a path: their first argument is where the view says.
_READERS = (
    "stat",
    "lstat",
    "access",
    "readlink",
    "chdir",
    "statvfs",
    "getxattr",
    "listxattr",
)
# Changes of attributes, which a dry run leaves out for files of the user.
_ATTRIBUTE_CHANGES = ("utime", "chmod", "chown", "lchown", "setxattr", "removexattr")


class ViewEntry:
    """An entry of `os.scandir`, in a folder that the job sees otherwise than the
    disk."""

    def __init__(self, folder: str, name: str) -> None:
        self.name, self.path = name, os.path.join(folder, name)

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISDIR(self._mode(follow_symlinks))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISREG(self._mode(follow_symlinks))

    def is_symlink(self) -> bool:
        """Return whether it is a symbolic link."""
        return stat.S_ISLNK(self._mode(False))

    def is_junction(self) -> bool:
        """Return False, as on any Unix."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def _mode(self, follow_symlinks: bool) -> int:
        try:
            return self.stat(follow_symlinks=follow_symlinks).st_mode
        except OSError:
            return 0


class ViewEntries(Iterator[ViewEntry], AbstractContextManager["ViewEntries"]):
    """Iterator and context manager as `os.scandir` returns it."""

    def __init__(self, folder: str, names: list[str]) -> None:
        self._entries = iter([ViewEntry(folder, name) for name in names])

    def __next__(self) -> ViewEntry:
        return next(self._entries)

    def __exit__(self, *_error: object) -> None: ...

    def close(self) -> None:
        """Do nothing: nothing is open."""


def absolute(path: Any) -> str | None:
    """Return the absolute path of an argument; None for what is no path, as a file
    descriptor."""
    try:
        return os.path.abspath(os.fsdecode(path))
    except (TypeError, ValueError):
        return None


class FileFunctions:
    """File functions that go through a view; `on_open` is called with each path that is
    opened for writing."""

    def __init__(self, view: FileView, on_open: Callable[[str], None]) -> None:
        self._view, self._on_open = view, on_open
        self._open = io.open

    def install(self, patches: Patches) -> None:
        """Replace Python's functions until `patches.undo()`."""
        for owner in (builtins, io):
            patches.set(owner, "open", self.open)
        view, redirected = self._view, self._redirected
        unlink = redirected(
            posix.unlink, lambda path: view.remove(path, posix.unlink, False)
        )
        rename = redirected(
            posix.replace,
            lambda old, new: view.rename(old, new, posix.replace),
            paths=2,
        )
        functions: dict[str, Any] = {
            "open": self.open_descriptor,
            "listdir": self._list,
            "scandir": self._scan,
            "remove": unlink,
            "unlink": unlink,
            "rename": rename,
            "replace": rename,
            "rmdir": redirected(
                posix.rmdir, lambda path: view.remove(path, posix.rmdir, True)
            ),
            "truncate": redirected(
                posix.truncate,
                lambda path, size: posix.truncate(view.writable(path, False), size),
            ),
            "link": redirected(posix.link, self._link, paths=2),
            "symlink": self._symlink,
            "mkdir": redirected(
                posix.mkdir, functools.partial(self._make_at, posix.mkdir)
            ),
            "mkfifo": redirected(
                posix.mkfifo, functools.partial(self._make_at, posix.mkfifo)
            ),
            **{name: self._reader(getattr(posix, name)) for name in _READERS},
        }
        for name in _ATTRIBUTE_CHANGES:
            original = getattr(posix, name)
            functions[name] = redirected(
                original, functools.partial(self._change_attribute, original)
            )
        for name, function in functions.items():
            patches.set(os, name, function)
        # By paths, which the view knows, in place of descriptors of folders.
        patches.set(shutil, "_use_fd_functions", False)

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file, as the built-in function does."""
        path = None if isinstance(file, int) else absolute(file)
        if (
            path is None
            or not isinstance(mode, str)
            or not self._view.is_protected(path)
        ):
            return self._open(file, mode, *args, **kwargs)
        with self._view.lock:
            if not any(letter in mode for letter in "wax+"):
                location = self._view.existing(path)
                return self._open(
                    file if location == path else location, mode, *args, **kwargs
                )
            return self._write(
                path,
                "w" in mode,
                "x" in mode,
                lambda at: self._open(at, mode, *args, **kwargs),
            )

    def open_descriptor(
        self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        """Open a file, as `os.open` does."""
        name = absolute(path)
        if name is None or dir_fd is not None or not self._view.is_protected(name):
            return posix.open(path, flags, mode, dir_fd=dir_fd)
        with self._view.lock:
            if not flags & _WRITES:
                return posix.open(self._view.existing(name), flags, mode)
            empties, exclusive = (
                bool(flags & os.O_TRUNC),
                bool(flags & os.O_CREAT and flags & os.O_EXCL),
            )
            return int(
                self._write(
                    name, empties, exclusive, lambda at: posix.open(at, flags, mode)
                )
            )

    def _write(
        self, path: str, empties: bool, exclusive: bool, function: Callable[[str], Any]
    ) -> Any:
        if os.path.isdir(path) or (exclusive and os.path.lexists(path)):
            # which raises, unless it opens a folder
            return function(self._view.existing(path))
        self._on_open(path)
        return self._make(self._view.writable(path, empties), function)

    def _make(self, location: str, function: Callable[[str], Any]) -> Any:
        """Call a function that may make a file or a folder at a place on the disk."""
        is_new = not os.path.lexists(location)
        result = function(location)
        if is_new:
            self._view.note_made(location)
        return result

    def _make_at(
        self, original: Callable[..., Any], path: str, *args: Any, **kwargs: Any
    ) -> None:
        self._make(self._view.place(path), lambda at: original(at, *args, **kwargs))

    def _redirected(
        self, original: Callable[..., Any], function: Callable[..., Any], paths: int = 1
    ) -> Callable[..., Any]:
        """Wrap a function that changes one or two paths: `function` gets them where one
        is protected."""

        def call(*args: Any, **kwargs: Any) -> Any:
            args = (
                *args,
                *(kwargs.pop(key) for key in ("path", "src", "dst") if key in kwargs),
            )
            names = [absolute(path) for path in args[:paths]]
            by_descriptor = any(
                value is not None
                for key, value in kwargs.items()
                if key.endswith("dir_fd")
            )
            if (
                by_descriptor
                or None in names
                or not any(self._view.is_protected(str(name)) for name in names)
            ):
                return original(*args, **kwargs)
            kwargs = {
                key: value
                for key, value in kwargs.items()
                if not key.endswith("dir_fd")
            }
            with self._view.lock:
                return function(*names, *args[paths:], **kwargs)

        return call

    def _reader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any, *args: Any, **kwargs: Any) -> Any:
            name = absolute(path) if kwargs.get("dir_fd") is None else None
            location = self._view.locate(name) if name is not None else None
            if name is None or location == name:
                return original(path, *args, **kwargs)
            if location is None and original is posix.access:
                return False
            return original(self._view.existing(name), *args, **kwargs)

        return read

    def _change_attribute(
        self, original: Callable[..., Any], path: str, *args: Any, **kwargs: Any
    ) -> None:
        location = self._view.existing(path)
        if self._view.owns(os.path.realpath(location)) or not os.path.lexists(path):
            original(location, *args, **kwargs)

    def _link(self, source: str, target: str, **_options: Any) -> None:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        location = self._view.existing(source)
        # A second name of a file of the user would let the job change it.
        link = posix.link if self._view.owns(real_entry(location)) else posix.symlink
        self._make(self._view.place(target), lambda at: link(location, at))

    def _symlink(self, source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        path = absolute(target)
        if (
            path is None
            or kwargs.get("dir_fd") is not None
            or not self._view.is_protected(path)
        ):
            posix.symlink(source, target, *args, **kwargs)
            return
        with self._view.lock:
            location = self._view.place(path)
            if location != path:
                source = os.path.join(os.path.dirname(path), os.fsdecode(source))
            self._make(location, lambda at: posix.symlink(source, at))

    def _list(self, path: Any = ".") -> Any:
        name = absolute("." if path is None else path)
        if name is None or isinstance(path, bytes):
            return posix.listdir(path)
        with self._view.lock:
            location = self._view.existing(name)
            return (
                self._view.names_in(name)
                if self._view.changes_in(name)
                else posix.listdir(location)
            )

    def _scan(self, path: Any = ".") -> Any:
        name = absolute("." if path is None else path)
        if name is None or isinstance(path, bytes):
            return posix.scandir(path)
        with self._view.lock:
            location = self._view.existing(name)
            if location == name and not self._view.changes_in(name):
                return posix.scandir(path)
            if not os.path.isdir(name):
                return posix.scandir(location)  # which raises
            return ViewEntries(
                "." if path is None else os.fspath(path), self._view.names_in(name)
            )

"""Replaces Python's file functions by ones that go through a `FileView`."""

import builtins
import errno
import functools
import io
import os
import posix
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from ebbtide.profiler.agent.patches import Patches
from ebbtide.profiler.dryrun.files.view import FileView

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND | os.O_CREAT
# Functions that read at a path: their first argument is where the view says.
_READERS = ("stat", "lstat", "access", "readlink", "chdir", "statvfs", "getxattr", "listxattr")
# Changes of attributes, which a dry run leaves out for files of the user.
_ATTRIBUTE_CHANGES = ("utime", "chmod", "chown", "lchown", "setxattr", "removexattr")


class ViewEntry:
    """An entry of `os.scandir`, in a folder that the job sees otherwise than the disk."""

    def __init__(self, folder: str, name: str) -> None:
        self.name, self.path = name, os.path.join(folder, name)

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        """Return whether it is a symbolic link."""
        return os.path.islink(self.path)

    def is_junction(self) -> bool:
        """Return False, as on any Unix."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino


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
    """Return the absolute path of an argument; None for what is no path, as a file descriptor."""
    try:
        return os.path.abspath(os.fsdecode(path))
    except (TypeError, ValueError):
        return None


class FileFunctions:
    """File functions that go through a view; `on_open` is called with each path that is opened for writing."""

    def __init__(self, view: FileView, on_open: Callable[[str], None]) -> None:
        self._view, self._on_open = view, on_open
        self._open = io.open

    def install(self, patches: Patches) -> None:
        """Replace Python's functions until `patches.undo()`."""
        for owner in (builtins, io):
            patches.set(owner, "open", self.open)
        functions: dict[str, Any] = {
            "open": self.open_descriptor,
            "listdir": self._list,
            "scandir": self._scan,
            "symlink": self._symlink,
            "mkdir": self._with_path("mkdir", self._make_folder),
            "rmdir": self._with_path("rmdir", lambda path: self._view.remove(path, posix.rmdir, True)),
            "truncate": self._with_path("truncate", self._truncate),
            "mkfifo": self._with_path("mkfifo", self._make_fifo),
            "link": self._with_two_paths("link", self._link),
        }
        for name in ("remove", "unlink"):
            functions[name] = self._with_path(name, lambda path: self._view.remove(path, posix.unlink, False))
        for name in _READERS:
            functions[name] = self._reader(getattr(posix, name))
        for name in _ATTRIBUTE_CHANGES:
            functions[name] = self._with_path(name, functools.partial(self._change_attribute, getattr(posix, name)))
        for name in ("rename", "replace"):
            functions[name] = self._with_two_paths(name, lambda old, new: self._view.rename(old, new, posix.replace))
        for name, function in functions.items():
            patches.set(os, name, function)
        # By paths, which the view knows, in place of descriptors of folders.
        patches.set(shutil, "_use_fd_functions", False)

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file, as the built-in function does."""
        path = None if isinstance(file, int) else absolute(file)
        if path is None or not isinstance(mode, str) or not self._view.is_protected(path):
            return self._open(file, mode, *args, **kwargs)
        with self._view.lock:
            if not any(letter in mode for letter in "wax+"):
                location = self._view.existing(path)
                return self._open(file if location == path else location, mode, *args, **kwargs)
            return self._write(path, "w" in mode, "x" in mode, lambda at: self._open(at, mode, *args, **kwargs))

    def open_descriptor(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Open a file, as `os.open` does."""
        name = absolute(path)
        if name is None or dir_fd is not None or not self._view.is_protected(name):
            return posix.open(path, flags, mode, dir_fd=dir_fd)
        with self._view.lock:
            if not flags & _WRITES:
                return posix.open(self._view.existing(name), flags, mode)
            exclusive = flags & os.O_CREAT and flags & os.O_EXCL
            return int(
                self._write(name, bool(flags & os.O_TRUNC), bool(exclusive), lambda at: posix.open(at, flags, mode))
            )

    def _write(self, path: str, empties: bool, exclusive: bool, function: Callable[[str], Any]) -> Any:
        location = self._view.locate(path)
        if location is not None and os.path.isdir(path):
            return function(location)
        self._on_open(path)
        if exclusive and location is not None and os.path.lexists(path):
            return function(location)  # which raises FileExistsError
        location = self._view.writable(path, empties)
        is_new = not os.path.lexists(location)
        result = function(location)
        if is_new:
            self._view.note_made(location)
        return result

    def _with_path(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of one path: `function` gets it where it is protected, else the original one."""
        original = getattr(posix, name)

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            name = absolute(path) if kwargs.get("dir_fd") is None else None
            if name is None or not self._view.is_protected(name):
                return original(path, *args, **kwargs)
            kwargs.pop("dir_fd", None)
            with self._view.lock:
                return function(name, *args, **kwargs)

        return call

    def _reader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any, *args: Any, **kwargs: Any) -> Any:
            name = absolute(path) if kwargs.get("dir_fd") is None else None
            if name is None:
                return original(path, *args, **kwargs)
            location = self._view.locate(name)
            if location == name:
                return original(path, *args, **kwargs)
            if location is None and original is posix.access:
                return False
            return original(self._view.existing(name), *args, **kwargs)

        return read

    def _change_attribute(self, original: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> None:
        location = self._view.existing(path)
        if self._view.owns(os.path.realpath(location)) or not os.path.lexists(path):
            original(location, *args, **kwargs)

    def _with_two_paths(self, name: str, function: Callable[[str, str], None]) -> Callable[..., Any]:
        original = getattr(posix, name)

        def call(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            names = absolute(source), absolute(target)
            if None in names or any(kwargs.get(key) is not None for key in ("src_dir_fd", "dst_dir_fd")):
                original(source, target, *args, **kwargs)
                return
            with self._view.lock:
                function(str(names[0]), str(names[1]))

        return call

    def _link(self, source: str, target: str) -> None:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        if not self._view.link(source, target):
            posix.link(self._view.existing(source), target)
            self._view.note_made(target)

    def _symlink(self, source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        path = absolute(target)
        if path is None or kwargs.get("dir_fd") is not None or not self._view.is_protected(path):
            posix.symlink(source, target, *args, **kwargs)
            return
        with self._view.lock:
            location = self._view.locate(path)
            if location is None or not os.path.lexists(path):
                location = self._view.place_folder(path)
                if location != path:
                    source = os.path.join(os.path.dirname(path), os.fsdecode(source))
            posix.symlink(source, location)
            self._view.note_made(location)

    def _make_folder(self, path: str, mode: int = 0o777) -> None:
        location = self._view.locate(path)
        if location is None or not os.path.lexists(path):
            location = self._view.place_folder(path)
        posix.mkdir(location, mode)
        self._view.note_made(location)

    def _make_fifo(self, path: str, mode: int = 0o666) -> None:
        location = self._view.existing(path)
        posix.mkfifo(location, mode)
        self._view.note_made(location)

    def _truncate(self, path: str, length: int) -> None:
        posix.truncate(self._view.writable(path, empties=False), length)

    def _list(self, path: Any = ".") -> Any:
        name = absolute("." if path is None else path)
        if name is None or isinstance(path, bytes):
            return posix.listdir(path)
        with self._view.lock:
            location = self._view.existing(name)
            return self._view.names_in(name) if self._view.changes_in(name) else posix.listdir(location)

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
            return ViewEntries("." if path is None else os.fspath(path), self._view.names_in(name))

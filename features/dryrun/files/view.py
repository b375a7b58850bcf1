"""The files as the job sees them: its changes to files of the user are in a temporary
folder."""

import contextlib
import errno
import json
import os
import posix
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ebbtide.features.dryrun.errors import CannotFakeError

# A file of the user that the job changes is copied; above this size that would take
# long, and fill the disk.
_MAX_COPIED_BYTES = 1 << 30
_SYSTEM_FOLDERS = ("/dev", "/proc", "/sys")
# Folders of downloads and compiled code, which are made to be written by any job.
_CACHE_VARIABLES = (
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "HF_MODULES_CACHE",
    "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "MPLCONFIGDIR",
)
# In the temporary folder: what the job has made, for a process that outlives it.
_MADE = "made"
_WRITES = os.O_WRONLY | os.O_RDWR
# Audit events -> positions of the paths that are changed, and of the descriptors of
# folders that they start from.
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.truncate": ((0, None),),
    "os.link": ((0, 2),),
}
_EVENTS = frozenset({"open", *_CHANGES})


class FileView:
    """Maps paths of the job to paths on the disk, and never lets it change a file that
    it has not made. A file of the user that the job overwrites is replaced by a copy in
    a temporary folder; one that it removes or renames stays, and is missing or renamed
    for the job alone. What the job makes itself is made as ever, and removed by
    `close`.

    `parent`: the folder of temporary folders; None: the system's."""

    parent: str | None = None

    def __init__(self) -> None:
        # Files and folders that the job has made -> device and inode; those of the user
        # that it has changed for itself.
        self.made: dict[str, tuple[int, int]] = {}
        self.preserved: dict[str, None] = {}
        self.folder = os.path.realpath(
            tempfile.mkdtemp(prefix="ebbtide-dry-run-", dir=self.parent)
        )
        # Path as the job writes it -> path on the disk; None: missing for the job. It
        # holds for all below a folder.
        self._entries: dict[str, str | None] = {}
        self._caches = cache_folders()
        self._number = 0
        # Descriptor of the list of what the job has made, which forked processes share,
        # and device and inode.
        self._list = -1
        self._list_identity = (-1, -1)
        self.lock = threading.RLock()

    def is_protected(self, path: str) -> bool:
        """Return whether an absolute path is below the rules of the view."""
        # Devices, caches and compiled modules are the job's to change.
        free = "/__pycache__/" in path or any(
            is_inside(path, folder) for folder in (*_SYSTEM_FOLDERS, *self._caches)
        )
        return not free and not is_inside(path, self.folder)

    def owns(self, path: str) -> bool:
        """Return whether the job has made a path on the disk, which has no symbolic
        links."""
        if is_inside(path, self.folder):
            return True
        return any(folder in self.made for folder in parents(path))

    def locate(self, path: str) -> str | None:
        """Return where an absolute path is on the disk; None if it is missing for the
        job."""
        if not self._entries:
            return path
        for folder in parents(path):
            if folder in self._entries:
                target = self._entries[folder]
                return None if target is None else target + path[len(folder) :]
        return path

    def existing(self, path: str) -> str:
        """Return where an absolute path is on the disk. Raises FileNotFoundError if it
        is missing for the job."""
        location = self.locate(path)
        if location is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return location

    def writable(self, path: str, empties: bool) -> str:
        """Return where the job may write a file: a copy, if the file is one of the
        user."""
        location = self.place(path)
        real = os.path.realpath(location)
        if not is_file(real) or self.owns(real) or not self.is_protected(real):
            return location
        copy = self._new_path()
        if not empties:
            size = os.path.getsize(real)
            if size > _MAX_COPIED_BYTES:
                raise CannotFakeError(
                    f"cannot dry-run a change of {path}: it exists and has "
                    f"{size / 1e9:,.1f} GB, and a dry run "
                    "changes only copies; leave the change out for the dry run"
                )
            shutil.copyfile(real, copy)
        self.preserved[path] = None
        self._entries[path] = copy
        return copy

    def stand_in(self, path: str) -> str:
        """Return where a file of the temporary folder is, which the job sees at an
        absolute path from now on."""
        location = self.locate(path)
        if (
            location is not None
            and is_file(location)
            and not self.owns(os.path.realpath(location))
        ):
            self.preserved[path] = None
        self._require_folder(path)
        self._entries[path] = self._new_path()
        return str(self._entries[path])

    def note_made(self, location: str) -> None:
        """Note that the job has made a file or a folder on the disk."""
        real = real_entry(location)
        status = status_of(real, follow=False)
        if status is not None and self.is_protected(real):
            self._keep_made(real, (status.st_dev, status.st_ino))

    def place(self, path: str) -> str:
        """Return where a path is on the disk, or where the job may make something
        there: the temporary folder, where what is on the disk is hidden. Raises
        FileNotFoundError if the folder around it is missing."""
        location = self.locate(path)
        if location is not None and (
            location == path or status_of(location, follow=False) is not None
        ):
            return location
        if location is not None and is_inside(location, self.folder):
            return location
        self._require_folder(path)
        self._entries[path] = location = self._new_path()
        return location

    def remove(self, path: str, function: Callable[[str], Any], folder: bool) -> None:
        """Remove a file or an empty folder: from the disk if the job has made it, else
        for the job alone."""
        location = self.existing(path)
        status = status_of(location, follow=False)
        if folder and self.names_in(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        if (
            status is None
            or stat.S_ISDIR(status.st_mode) != folder
            or self.owns(real_entry(location))
        ):
            function(location)  # which raises what is due for a path of another kind
            self.made.pop(real_entry(location), None)
        else:
            self.preserved[path] = None
        self._forget(path)

    def rename(
        self, source: str, target: str, function: Callable[[str, str], Any]
    ) -> None:
        """Rename: on the disk if the job has made both, else for the job alone."""
        old, new = self.existing(source), self.locate(target)
        if status_of(old, follow=False) is None or source == target:
            function(old, target)
            return
        if new is not None and is_folder(new) and self.names_in(target):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)
        old_real = real_entry(old)
        own = self._may_change(old_real) and not is_inside(old_real, self.folder)
        if (
            own
            and new == target
            and (
                status_of(new, follow=False) is None
                or self._may_change(real_entry(new))
            )
        ):
            function(old, new)
            new_real = real_entry(new)
            for key in [key for key in self.made if is_inside(key, old_real)]:
                self._keep_made(new_real + key[len(old_real) :], self.made.pop(key))
            self._move_entries(source, target)
            return
        if new is None or status_of(new, follow=False) is None:
            self._require_folder(target)
        elif not self.owns(real_entry(new)):
            self.preserved[target] = None
        if not self.owns(old_real):
            self.preserved[source] = None
        self._move_entries(source, target)
        self._entries[target] = old

    def names_in(self, path: str) -> list[str]:
        """Return the names in a folder, as the job sees it; none where it is no
        folder."""
        location = self.locate(path)
        names = (
            dict.fromkeys(posix.listdir(location))
            if location is not None and is_folder(location)
            else {}
        )
        for name, target in self.changes_in(path).items():
            if target is None:
                names.pop(name, None)
            else:
                names[name] = None
        return list(names)

    def changes_in(self, path: str) -> dict[str, str | None]:
        """Return the names in a folder that differ from the disk, with where they are;
        None: missing."""
        return {
            os.path.basename(key): value
            for key, value in self._entries.items()
            if os.path.dirname(key) == path
        }

    def close(self) -> None:
        """Remove the temporary folder, and what the job has made and nobody has
        replaced."""
        self._entries.clear()
        remove_made(self.made | made_in(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._has_list():
            posix.close(self._list)

    def _keep_made(self, real: str, identity: tuple[int, int]) -> None:
        self.made[real] = identity
        # On the disk at once, as a signal may end the process, and past Python's
        # functions, which are replaced. It stays open: opening it took a quarter of the
        # time of a new file. A job may have closed it.
        if not self._has_list():
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._list = posix.open(os.path.join(self.folder, _MADE), flags, 0o600)
            self._list_identity = _identity(self._list)
        posix.write(self._list, f"{json.dumps([real, *identity])}\n".encode())

    def _has_list(self) -> bool:
        """Return whether the list of what the job has made is open."""
        with contextlib.suppress(OSError):
            return _identity(self._list) == self._list_identity
        return False

    def _may_change(self, path: str) -> bool:
        return self.owns(path) or not self.is_protected(path)

    def _require_folder(self, path: str) -> None:
        folder = self.locate(os.path.dirname(path))
        if folder is None or not is_folder(folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _new_path(self) -> str:
        self._number += 1
        return os.path.join(self.folder, str(self._number))

    def _forget(self, path: str) -> None:
        """Make a path missing for the job."""
        for key in [key for key in self._entries if is_inside(key, path)]:
            del self._entries[key]
        if self.locate(path) != path or status_of(path, follow=False) is not None:
            self._entries[path] = None

    def _move_entries(self, source: str, target: str) -> None:
        moved = {
            key: value
            for key, value in self._entries.items()
            if is_inside(key, source) and key != source
        }
        self._forget(target)
        self._entries.pop(target, None)
        self._forget(source)
        self._entries.update(
            {target + key[len(source) :]: value for key, value in moved.items()}
        )


def _identity(descriptor: int) -> tuple[int, int]:
    status = posix.fstat(descriptor)
    return status.st_dev, status.st_ino


def made_in(folder: str) -> dict[str, tuple[int, int]]:
    """Return what a job and its processes have made at any time, from the temporary
    folder of its view."""
    with (
        contextlib.suppress(FileNotFoundError),
        open(os.path.join(folder, _MADE), encoding="utf-8") as file,
    ):
        return {
            path: (device, number) for path, device, number in map(json.loads, file)
        }
    return {}


def remove_made(made: dict[str, tuple[int, int]]) -> None:
    """Remove files and folders, by path, that still have this device and inode."""
    for path in sorted(made, key=len, reverse=True):
        status = status_of(path, follow=False)
        if status is not None and (status.st_dev, status.st_ino) == made[path]:
            # a folder with files that the job has not made
            with contextlib.suppress(OSError):
                (posix.rmdir if stat.S_ISDIR(status.st_mode) else posix.unlink)(path)


def cache_folders() -> tuple[str, ...]:
    """Return the folders whose files any job may change: `~/.cache`, and those that
    environment variables name."""
    folders = [
        os.path.expanduser("~/.cache"),
        *(os.environ.get(name) for name in _CACHE_VARIABLES),
    ]
    return tuple(os.path.abspath(folder) for folder in folders if folder)


def is_inside(path: str, folder: str) -> bool:
    """Return whether an absolute path is a folder or below it."""
    return path == folder or path.startswith(folder + "/")


def parents(path: str) -> Iterator[str]:
    """Yield an absolute path and the folders that contain it, the innermost first."""
    yield path
    while len(path) > 1:
        path = os.path.dirname(path)
        yield path


def outermost(paths: Iterable[str]) -> list[str]:
    """Return the absolute paths that are in no other one."""
    names = dict.fromkeys(paths)
    return [
        path
        for path in names
        if not any(folder in names for folder in parents(os.path.dirname(path)))
    ]


def real_entry(path: str) -> str:
    """Return a path whose folder has no symbolic links; the last part may be one."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def status_of(path: str, follow: bool = True) -> Any:
    """Return the status of a path as the disk has it, past every replacement; None if
    it does not exist."""
    try:
        return posix.stat(path, follow_symlinks=follow)
    except (OSError, ValueError):
        return None


def is_folder(path: str) -> bool:
    """Return whether a path is a folder on the disk."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_file(path: str) -> bool:
    """Return whether a path is a regular file on the disk."""
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


class FileGuard:
    """Refuses what a `FileView` did not redirect. One serves all dry runs: an audit
    hook cannot be removed."""

    def __init__(self) -> None:
        self._view: FileView | None = None
        self._installed = False

    def start(self, view: FileView) -> None:
        """Refuse from now on what the view does not allow."""
        self._view = view
        if not self._installed:
            sys.addaudithook(self._audit)
            self._installed = True

    def stop(self) -> None:
        """Refuse nothing more."""
        self._view = None

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        view = self._view
        if event not in _EVENTS or view is None:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = (
                any(letter in mode for letter in "wa+")
                if isinstance(mode, str)
                else bool(flags & _WRITES)
            )
            if writes and not flags & os.O_EXCL:
                self._check(view, path, os.path.realpath)
        else:
            for position, folder in _CHANGES[event]:
                path = arguments[position]
                if (
                    folder is not None
                    and arguments[folder] != -1
                    and isinstance(path, (str, bytes))
                ):
                    path = os.path.join(
                        os.readlink(f"/proc/self/fd/{arguments[folder]}"),
                        os.fsdecode(path),
                    )
                self._check(view, path, real_entry)

    @staticmethod
    def _check(view: FileView, path: Any, resolve: Any) -> None:
        if not isinstance(path, (str, bytes)):
            return
        real = resolve(os.path.abspath(os.fsdecode(path)))
        status = status_of(real, follow=False)
        if status is None or not view.is_protected(real) or view.owns(real):
            return
        if resolve is os.path.realpath and not os.path.isfile(real):
            return  # a pipe, or a folder, which cannot be opened for writing
        raise PermissionError(f"a dry run changes no file that exists: {real}")


guard = FileGuard()

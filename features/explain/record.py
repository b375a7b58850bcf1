"""Records: what readers read in a text."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from ebbtide.features.explain.pasted import PastedText

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Place:
    """The lines of a text in which something stands."""

    text_name: str
    first_line: int
    last_line: int

    def __str__(self) -> str:
        lines = f"{self.first_line}"
        if self.last_line > self.first_line:
            lines += f"-{self.last_line}"
        return f"{self.text_name}:{lines}"


@dataclass(frozen=True, kw_only=True)
class Record:
    """Something that a reader has read.

    Subclasses have its figures.
    """

    place: Place

    @property
    def title(self) -> str:
        """Return the words for it in the list of what was read."""
        raise NotImplementedError

    def as_json(self) -> dict[str, Any]:
        """Return the object of it that `ebbtide explain --json` prints."""
        figures = asdict(self)
        place = figures.pop("place")
        kind = type(self).__name__
        return {"kind": kind, "title": self.title, "place": place, "figures": figures}


Reader = Callable[[PastedText], Iterable[Record]]
_READERS: list[Reader] = []
_Kind = TypeVar("_Kind", bound=Record)


def reader(function: Reader) -> Reader:
    """Decorate a function, in a file of the folder `readers`, that reads records in a
    text."""
    _READERS.append(function)
    return function


@cache
def all_readers() -> tuple[Reader, ...]:
    """Return the readers of all modules in the folder `readers`, in their order."""
    import_folder("readers")
    return tuple(_READERS)


def import_folder(name: str) -> None:
    """Import the modules of a folder of this package, in the order of their names."""
    for path in sorted((_FOLDER / name).glob("[a-z]*.py")):
        import_module(f"ebbtide.features.explain.{name}.{path.stem}")


def read_records(text: PastedText) -> Iterator[Record]:
    """Yield the records of all readers, in the order of their first lines."""
    records = [record for read in all_readers() for record in read(text)]
    yield from sorted(records, key=lambda record: record.place.first_line)


@dataclass(frozen=True)
class Records:
    """The records of all texts, and what their reader says of the job.

    `params`: its number of parameters; `gpu`: a machine of `ebbtide machines`.
    """

    records: tuple[Record, ...]
    params: int | None = None
    gpu: str | None = None

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """Return the records of a kind."""
        return [record for record in self.records if isinstance(record, kind)]

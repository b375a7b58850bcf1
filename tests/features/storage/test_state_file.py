"""StateFile: what was written comes back, a crash leaves the last commit, and nothing
else is ever read as state."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.features.storage.engine.direct_file import PAGE, aligned
from ebbtide.features.storage.engine.state_file import StateFile
from ebbtide.interleave.engine.errors import EngineError

RUN, OTHER_RUN = b"a run, 16 bytes.", b"another run, 16."
SIZES = [3 * PAGE, 100, 17 << 20, PAGE]
SMALL = [3 * PAGE, 100, PAGE]


class Memory:
    """Memory that begins at a page."""

    def __init__(self, size: int) -> None:
        self.pages = mmap.mmap(-1, aligned(size))
        self.view = memoryview(self.pages)

    def fill(self, number: int) -> Memory:
        self.pages.seek(0)
        self.pages.write(number.to_bytes(8, "little") * (len(self.pages) // 8))
        return self

    @property
    def number(self) -> int:
        """The number that fills it."""
        content = self.pages[:]
        assert content == content[:8] * (len(content) // 8)
        return int.from_bytes(content[:8], "little")


@contextmanager
def opened(
    path: Path, sizes: list[int] = SIZES, run: bytes = RUN, sequence: int | None = None
) -> Iterator[StateFile]:
    file = StateFile(path, sizes, run, sequence)
    try:
        yield file
    finally:
        file.close()


def numbers(file: StateFile, sizes: list[int] = SIZES) -> list[int]:
    memories = [Memory(size) for size in sizes]
    for subgroup, memory in enumerate(memories):
        file.read(subgroup, memory.view)
    return [memory.number for memory in memories]


def write_all(file: StateFile, number: int, sizes: list[int] = SIZES) -> None:
    for subgroup, size in enumerate(sizes):
        file.write(subgroup, Memory(size).fill(number).view)


def test_read__returns_what_was_written(tmp_path: Path) -> None:
    with opened(tmp_path / "state") as file:
        for subgroup, size in enumerate(SIZES):
            file.write(subgroup, Memory(size).fill(subgroup + 1).view)
        assert numbers(file) == [1, 2, 3, 4]
        assert file.written_bytes == sum(map(aligned, SIZES))


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12))
@settings(max_examples=30, deadline=None)
def test_read__returns_the_newest_state_and_after_a_crash_that_of_the_last_commit(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, bool]]
) -> None:
    path, sizes = tmp_path_factory.mktemp("file") / "state", [PAGE, 10, 2 * PAGE]
    newest = [0, 0, 0]
    file = StateFile(path, sizes, RUN)
    write_all(file, 0, sizes)
    committed, sequence = list(newest), file.commit()
    for number, (subgroup, commits) in enumerate(writes, 1):
        file.write(subgroup, Memory(sizes[subgroup]).fill(number).view)
        newest[subgroup] = number
        if commits:
            committed, sequence = list(newest), file.commit()
        assert numbers(file, sizes) == newest
    # As a crash would: nothing is written any more.
    file._file.close()
    with opened(path, sizes, RUN, sequence) as resumed:
        assert numbers(resumed, sizes) == committed


def remove_if_committed(path: Path, sizes: list[int]) -> None:
    """Remove a file with commits that nobody knows of, as its error says."""
    try:
        StateFile(path, sizes, RUN, None).close()
    except EngineError as error:
        if "another run" not in str(error):
            raise
        path.unlink()


def test_commit__is_whole_after_kills_at_random_moments(tmp_path: Path) -> None:
    sizes, path, draw = (
        [1 << 20, 5 * PAGE, 300_000],
        tmp_path / "state",
        random.Random(0),
    )
    # Of the last commit that is known: its number, and that with which it was filled.
    last, content = 0, 0
    for run in range(12):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            if not last:
                remove_if_committed(path, sizes)
            with opened(path, sizes, RUN, last or None) as file:
                for number in itertools.count(content + 1):
                    write_all(file, number, sizes)
                    os.write(write_end, struct.pack("<QQ", file.commit(), number))
        os.close(write_end)
        with os.fdopen(read_end, "rb") as reader:
            # However slow the machine is, some runs commit, and others are killed
            # before they do.
            acknowledged = reader.read(16 * (run % 3))
            time.sleep(draw.uniform(0.0, 0.03))
            os.kill(child, signal.SIGKILL)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
            acknowledged += reader.read()
        if acknowledged:
            last, content = struct.unpack("<QQ", acknowledged[-16:])
        if last:
            with opened(path, sizes, RUN, last) as file:
                assert numbers(file, sizes) == [content] * 3
    assert last >= 12


def test_commit__can_be_loaded_until_a_write_after_the_next_one(tmp_path: Path) -> None:
    """A job of several ranks goes on from it if one of them is killed before its next
    commit."""
    path = tmp_path / "state"
    with opened(path, SMALL) as file:
        for number in (1, 2):
            write_all(file, number, SMALL)
            assert file.commit() == number
    for number in (2, 1):
        with opened(path, SMALL, sequence=number) as file:
            assert numbers(file, SMALL) == [number] * 3
    with opened(path, SMALL, sequence=2) as file:
        file.write(1, Memory(SMALL[1]).fill(3).view)
    with pytest.raises(
        EngineError,
        match=r"does not have commit 1, which the checkpoint names .it has 2.: load",
    ):
        StateFile(path, SMALL, RUN, 1)
    with opened(path, SMALL, sequence=2) as file:
        assert numbers(file, SMALL) == [2] * 3


def test_commit__never_has_the_number_of_one_that_was_given_up(tmp_path: Path) -> None:
    """Else the checkpoint of that one would be loaded with the state of another."""
    path = tmp_path / "state"
    with opened(path, SMALL) as file:
        for number in (1, 2):
            write_all(file, number, SMALL)
            file.commit()
    for _ in range(2):
        # The second time, what was written has already replaced the state of commit 2.
        with opened(path, SMALL, sequence=1) as file:
            file.write(0, Memory(SMALL[0]).fill(7).view)
    with pytest.raises(
        EngineError,
        match=r"does not have commit 2, which the checkpoint names .it has 1.",
    ):
        StateFile(path, SMALL, RUN, 2)
    with opened(path, SMALL, sequence=1) as file:
        write_all(file, 8, SMALL)
        sequence = file.commit()
    assert sequence > 2
    for number, expected in ((1, 1), (sequence, 8)):
        with opened(path, SMALL, sequence=number) as file:
            assert numbers(file, SMALL) == [expected] * 3


@pytest.mark.parametrize(
    ("run", "sizes", "sequence", "message"),
    [
        (
            RUN,
            SIZES,
            None,
            "has the state of another run: load the checkpoint that names it",
        ),
        (OTHER_RUN, SIZES[:2], None, "has the state of another run"),
        (
            OTHER_RUN,
            SIZES,
            1,
            "does not have commit 1, which the checkpoint names .it has none of this "
            "run",
        ),
        (RUN, SIZES[:3], 1, "it has none of this run and these subgroups"),
        (RUN, SIZES, 7, "does not have commit 7, which the checkpoint names .it has 1"),
    ],
)
def test_open__refuses_a_file_of_other_state(
    tmp_path: Path, run: bytes, sizes: list[int], sequence: int | None, message: str
) -> None:
    with opened(tmp_path / "state") as file:
        write_all(file, 5)
        file.commit()
    with pytest.raises(EngineError, match=message):
        StateFile(tmp_path / "state", sizes, run, sequence)
    with opened(tmp_path / "state", sequence=1) as file:
        assert numbers(file) == [5] * 4


def test_open__refuses_what_it_did_not_write_and_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"a thesis")
    with pytest.raises(EngineError, match="is not a file of ebbtide's"):
        StateFile(path, SIZES, RUN)
    assert path.read_bytes() == b"a thesis"


def test_open__refuses_a_file_that_is_cut_short(tmp_path: Path) -> None:
    with opened(tmp_path / "state") as file:
        write_all(file, 5)
        file.commit()
    os.truncate(tmp_path / "state", 10 << 20)
    with pytest.raises(EngineError, match="is cut short"):
        StateFile(tmp_path / "state", SIZES, RUN, 1)


def test_read__raises_if_the_file_is_cut_short_meanwhile(tmp_path: Path) -> None:
    with opened(tmp_path / "state") as file:
        write_all(file, 5)
        os.truncate(file.path, 1 << 20)
        with pytest.raises(EngineError, match="ends early"):
            numbers(file)


def test_open__takes_over_the_file_of_a_run_that_never_committed(
    tmp_path: Path,
) -> None:
    crashed = StateFile(tmp_path / "state", SIZES, OTHER_RUN)
    write_all(crashed, 3)
    crashed._file.close()
    with opened(tmp_path / "state", SIZES[:2]) as file:
        write_all(file, 4, SIZES[:2])
        assert numbers(file, SIZES[:2]) == [4, 4]


def test_open__refuses_a_file_that_another_job_uses(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "state"),
        pytest.raises(
            EngineError, match="in use by another optimizer, of this process"
        ),
    ):
        StateFile(tmp_path / "state", SIZES, RUN)


def test_reserve__names_the_space_that_is_missing(tmp_path: Path) -> None:
    with opened(tmp_path / "state", [1 << 50]) as file:
        size = file.path.stat().st_size
        with pytest.raises(EngineError, match=r"needs .* more, and .* are free"):
            file.reserve([0])
        assert file.path.stat().st_size == size


def test_close__removes_a_file_without_a_commit(tmp_path: Path) -> None:
    with opened(tmp_path / "state") as file:
        write_all(file, 1)
    assert not (tmp_path / "state").exists()

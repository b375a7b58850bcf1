"""Takes the events out of a snapshot while its pickle is read, so that they need no
memory as objects.

An event is a dict of some names, numbers and a list of frames, written with the same
opcodes each time. So an event is read opcode by opcode, and a regular expression is
made of its opcodes, which reads thousands of events like it at a time. Others (with a
name or frame that was not there before) are read as the first.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import IO, Any, NamedTuple

from ebbtide.profiler.memory_snapshot.plain_pickle import PickleError, PlainPickle

_REFERENCE = rb"(?:h.|j.{4})"
_INTEGER = (
    rb"(?:K.|M..|J.{4}|\x8a(?:"
    + b"|".join(b"\\x%02x.{%d}" % (size, size) for size in range(9))
    + rb"))"
)
_TEXT = (
    rb"\x8c(?:"
    + b"|".join(b"\\x%02x.{%d}" % (size, size) for size in range(64))
    + rb")\x94"
)
_LIST = rb"\]\x94(?:\((?:h.|j.{4})++e|(?:h.|j.{4})a)?"
_FRAMES = b"(?:" + _REFERENCE + b"|" + _LIST + b")"
_OTHER = b"(?:" + _REFERENCE + b"|" + _INTEGER + rb"|[N\x88\x89])"
_PAIR = b"(" + _REFERENCE + b")(" + b"|".join((_OTHER, _TEXT, _LIST)) + b")"
_BEGIN, _END = rb"\}\x94\(", b"u"
_PAIRS, _EVENT = (
    re.compile(_PAIR, re.DOTALL),
    re.compile(_BEGIN + b"(?:" + _PAIR + b")+" + _END, re.DOTALL),
)
_REFERENCES = re.compile(_REFERENCE, re.DOTALL)
_LONG, _SIGNED, _LIST_OPCODE, _TEXT_OPCODE = 0x8A, ord("J"), ord("]"), 0x8C
# The integers of an event, and the columns for them.
_INTEGERS = {"time_us": "time_us", "size": "bytes", "addr": "address"}
_FIELDS = {
    "action": _REFERENCE,
    **dict.fromkeys(_INTEGERS, _INTEGER),
    "frames": _FRAMES,
}
_MAX_CACHED = 1 << 16
# An event, where the pickle has it, and its position in `PlainPickle.objects`.
EVENT, _EVENT_AT = object(), 0


class _Stack(NamedTuple):
    """A list of frames, its number, and its position in `PlainPickle.objects`."""

    frames: list[dict[str, Any]]
    number: int
    at: int


class _Form(NamedTuple):
    """Opcodes of an event and of a run of events, and their groups.

    `run` matches many events and what follows, `names` are the names of groups, and
    `added` are the groups that add to the memo.
    """

    event: re.Pattern[bytes]
    run: re.Pattern[bytes]
    names: list[str]
    added: list[int]


class SnapshotPickle(PlainPickle):
    """Reads a snapshot in which each event of the allocator is EVENT.

    `columns` get the events: `action` (by `codes`, or -1), `time_us`, `bytes`,
    `address` and `stack` (by `number`; the lists of frames are kept). `rows_added` is
    called then."""

    def __init__(
        self,
        file: IO[bytes],
        progress: Callable[[int], None],
        codes: Mapping[str, int],
        number: Callable[[list[dict[str, Any]] | None], int],
        columns: Mapping[str, array[int]],
        rows_added: Callable[[], None],
    ) -> None:
        super().__init__(file, progress)
        self._number_of, self._columns, self._rows_added = number, columns, rows_added
        self.objects.append(EVENT)
        self._form: _Form | None = None
        # The first byte of the dict that was begun last, and the dicts and lists since
        # the last event by identity.
        self._dict_at: int | None = None
        self._recent: dict[int, int] = {}
        # The frames of a stack are the same dicts in each list.
        self._stacks: dict[tuple[int, ...], _Stack] = {}
        self._stack_opcodes: dict[bytes, _Stack] = {}
        self._action = cache(lambda opcodes: codes.get(self._referred(opcodes), -1))
        self._repeated = lru_cache(_MAX_CACHED)(_integer)
        self._codes = codes

    def begin_dict(self) -> None:
        at = self.at - 1
        if self._form and self._form.event.match(self.data, at):
            self._read_run(self._form, at)
        else:
            self._dict_at = at
            super().begin_dict()

    def end_dict(self) -> None:
        super().end_dict()
        if "action" in self.stack[-1]:
            self._read_event(self.stack[-1])

    def memoize(self, index: int) -> None:
        super().memoize(index)
        if type(self.stack[-1]) in (dict, list):
            self._recent[id(self.stack[-1])] = index

    def remembered(self, index: int) -> Any:
        value = super().remembered(index)
        if value is EVENT:
            raise PickleError("it has the same event twice")
        return value

    def refill(self, least_bytes: int) -> None:
        super().refill(least_bytes)
        self._dict_at = None

    def _referred(self, opcodes: bytes) -> Any:
        return self.remembered(int.from_bytes(opcodes[1:], "little"))

    def _stack(self, frames: list[dict[str, Any]]) -> _Stack:
        """Return the first list of the same frames, so that no other one is kept."""
        key = tuple(map(id, frames))
        stack = self._stacks.get(key)
        if stack is None:
            stack = self._stacks[key] = _Stack(
                frames, self._number_of(frames), len(self.objects)
            )
            self.objects.append(frames)
        return stack

    def _read_event(self, event: dict[str, Any]) -> None:
        """Take the event on top of the stack."""
        action = self._codes.get(event["action"], -1)
        self._columns["action"].append(action)
        for name, column in _INTEGERS.items():
            # Events of unknown actions, which are left out, may have other names. Torch
            # before 2.2 has no times.
            missing = -1 if name == "time_us" else 0
            self._columns[column].append(
                event[name]
                if name == "size" and action >= 0
                else event.get(name, missing)
            )
        stack = self._stack(event.get("frames") or [])
        self._columns["stack"].append(stack.number)
        self.stack[-1] = EVENT
        for value, kept in ((event, EVENT), (event.get("frames"), stack.frames)):
            if id(value) in self._recent:
                self.objects[self.memo[self._recent[id(value)]]] = kept
        self._recent.clear()
        if self._dict_at is not None:
            self._form = self._form_of(self.data[self._dict_at : self.at]) or self._form
        self._rows_added()

    def _form_of(self, opcodes: bytes) -> _Form | None:
        """Return the form of an event.

        Return None where it has something that no earlier one had.
        """
        names: list[str] = []
        patterns, added = [], []
        for key, value in (
            _PAIRS.findall(opcodes, 3) if _EVENT.fullmatch(opcodes) else ()
        ):
            name = self._referred(key)
            pattern = _FIELDS.get(name) or (_TEXT if value[0] == _TEXT_OPCODE else None)
            if pattern in (_FRAMES, _TEXT):
                added.append(len(names))
            names += [name] if pattern else []
            patterns.append((re.escape(key), pattern))
        if not {"action", "size"} <= {*names}:
            return None
        groups = b"".join(
            key + (b"(" + pattern + b")" if pattern else _OTHER)
            for key, pattern in patterns
        )
        event = _BEGIN + groups + _END
        return _Form(
            re.compile(event, re.DOTALL),
            re.compile(event + b"|(.+)", re.DOTALL),
            names,
            added,
        )

    def _read_run(self, form: _Form, start: int) -> None:
        """Take the events of one form that follow each other from the byte `start`."""
        rows = form.run.findall(self.data, start)
        self.at = len(self.data) - len(rows[-1][-1])
        if rows[-1][-1]:
            rows.pop()
        values = [*zip(*rows, strict=True)]
        fields = {name: values[group] for group, name in enumerate(form.names)}
        count = len(fields["action"])
        columns = self._columns
        columns["action"].extend(map(self._action, fields["action"]))
        columns["time_us"].extend(
            _integers(fields["time_us"]) if "time_us" in fields else [-1] * count
        )
        columns["bytes"].extend(map(self._repeated, fields["size"]))
        columns["address"].extend(
            _integers(fields["addr"]) if "addr" in fields else [0] * count
        )
        if "frames" not in fields:
            columns["stack"].extend([-1] * count)
        memo, by_opcodes, numbers = self.memo, self._stack_opcodes, columns["stack"]
        for opcodes_of_event in zip(
            *(values[group] for group in form.added), strict=True
        ):
            memo.append(_EVENT_AT)
            for opcodes in opcodes_of_event:
                stack = by_opcodes.get(opcodes)
                if stack is not None:
                    memo.append(stack.at)
                    numbers.append(stack.number)
                elif opcodes[0] == _TEXT_OPCODE:
                    memo.append(len(self.objects))
                    self.objects.append(opcodes[2:-1].decode("utf-8", "surrogatepass"))
                else:
                    numbers.append(self._new_stack(opcodes))
        if not form.added:
            memo.extend([_EVENT_AT] * count)
        self.stack.extend([EVENT] * count)
        self._rows_added()

    def _new_stack(self, opcodes: bytes) -> int:
        """Return the number of a stack that is referred to, or of a new list of frames.

        A new list is remembered.
        """
        if opcodes[0] != _LIST_OPCODE:
            return self._number_of(self._referred(opcodes))
        frames = [
            self._referred(reference) for reference in _REFERENCES.findall(opcodes, 2)
        ]
        stack = self._stack_opcodes[opcodes] = self._stack(frames)
        self.memo.append(stack.at)
        return stack.number


def _integers(opcodes: Sequence[bytes]) -> Iterable[int]:
    """Return integers, all at once if they are long ones of one size.

    Times and addresses are such integers, below 2**63.
    """
    joined, count, size = b"".join(opcodes), len(opcodes), opcodes[0][1]
    step = size + 2
    if size > 8 or (joined[::step], joined[1::step]) != (
        bytes([_LONG]) * count,
        bytes([size]) * count,
    ):
        return map(_integer, opcodes)
    if len(joined) != step * count or max(joined[step - 1 :: step]) > 127:
        return map(_integer, opcodes)
    values = bytearray(8 * count)
    for place in range(size):
        values[place::8] = joined[place + 2 :: step]
    return array("q", bytes(values))


def _integer(opcodes: bytes) -> int:
    opcode = opcodes[0]
    if opcode == _LONG:
        return int.from_bytes(opcodes[2:], "little", signed=True)
    return int.from_bytes(opcodes[1:], "little", signed=opcode == _SIGNED)

"""One tool call written as tags: a name, then a key and a value for each argument. Its arguments
are made into the text of a JSON object as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .json_text import SPACE, held_size
from .table import Tags

MAX_HEAD = 512
"""Characters of a name or a key."""
MAX_VALUE = 1 << 20
"""Characters of a value that is no text: it is passed on as a whole."""
_NAME = re.compile(r"[\w.:/-]*")
_KEY = re.compile(r"[^<>\n]*")
_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
_KINDS = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}

Schema = Mapping[str, Any]
State = Callable[[str, int, int], int]


class TagReader:
    """As `CallReader`, for a format with `tags`. `close` is the mark behind a call, which ends it
    where the tags have no end of their own: then `closed`. `schema_of` gives a tool's parameters.
    """

    def __init__(
        self,
        tags: Tags,
        close: str,
        known: Callable[[str], bool],
        schema_of: Callable[[str], Schema | None],
    ) -> None:
        self.name: str | None = None
        self.pieces: list[str] = []
        self.whole = self.done = self.bad = self.closed = False
        self._tags = tags
        self._end = tags.end or close
        self._known = known
        self._schema_of = schema_of
        self._text = self._seen = self._key = ""
        self._kinds: frozenset[str] | None = None
        self._begun = self._first = False
        self._count = self._size = 0
        self._raw: list[str] = []
        self._wanted: tuple[str, ...] = ()
        self._then: Callable[[str], None] = self._open_name
        self._state: State = self._read_name
        if tags.name[0]:
            self._want(self._open_name, tags.name[0])

    @property
    def ready(self) -> bool:
        return self._begun

    def feed(self, text: str, start: int, stop: int) -> int:
        """Read text[start:stop]. Where it ended."""
        place = start
        while place < stop and not (self.done or self.bad):
            place = self._state(text, place, stop)
        return place

    # Marks, and what stands between two.

    def _want(self, then: Callable[[str], None], *marks: str) -> None:
        """Read one of some marks, and then do that."""
        self._then, self._wanted, self._seen, self._state = then, marks, "", self._read_mark

    def _read_mark(self, text: str, place: int, stop: int) -> int:
        if not self._seen:
            place = _run_end(SPACE, text, place, stop)
        while place < stop:
            self._seen += text[place]
            if not any(mark.startswith(self._seen) for mark in self._wanted):
                self.bad = True
                return place
            place += 1
            if self._seen in self._wanted:
                self._then(self._seen)
                return place
        return place

    def _open_name(self, mark: str) -> None:
        self._state = self._read_name

    def _read_name(self, text: str, place: int, stop: int) -> int:
        if not self._text:
            place = _run_end(SPACE, text, place, stop)
        place = self._read_run(_NAME, text, place, stop)
        if place < stop and not self.bad:
            mark = self._tags.name[1]
            if mark:
                self._want(self._take_name, mark)
            else:
                self._take_name(mark)
        return place

    def _take_name(self, mark: str) -> None:
        self.bad = not self._known(self._text)
        self.name = self._text
        self._want(self._take_next, self._tags.key[0], self._end)

    def _take_next(self, mark: str) -> None:
        """A key follows, or the call has ended."""
        self._begun, self._text, self._state = True, "", self._read_key
        if mark == self._end:
            self.pieces.append("}" if self._count else "{}")
            self.whole = self.done = True
            self.closed = not self._tags.end

    def _read_key(self, text: str, place: int, stop: int) -> int:
        place = self._read_run(_KEY, text, place, stop)
        if place < stop and not self.bad:
            self._key = self._text.strip()
            self._want(self._take_key, self._tags.key[1])
        return place

    def _take_key(self, mark: str) -> None:
        if self._tags.value[0]:
            self._want(self._open_value, self._tags.value[0])
        else:
            self._open_value(mark)

    def _read_run(self, pattern: re.Pattern[str], text: str, place: int, stop: int) -> int:
        """Characters of a name or a key, which has some and not too many."""
        end = _run_end(pattern, text, place, min(stop, place + MAX_HEAD - len(self._text)))
        self._text += text[place:end]
        self.bad = len(self._text) == MAX_HEAD or (end < stop and not self._text)
        return end

    # Values: text up to a mark.

    def _open_value(self, mark: str) -> None:
        self._kinds = kinds_of(self._schema_of(self.name or ""), self._key)
        self._text, self._raw, self._size = "", [], 0
        self._first, self._state = self._tags.lines, self._read_value
        begin = ", " if self._count else "{"
        self.pieces.append(f"{begin}{json.dumps(self._key, ensure_ascii=False)}: ")
        if self._is_text:
            self.pieces.append('"')
        self._count += 1

    @property
    def _is_text(self) -> bool:
        return self._kinds == frozenset(["string"])

    def _read_value(self, text: str, place: int, stop: int) -> int:
        mark = self._tags.value[1]
        text, self._text = self._text + text[place:stop], ""
        if self._first and text:
            self._first, text = False, text.removeprefix("\n")
        found = text.find(mark)
        if found < 0:
            ends = (mark, f"\n{mark}") if self._tags.lines else (mark,)
            settled = len(text) - held_size(text, 0, ends)
            self._say(text[:settled])
            self._text = text[settled:]
            return stop
        value = text[:found]
        self._say(value.removesuffix("\n") if self._tags.lines else value)
        self._end_value()
        return stop - (len(text) - found - len(mark))

    def _say(self, text: str) -> None:
        if self._is_text:
            self.pieces.append(json.dumps(text, ensure_ascii=False)[1:-1])
            return
        self._raw.append(text)
        self._size += len(text)
        self.bad = self._size > MAX_VALUE

    def _end_value(self) -> None:
        if self._is_text:
            self.pieces.append('"')
        else:
            self.pieces.append(as_json("".join(self._raw), self._kinds))
        self._want(self._take_next, self._tags.key[0], self._end)


def kinds_of(schema: Schema | None, key: str) -> frozenset[str] | None:
    """The JSON types that a parameter may have; None where its schema does not say."""
    named = schema.get("properties") if isinstance(schema, Mapping) else None
    one = named.get(key) if isinstance(named, Mapping) else None
    return _kinds_of(one) if isinstance(one, Mapping) else None


def _kinds_of(one: Schema) -> frozenset[str] | None:
    kinds = one.get("type")
    if isinstance(kinds, str):
        return frozenset([kinds])
    if isinstance(kinds, list) and kinds and all(isinstance(kind, str) for kind in kinds):
        return frozenset(kinds)
    if isinstance(values := one.get("enum"), list) and values:
        return frozenset(kind for value in values for kind in _KINDS.get(type(value), ()))
    parts = one.get("anyOf")
    if isinstance(parts, list) and parts and all(isinstance(part, Mapping) for part in parts):
        found = [_kinds_of(part) for part in parts]
        known = [kinds for kinds in found if kinds is not None]
        return frozenset().union(*known) if len(known) == len(found) else None
    return None


def as_json(raw: str, kinds: frozenset[str] | None) -> str:
    """The JSON of a value as a model writes it: its own text where that is JSON of one of `kinds`,
    else a string.
    """
    text = raw.strip()
    word = _WORDS.get(text.lower())
    for candidate in (text, word) if word and kinds is not None else (text,):
        try:
            value = json.loads(candidate, parse_constant=_no_number)
        except (ValueError, RecursionError):
            continue
        if kinds is None or (not isinstance(value, str) and kinds & {*_KINDS[type(value)]}):
            return candidate
    return json.dumps(raw, ensure_ascii=False)


def _no_number(name: str) -> Any:
    raise ValueError(name)


def _run_end(pattern: re.Pattern[str], text: str, place: int, stop: int) -> int:
    match = pattern.match(text, place, stop)
    return match.end() if match else place

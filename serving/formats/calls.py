"""One tool call as models write it: an object with its name and arguments, or its arguments
alone.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable

from .json_text import SPACE, JsonValue, is_object

MAX_HELD = 1 << 16
"""Characters of a call that may have to wait: until its name is known, a key, a value that is not
passed on.
"""

_OTHER_KEYS = ("type", "id")


class CallReader:
    """Reads one call. `pieces` is what came of its arguments and was not taken yet.

    `ready` once the call is certain to be one: its name is known and its arguments have begun, or
    its object is complete. `whole` once its arguments are complete, `done` at the call's last
    character, `bad` at the first character that no call has there. `closed`: it has read the mark
    behind the call, which an object never does.

    `name`: known already, so that only the arguments follow. `known`: whether a name is a tool's.
    `strict`: an object that has other keys, or no arguments, is no call.
    """

    def __init__(
        self,
        argument_keys: tuple[str, ...],
        known: Callable[[str], bool],
        strict: bool = False,
        name: str | None = None,
    ) -> None:
        self.name = name
        self.pieces: list[str] = []
        self.whole = self.done = self.bad = False
        self.closed = False
        self._argument_keys = argument_keys
        self._known = known
        self._strict = strict
        self._alone = name is not None
        self._begun = False
        self._expects = "open"
        self._key = ""
        self._value: JsonValue | None = None
        self._streams = False
        self._raw: list[str] = []
        self._raw_size = 0
        if self._alone:
            self._key, self._expects = argument_keys[0], "value"
            self.bad = not known(name or "")

    @property
    def ready(self) -> bool:
        return self.name is not None and (self._begun or self.done)

    def feed(self, text: str, start: int, stop: int) -> int:
        """Read text[start:stop]. Where it ended."""
        place = start
        while place < stop and not (self.done or self.bad):
            if self._value is not None:
                place = self._read_value(self._value, text, place, stop)
                continue
            match = SPACE.match(text, place, stop)
            place = match.end() if match else place
            if place < stop:
                place += self._punctuation(text[place])
        return place

    def _read_value(self, value: JsonValue, text: str, place: int, stop: int) -> int:
        if not self._streams:
            stop = min(stop, place + MAX_HELD - self._raw_size)
            if stop <= place:
                self.bad = True
                return place
        end = value.feed(text, place, stop)
        if self._streams:
            self.pieces.append(text[place:end])
        else:
            self._raw.append(text[place:end])
            self._raw_size += end - place
        self.bad = value.bad
        if value.done:
            self._end_value()
        return end

    def _punctuation(self, character: str) -> bool:
        """Take a character between keys and values; whether it was consumed."""
        expects = self._expects
        if expects == "value":
            self._open_value(character)
            return False
        if character == '"' and expects in ("first", "key"):
            self._key, self._expects = "", "colon"
            self._value, self._streams = JsonValue(), False
            return False
        if character == "}" and expects in ("first", "comma"):
            self._end_object()
        elif character == {"open": "{", "colon": ":", "comma": ","}.get(expects):
            self._expects = {"open": "first", "colon": "value", "comma": "key"}[expects]
        else:
            self.bad = True
        return not self.bad

    def _open_value(self, character: str) -> None:
        self._value = JsonValue()
        self._streams = self._key in self._argument_keys and character == "{"
        self._begun = self._begun or self._streams

    def _end_value(self) -> None:
        raw, self._raw, self._raw_size = "".join(self._raw), [], 0
        self._value = None
        if self._expects == "colon":
            self._end_key(json.loads(raw))
            return
        self._expects = "comma"
        if self._key in self._argument_keys:
            self._end_arguments(raw)
            self.done = self._alone
        elif self._key == "name":
            name = json.loads(raw)
            self.bad = not isinstance(name, str) or not self._known(name)
            self.name = None if self.bad else name

    def _end_key(self, key: str) -> None:
        repeated = self._begun if key in self._argument_keys else self.name is not None
        ours = key == "name" or key in self._argument_keys
        self.bad = repeated if ours else self._strict and key not in _OTHER_KEYS
        self._key = key

    def _end_arguments(self, raw: str) -> None:
        """What is no object: null stands for no arguments, a text may hold the object."""
        if not self._streams:
            value = "{}" if raw == "null" else ""
            if raw.startswith('"'):
                value = json.loads(raw)
            self.bad = not is_object(value)
            if self.bad:
                return
            self.pieces.append(value)
            self._begun = True
        self.whole = True

    def _end_object(self) -> None:
        if self.name is None or (self._strict and not self.whole):
            self.bad = True
            return
        if not self.whole:
            self.pieces.append("{}")
        self.whole = self.done = True


def long_id() -> str:
    """A new id of a call."""
    return f"call_{secrets.token_hex(12)}"

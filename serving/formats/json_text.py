"""JSON that arrives in parts: where a value ends, and whether it is one, without building it."""

from __future__ import annotations

import re

MAX_DEPTH = 128
"""Arrays and objects inside each other. Python's own parser gives up at about 1000."""
MAX_SCALAR = 400
"""Characters of a number."""

SPACE = re.compile(r"[ \t\n\r]*")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_CHARACTER = re.compile(r"[-+.0-9A-Za-z]")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_CLOSER = {"{": "}", "[": "]"}


class JsonValue:
    """Checks one value of RFC 8259 in one pass. `done` once it is complete, `bad` once it cannot
    become one. NaN and Infinity are none.

    A number is complete only when the character after it is seen.
    """

    def __init__(self) -> None:
        self.done = self.bad = False
        self._closers: list[str] = []
        self._expects = "value"
        self._is_key = False
        self._hex_left = 0
        self._scalar = ""

    def feed(self, text: str, start: int, stop: int) -> int:
        """Read text[start:stop]. Where it ended: at the first character that is not the
        value's, or at `stop`.
        """
        place = start
        while place < stop and not (self.done or self.bad):
            if self._expects == "string":
                place = self._string(text, place, stop)
            elif self._expects in ("escape", "hex"):
                place += self._escaped(text[place])
            elif self._expects == "scalar":
                place += self._more_scalar(text[place])
            else:
                match = SPACE.match(text, place, stop)
                place = match.end() if match else place
                if place < stop:
                    place += self._punctuation(text[place])
        return place

    def _string(self, text: str, place: int, stop: int) -> int:
        match = _STRING_RUN.match(text, place, stop)
        place = match.end() if match else place
        if place == stop:
            return place
        if text[place] == "\\":
            self._expects = "escape"
        elif text[place] != '"':
            self.bad = True
            return place
        elif self._is_key:
            self._is_key, self._expects = False, "colon"
        else:
            self._end_value()
        return place + 1

    def _escaped(self, character: str) -> bool:
        if self._expects == "hex":
            self.bad = character not in "0123456789abcdefABCDEF"
            self._hex_left -= 1
            self._expects = "hex" if self._hex_left else "string"
        elif character == "u":
            self._hex_left, self._expects = 4, "hex"
        else:
            self.bad = character not in '"\\/bfnrt'
            self._expects = "string"
        return not self.bad

    def _more_scalar(self, character: str) -> bool:
        if _SCALAR_CHARACTER.match(character) and len(self._scalar) < MAX_SCALAR:
            self._scalar += character
            return True
        if _SCALAR.fullmatch(self._scalar):
            self._scalar = ""
            self._end_value()
        else:
            self.bad = True
        return False

    def _punctuation(self, character: str) -> bool:
        """Take a character between values. Whether it is part of the JSON."""
        expects = self._expects
        if character in "}]" and expects in (f"first {character}", "comma"):
            self.bad = self._closers[-1] != character
            if not self.bad:
                self._closers.pop()
                self._end_value()
        elif expects in ("first }", "key"):
            self.bad = character != '"'
            self._expects, self._is_key = "string", True
        elif expects == "colon":
            self.bad = character != ":"
            self._expects = "value"
        elif expects == "comma":
            self.bad = character != ","
            self._expects = "key" if self._closers[-1] == "}" else "value"
        else:
            return self._begin_value(character)
        return not self.bad

    def _begin_value(self, character: str) -> bool:
        if character in _CLOSER and len(self._closers) < MAX_DEPTH:
            self._closers.append(_CLOSER[character])
            self._expects = f"first {self._closers[-1]}"
        elif character == '"':
            self._expects = "string"
        elif _SCALAR_CHARACTER.match(character):
            self._scalar, self._expects = character, "scalar"
        else:
            self.bad = True
        return not self.bad

    def _end_value(self) -> None:
        self._expects = "comma"
        self.done = not self._closers


def is_object(text: str) -> bool:
    """Whether a text is one JSON object and nothing else, in valid Unicode."""
    value = JsonValue()
    end = value.feed(text, 0, len(text))
    return text.startswith("{") and value.done and end == len(text) and not _HALF_PAIR.search(text)


def held_size(text: str, place: int, marks: tuple[str, ...]) -> int:
    """Characters at the end of text[place:] that may begin a mark."""
    longest = min(max(map(len, marks), default=1) - 1, len(text) - place)
    for size in range(longest, 0, -1):
        tail = text[-size:]
        if any(len(mark) > size and mark.startswith(tail) for mark in marks):
            return size
    return 0

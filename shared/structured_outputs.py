"""What form the text of a completion must have. Plain data: `grammars.py` makes masks of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import option_text
from .json_depth import MAX_DEPTH, nests_too_deep
from .models.fields import quoted, show
from .option_kinds import Kind, Refusal

KINDS = ("json", "json_object", "regex", "choice", "grammar")
MAX_TEXT = 1 << 18
"""Characters of a schema, an expression or a grammar."""
MAX_CHOICES = 4096


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """`kind` is one of KINDS. `text`: a JSON schema, nothing, a regular expression, a JSON list of
    texts, or a grammar in Lark's notation as llguidance reads it.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Structure(Kind):
    """A mapping with one of KINDS, kept as StructuredOutputs."""

    metavar: str | None = "JSON"

    @property
    def words(self) -> str:
        """See `Kind`."""
        return f"a mapping with one of {', '.join(KINDS)}"

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        if value is None:
            return None
        if isinstance(value, StructuredOutputs):
            value = {value.kind: value.text or True}
        if not isinstance(value, Mapping):
            raise Refusal
        given = {
            key: item
            for key, item in value.items()
            if item is not None and not (key == "json_object" and item is False)
        }
        if len(given) != 1 or next(iter(given)) not in KINDS:
            raise Refusal(f"has {', '.join(map(str, given)) or 'nothing'}, allowed {self.allowed}")
        ((kind, item),) = given.items()
        text = _text(kind, item)
        if len(text) > MAX_TEXT:
            raise Refusal(f"{kind} has {len(text)} characters, at most {MAX_TEXT} are allowed")
        return StructuredOutputs(kind, text)

    def read(self, text: str) -> Any:
        """See `Kind`."""
        return option_text.json_value(text)


def _text(kind: str, item: Any) -> str:
    if kind == "json_object":
        if item is not True:
            raise Refusal(f"got json_object {quoted(item)}, allowed are true and false")
        return ""
    if kind == "choice":
        return _choices(item)
    if kind == "json":
        return _schema(item)
    if not isinstance(item, str) or not item:
        raise Refusal(f"got {kind} {show(item)}, allowed is a text that is not empty")
    return item


def _choices(item: Any) -> str:
    try:
        listed = json.loads(item) if isinstance(item, str) else list(item)
    except (TypeError, ValueError):
        listed = None
    if (
        not isinstance(listed, list)
        or not 1 <= len(listed) <= MAX_CHOICES
        or not all(isinstance(text, str) and text for text in listed)
    ):
        raise Refusal(
            f"got choice {show(item)}, allowed is a list of 1 to {MAX_CHOICES} texts that are not "
            "empty"
        )
    if (size := sum(map(len, listed))) > MAX_TEXT:  # before a text is made of them
        raise Refusal(f"choice has {size} characters, at most {MAX_TEXT} are allowed")
    return json.dumps(listed)


def _schema(item: Any) -> str:
    try:
        schema = json.loads(item) if isinstance(item, str) else item
        if nests_too_deep(schema):
            raise ValueError(f"it nests more than {MAX_DEPTH} deep")
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refusal(f"got json {show(item)}, allowed is a JSON schema: {error}") from None
    if not isinstance(schema, (Mapping, bool)):
        raise Refusal(f"got json {show(item)}, allowed is a JSON schema: an object")
    return text

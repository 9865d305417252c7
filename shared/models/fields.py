"""Reads JSON objects that others wrote: typed, with errors that name the file, the field, the
value and the rule.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ModelError, ModelNotFound, UnsupportedModel

MAX_SIZE = 2**31 - 1


class Fields:
    """Typed access to a JSON object. Null counts as absent. Errors name the file, the field, the
    value and the rule.

    `family` is the model type whose rules hold, if there are such. `within` is the path of the
    object in its file, with the dot behind it; fields `outside` do not lie there but at the top.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        where: str,
        family: str = "",
        within: str = "",
        outside: frozenset[str] = frozenset(),
    ) -> None:
        self.raw = raw
        self.where = where
        self.family = family
        self._within = within
        self._outside = outside

    def replaced(self, values: Mapping[str, Any]) -> Fields:
        """The same object with other values of some fields."""
        raw = {**self.raw, **values}
        return Fields(raw, self.where, self.family, self._within, self._outside)

    def defaulted(self, values: Mapping[str, Any]) -> Fields:
        """The same object, in which fields that are absent or null have these values."""
        return self.replaced({n: value for n, value in values.items() if self.get(n) is None})

    def path(self, name: str) -> str:
        """Where a field lies in the file."""
        return name if name in self._outside else self._within + name

    def get(self, name: str) -> Any:
        """The value, None if absent."""
        return self.raw.get(name)

    def need(self, name: str, default: Any) -> Any:
        """The value, or `default`. Raises ModelError if both are None."""
        value = self.raw.get(name)
        if value is None and default is None:
            self.fail(name, "is missing")
        return default if value is None else value

    def fail(self, name: str, message: str) -> NoReturn:
        """Raise ModelError about a field."""
        raise ModelError(f"{self.where}: {self.path(name)} {message}")

    def refuse(self, name: str, value: Any, allowed: str) -> NoReturn:
        """Raise UnsupportedModel about a field."""
        whose = f", for {self.family}" if self.family else ""
        raise UnsupportedModel(
            f"{self.where}: {self.path(name)} is {show(value)}, allowed: {allowed}{whose}"
        )

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse a field that is there and has none of these values."""
        value = self.get(name)
        if value is None or any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed
        ):
            return
        written = [json.dumps(one) for one in allowed]
        shown = quoted(value) if value in written else value  # the text "4" is not the number 4
        self.refuse(name, shown, " or ".join([*written, "absent"]))

    def size(
        self, name: str, default: int | None = None, high: int = MAX_SIZE, low: int = 1
    ) -> int:
        """An integer from `low` to `high`. Without a default it must be there."""
        value = self.need(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(name, f"is {quoted(value)}, must be an integer from {low} to {high}")
        return int(value)

    def number(
        self, name: str, default: float | None = None, low: float = 0.0, above: bool = False
    ) -> float:
        """A finite number of at least `low`, or more than that. Without a default it must be
        there.
        """
        value = self.need(name, default)
        if not is_number(value) or value < low or (above and value == low):
            self.fail(
                name,
                f"is {quoted(value)}, must be a number of {'more than' if above else 'at least'} "
                f"{low:g}",
            )
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.fail(name, f"is {quoted(value)}, must be true or false")
        return default if value is None else bool(value)

    def token_ids(self, name: str, vocab_size: int) -> list[int]:
        """An id, a list of ids, or nothing."""
        value = self.get(name)
        if value is None:
            return []
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                rule = f"must be below vocab_size ({vocab_size}): an id, or a list of ids"
                self.fail(name, f"is {quoted(value)}, {rule}")
        return list(ids)


def nearest(name: str, known: Iterable[str]) -> str:
    """What to add to an error about an unknown name: the known one that is most like it, if
    there is such.
    """
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; the nearest known one is {near[0]}" if near else ""


def need_folder(folder: str | Path) -> Path:
    """The path of a folder. Raises ModelNotFound if it is none."""
    if not os.path.isdir(folder):
        raise ModelNotFound(f"{show(str(folder), 300)}: no such folder")
    return Path(folder)


def read_json(path: Path, error: type[ModelError] = ModelError) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelNotFound if there is no file, `error` if it is not
    an object.
    """
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: no such file") from None
    except OSError as why:
        raise error(f"{path}: cannot be read: {why.strerror or why}") from None
    except (ValueError, RecursionError) as why:
        raise error(f"{path}: is not valid JSON: {show(str(why), 160)}") from None
    if not isinstance(raw, dict):
        raise error(f"{path}: is not a JSON object but {show(raw)}")
    return raw


def show(value: Any, limit: int = 80) -> str:
    """A value for an error message: one line, cut at `limit` characters. Text keeps no quotes if
    it needs none.
    """
    try:
        text = value if isinstance(value, str) and value.isprintable() and value else repr(value)
    # an integer of thousands of digits, a list in a list in a list
    except (ValueError, RecursionError):
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quoted(value: Any) -> str:
    """As `show`, but text is in quotes: where a number is expected, "64" must not look like one."""
    return show(json.dumps(value) if isinstance(value, str) else value)


def is_number(value: Any) -> bool:
    """Whether `value` is a finite float or an integer that has one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False

"""What values the options of sampling take that no other option has: token ids, texts that stop,
and biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import option_text
from .option_kinds import INT32_MAX, Kind, Number, Refusal, Whole, as_python, items_of
from .options import show

TOKEN = Whole(0, INT32_MAX)
UNBOUNDED = INT32_MAX
"""A bound that is none: as many as fit."""


def _check_items(kind: Kind, items: Any, what: str) -> None:
    """Raise Refusal for the first item that `kind` refuses."""
    for item in items:
        try:
            kind.check(item)
        except Refusal:
            raise Refusal(f"got {what} {show(item)}, allowed {kind.allowed}") from None


def _check_count(items: Any, limit: int) -> None:
    if len(items) > limit:
        raise Refusal(f"has {len(items)} entries, at most {limit} are allowed")


@dataclass(frozen=True)
class AtMost(Whole):
    """A bound. None is none, which is kept as `UNBOUNDED`."""

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        return UNBOUNDED if value is None else super().check(value)


@dataclass(frozen=True)
class Temperature(Number):
    """0, or a number from `least`: below it, logits over temperature leave the range of the
    sampler's integers.
    """

    least: float = 0.01

    @property
    def words(self) -> str:
        """See `Kind`."""
        return f"0 (greedy), or {self.least:g} to {self.high:g}"

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return f"is {self.words}"

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        number = super().check(value)
        if 0.0 < number < self.least:
            raise Refusal
        return number

    @classmethod
    def raised(cls, value: float) -> float:
        """The least temperature in place of one between it and 0: as vLLM, where others accept
        such.
        """
        return cls.least if 0.0 < value < cls.least else value


@dataclass(frozen=True)
class TokenIds(Kind):
    """Token ids, kept as a tuple. `some`: at least one, or None."""

    limit: int
    some: bool = False
    metavar: str | None = "1,2,3"

    @property
    def words(self) -> str:
        """See `Kind`."""
        return f"a list of token ids, at most {self.limit}"

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        items = () if value is None else items_of(value)
        if self.some and not items:
            raise Refusal("is empty: at least one token must be allowed, or omit it")
        _check_count(items, self.limit)
        _check_items(TOKEN, items, "the token id")
        return items

    def read(self, text: str) -> Any:
        """See `Kind`."""
        return option_text.token_ids(text)


@dataclass(frozen=True)
class Sequences(Kind):
    """Sequences of two token ids or more, kept as tuples. One alone is a token id."""

    limit: int
    length: int
    metavar: str | None = "JSON"

    @property
    def words(self) -> str:
        """See `Kind`."""
        return f"a list of at most {self.limit} lists of 2 to {self.length} token ids"

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        items = tuple(map(items_of, () if value is None else items_of(value)))
        _check_count(items, self.limit)
        for item in items:
            if not 2 <= len(item) <= self.length:
                raise Refusal(f"has a list of {len(item)}, allowed {self.allowed}")
            _check_items(TOKEN, item, "the token id")
        return items

    def read(self, text: str) -> Any:
        """See `Kind`."""
        return option_text.json_value(text)


@dataclass(frozen=True)
class Strings(Kind):
    """Texts of 1 to `length` characters, kept as a tuple; one stands for itself."""

    limit: int
    length: int
    metavar: str | None = "TEXT"
    repeated: bool = True

    @property
    def words(self) -> str:
        """See `Kind`."""
        return f"at most {self.limit} texts of 1 to {self.length} characters"

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        if value is None:
            value = ()
        elif isinstance(value, str):
            value = (value,)
        items = items_of(value)
        if not all(isinstance(item, str) for item in items):
            raise Refusal
        _check_count(items, self.limit)
        for item in items:
            if not 1 <= len(item) <= self.length:
                raise Refusal(
                    f"has an entry of {len(item)} characters, allowed is 1 to {self.length}"
                )
        return items


@dataclass(frozen=True)
class Biases(Kind):
    """Token ids, and for each a number within `most` of 0."""

    limit: int
    most: float
    metavar: str | None = "ID:BIAS,..."

    @property
    def words(self) -> str:
        """See `Kind`."""
        return f"a mapping of token ids to numbers within {self.most:g} of 0, at most {self.limit}"

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise Refusal
        _check_count(value, self.limit)
        bias = {_token(as_python(key)): as_python(number) for key, number in value.items()}
        _check_items(TOKEN, bias, "the token id")
        _check_items(Number(-self.most, self.most), bias.values(), "the bias")
        return {token: float(number) for token, number in bias.items()}

    def read(self, text: str) -> Any:
        """See `Kind`."""
        return option_text.biases(text)


def _token(key: Any) -> Any:
    """JSON has only text for keys, so "42" stands for the token id 42."""
    is_number = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
    return int(key) if is_number else key

"""What values an option takes: each kind checks a value, reads one from the command line, and
says what is allowed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import option_text

INT32_MAX = 2**31 - 1
LEAST_SCALE = 2.0**-126
"""Below it a scale, and above its inverse its reciprocal, would be subnormal."""


class Refusal(ValueError):
    """A value that is not orders. Without a text: because it is not what `Kind.allowed` says."""


class Kind(ABC):
    """The values of an option.

    metavar   what stands for a value in help
    choices   the values, if they are few: the command line lists them
    repeated  whether the flag may be given several times; `gather` makes one value of them
    in_help   whether help says `words`: not where the metavar, or a list of choices, says as much
    """

    metavar: str | None = None
    choices: tuple[Any, ...] | None = None
    repeated = False
    in_help = True

    @property
    def words(self) -> str:
        """What is allowed, in words for help and documents: "1 to 64". Empty for anything of the
        type.
        """
        return ""

    @property
    def allowed(self) -> str:
        """The same behind the word "allowed" of an error: "is an integer from 1 to 64"."""
        return f"is {self.words}"

    @abstractmethod
    def check(self, value: Any) -> Any:
        """The value as it is kept. Raises Refusal."""

    def read(self, text: str) -> Any:
        """The value that a text of the command line stands for. Raises ValueError."""
        return text

    def gather(self, values: list[Any]) -> Any:
        """One value of those that a repeated flag was given."""
        return values


@dataclass(frozen=True)
class Choice(Kind):
    """One of a few values of one type. `named` says in words what many have in common, instead
    of a list.
    """

    values: tuple[Any, ...]
    named: str = ""

    @property
    def in_help(self) -> bool:  # type: ignore[override]
        """What is listed anyway is not said again."""
        return bool(self.named)

    @property
    def choices(self) -> tuple[Any, ...] | None:  # type: ignore[override]
        """The list, unless there are words for it."""
        return None if self.named else self.values

    @property
    def metavar(self) -> str | None:  # type: ignore[override]
        """N for a number without a list."""
        return "N" if self.named else None

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return f"{'is' if self.named else 'are'} {self.words}"

    @property
    def words(self) -> str:
        """See `Kind`."""
        return self.named or ", ".join(map(str, self.values))

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        if type(value) is not type(self.values[0]) or value not in self.values:
            raise Refusal
        return value

    def read(self, text: str) -> Any:
        """See `Kind`."""
        return option_text.size(text) if isinstance(self.values[0], int) else text


@dataclass(frozen=True)
class Whole(Kind):
    """An integer within limits."""

    low: int | None = None
    high: int | None = None
    metavar: str | None = "N"

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        low = "" if self.low is None else f" from {self.low}"
        high = "" if self.high is None else f" to {self.high}"
        return f"is an integer{low}{high}"

    @property
    def words(self) -> str:
        """See `Kind`. A limit of the machine's is none that a reader needs."""
        if self.low is None or self.low < -INT32_MAX:
            return "" if self.high is None else "an integer of 64 bits"
        bounded = self.high is not None and self.high < INT32_MAX
        return f"{self.low} to {self.high}" if bounded else f"from {self.low}"

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise Refusal
        if (self.low is not None and value < self.low) or (
            self.high is not None and value > self.high
        ):
            raise Refusal
        return value

    def read(self, text: str) -> Any:
        """See `Kind`."""
        return option_text.size(text)


@dataclass(frozen=True)
class Number(Kind):
    """A number from `low` to `high`. `above`, `below`: without the limit itself."""

    low: float
    high: float
    above: bool = False
    below: bool = False
    metavar: str | None = "X"

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return f"is a number {'of ' if self.above else 'from '}{self.words}"

    @property
    def words(self) -> str:
        """See `Kind`."""
        if self.above:
            return f"more than {self.low:g} and at most {self.high:g}"
        return f"{self.low:g} to {'less than ' if self.below else ''}{self.high:g}"

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Refusal
        if not self.low <= value <= self.high:  # as it is written, NaN is refused too
            raise Refusal
        if (self.above and value == self.low) or (self.below and value == self.high):
            raise Refusal
        return value

    def read(self, text: str) -> Any:
        """See `Kind`."""
        return option_text.number(text)


@dataclass(frozen=True)
class Switch(Kind):
    """On or off: `--name` and `--no-name`."""

    in_help = False

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return "are true and false"

    @property
    def words(self) -> str:
        """See `Kind`."""
        return "true, false"

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        if not isinstance(value, bool):
            raise Refusal
        return value


@dataclass(frozen=True)
class Text(Kind):
    """A text that is not empty; `named` is what it stands for."""

    named: str
    metavar: str | None = "TEXT"
    in_help = False

    @property
    def words(self) -> str:
        """See `Kind`."""
        return self.named

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        if not isinstance(value, str) or not value:
            raise Refusal
        return value


def folder() -> Text:
    """The path of a folder."""
    return Text("the path of a folder", "FOLDER")


def as_python(value: Any) -> Any:
    """Numbers and texts of numpy stand for Python's; its truth values and times do not."""
    if isinstance(value, (np.integer, np.floating, np.str_)) and not isinstance(
        value, np.timedelta64
    ):
        return value.item()
    return value


def items_of(value: Any) -> tuple[Any, ...]:
    """The entries of a list or a tuple, but not the letters of a text. Raises Refusal."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise Refusal
    return tuple(map(as_python, value))


@dataclass(frozen=True)
class Words(Kind):
    """A list of words, kept as a tuple."""

    named: str
    metavar: str | None = "WORD,..."

    @property
    def words(self) -> str:
        """See `Kind`."""
        return self.named

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        items = items_of(value)
        if not all(isinstance(item, str) and item for item in items):
            raise Refusal
        return items

    def read(self, text: str) -> Any:
        """See `Kind`."""
        return option_text.words(text)


@dataclass(frozen=True)
class Sizes(Kind):
    """A list of positive integers, kept as a tuple.

    `rising`: each larger than the one before. `word`: a text that may stand in it, and then it may
    be empty.
    """

    high: int
    rising: bool = False
    word: str | None = None
    metavar: str | None = "8,16,..."

    @property
    def words(self) -> str:
        """See `Kind`."""
        rising = "rising " if self.rising else ""
        word = "" if self.word is None else f", and the word {self.word}"
        return f"a list of {rising}integers from 1 to {self.high}{word}"

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        items = items_of(value)
        if not items and self.word is None:
            raise Refusal
        if not all(
            (type(item) is int and 1 <= item <= self.high) or self._is_word(item) for item in items
        ):
            raise Refusal
        if self.rising and list(items) != sorted(set(items)):
            raise Refusal
        return items

    def _is_word(self, item: Any) -> bool:
        return self.word is not None and isinstance(item, str) and item == self.word

    def read(self, text: str) -> Any:
        """See `Kind`."""
        return option_text.sizes(text)


@dataclass(frozen=True)
class Ranges(Kind):
    """Pairs [first, last] in rising order that do not overlap, kept as tuples."""

    high: int

    @property
    def words(self) -> str:
        """See `Kind`."""
        return f"a list of pairs [first, last] from 1 to {self.high}, rising and without overlap"

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        pairs = tuple(items_of(pair) for pair in items_of(value))
        before = 0
        for pair in pairs:
            if len(pair) != 2 or not all(type(bound) is int for bound in pair):
                raise Refusal
            first, last = pair
            if not before < first <= last <= self.high:
                raise Refusal
            before = last
        return pairs


@dataclass(frozen=True)
class Scales(Kind):
    """Two positive finite numbers."""

    metavar: str | None = "K,V"

    @property
    def words(self) -> str:
        """See `Kind`."""
        return "two positive numbers: of K and of V"

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        items = items_of(value)
        if len(items) != 2 or not all(type(item) in (int, float) for item in items):
            raise Refusal
        if not all(math.isfinite(item) and item > 0 for item in items):
            raise Refusal
        if not all(LEAST_SCALE <= item <= 1 / LEAST_SCALE for item in items):
            raise Refusal(f"got {items}, allowed are scales from 2**-126 to 2**126")
        return items

    def read(self, text: str) -> Any:
        """See `Kind`."""
        return option_text.scales(text)


@dataclass(frozen=True)
class Priorities(Kind):
    """Ops, and for each the providers to try first."""

    metavar: str | None = "OP=PROVIDER,..."
    repeated: bool = True
    in_help = False

    @property
    def words(self) -> str:
        """See `Kind`."""
        return "a mapping of ops to lists of providers"

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        if not isinstance(value, Mapping) or not all(isinstance(op, str) for op in value):
            raise Refusal
        orders = {op: items_of(providers) for op, providers in value.items()}
        if not all(
            isinstance(provider, str) for providers in orders.values() for provider in providers
        ):
            raise Refusal
        return orders

    def read(self, text: str) -> Any:
        """See `Kind`."""
        return option_text.op_priority(text)

    def gather(self, values: list[Any]) -> Any:
        """See `Kind`."""
        return dict(values)


@dataclass(frozen=True)
class Settings(Kind):
    """Names with plain values."""

    metavar: str | None = "JSON"

    @property
    def words(self) -> str:
        """See `Kind`."""
        return "a mapping of names to true, false, numbers and texts"

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        if not isinstance(value, Mapping):
            raise Refusal
        if not all(
            isinstance(k, str) and isinstance(v, bool | int | float | str | None)
            for k, v in value.items()
        ):
            raise Refusal
        return value

    def read(self, text: str) -> Any:
        """See `Kind`."""
        return option_text.json_object(text)


@dataclass(frozen=True)
class Built(Kind):
    """What a function makes of a value: it raises Refusal, or an error of its own that says
    more.
    """

    build: Callable[[Any], Any]
    named: str
    metavar: str | None = None
    choices: tuple[Any, ...] | None = None
    reads: Callable[[str], Any] = str
    in_help = False

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return f"{'is' if self.choices is None else 'are'} {self.named}"

    @property
    def words(self) -> str:
        """See `Kind`."""
        return self.named

    def check(self, value: Any) -> Any:
        """See `Kind`."""
        return self.build(value)

    def read(self, text: str) -> Any:
        """See `Kind`."""
        return self.reads(text)

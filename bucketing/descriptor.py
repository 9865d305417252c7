"""The frozen table of programs and the one function that maps a step to its program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from .ladders import smallest_at_least

Kind = Literal["decode", "mixed"]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The shape of one step's program: an XLA executable on one side, a compiled graph on the
    other.

    `tokens` rows of tokens, `requests` rows of requests, both after padding. In a `decode` program
    every request has exactly one token, so `tokens == requests` and `max_query_len == 1`; a `mixed`
    program holds prefill chunks and decodes in one ragged row of tokens.
    """

    kind: Kind
    tokens: int
    requests: int
    max_query_len: int

    def __str__(self) -> str:
        return (
            f"{self.kind}[{self.tokens}]"
            if self.kind == "decode"
            else f"mixed[{self.tokens}x{self.requests}]"
        )


@dataclass(frozen=True, slots=True)
class Table:
    """All programs of one engine, enumerated at start. `decode_sizes`, `mixed_sizes` and
    `single_sizes` are sorted ladders; the last are tokens of mixed steps of which each is a
    request's only one.
    """

    decode_sizes: tuple[int, ...]
    mixed_sizes: tuple[int, ...]
    max_requests: int
    single_sizes: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[Descriptor]:
        for size in self.decode_sizes:
            yield Descriptor("decode", size, size, 1)
        for size in self.single_sizes:
            yield Descriptor("mixed", size, size, size)
        for size in self.mixed_sizes:
            yield Descriptor("mixed", size, self.max_requests, size)

    def __len__(self) -> int:
        return len(self.decode_sizes) + len(self.single_sizes) + len(self.mixed_sizes)

    def has_single_tokens(self, d: Descriptor) -> bool:
        """Whether it is a program of `single_sizes`."""
        return d.kind == "mixed" and d.requests < self.max_requests

    def decide(self, num_tokens: int, num_requests: int, max_query_len: int) -> Descriptor | None:
        """The program for a step of that size, or None if the table has none that is large
        enough.
        """
        if max_query_len == 1:
            size = smallest_at_least(self.decode_sizes, num_requests)
            if size is not None:
                return Descriptor("decode", size, size, 1)
        size = smallest_at_least(self.mixed_sizes, num_tokens)
        if size is None or num_requests > self.max_requests:
            return None
        return Descriptor("mixed", size, self.max_requests, size)

    def decide_single(self, num_tokens: int) -> Descriptor | None:
        """The program for a mixed step of requests that have one token each, or None."""
        size = smallest_at_least(self.single_sizes, num_tokens)
        if size is not None:
            return Descriptor("mixed", size, size, size)
        return self.decide(num_tokens, num_tokens, 2)


@dataclass(slots=True)
class PaddingAccount:
    """What padding costs: tokens computed in vain, by kind of program."""

    real: dict[Kind, int] = field(default_factory=lambda: {"decode": 0, "mixed": 0})
    padded: dict[Kind, int] = field(default_factory=lambda: {"decode": 0, "mixed": 0})

    def record(self, descriptor: Descriptor, num_tokens: int) -> None:
        """Count one step that had `num_tokens` real tokens."""
        self.real[descriptor.kind] += num_tokens
        self.padded[descriptor.kind] += descriptor.tokens - num_tokens

    @property
    def padded_share(self) -> float:
        """Padded tokens over all tokens computed, 0 before the first step."""
        padded = sum(self.padded.values())
        total = padded + sum(self.real.values())
        return padded / total if total else 0.0

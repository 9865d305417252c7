"""Guesses of the next tokens of a request, which a step computes beside its last token: those that
are what the sampler gives there are kept.

A token depends on the tokens before it, the request's seed and its position alone. So a step
samples behind each guess as it would without guesses, and keeps samples up to the first that is
another token than the guess: the output is that of no guesses, whatever they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .errors import ConfigError
from .option_kinds import Choice, Whole
from .options import by_name, check_fields, config_error, option, required

WHERE = "speculative_config"
METHOD = "ngram"
MOST_TOKENS = 64
LOOKUP_MIN, LOOKUP_MAX = 2, 5
"""How many of the last tokens are looked for where nobody says it."""
MANY = 16
"""Where one in so many places is found, all are compared."""
NO_GUESSES = np.zeros(0, np.int32)


_option = partial(option, owner="scheduler", no_flag="a field of `--speculative-config`")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How guesses are made, with the names that users of vLLM know; docs/options.md says what each
    does. Raises ConfigError.
    """

    num_speculative_tokens: int = required(
        Whole(1, MOST_TOKENS), "scheduler", "guesses of a request in a step, at most",
        no_flag="a field of `--speculative-config`",
    )  # fmt: skip
    method: str = _option(
        METHOD, Choice((METHOD,)),
        help="what followed where the last tokens stood before, in the prompt or the output",
    )  # fmt: skip
    prompt_lookup_max: int | None = _option(
        None,
        Whole(1, MOST_TOKENS),
        help="of the last tokens, how many are looked for together",
        usual=f"{LOOKUP_MAX}, or a larger prompt_lookup_min",
    )
    prompt_lookup_min: int | None = _option(
        None,
        Whole(1, MOST_TOKENS),
        help="and how many of them have to be found",
        limits="1 to prompt_lookup_max",
        usual=f"{LOOKUP_MIN}, or a smaller prompt_lookup_max",
    )

    def __post_init__(self) -> None:
        check_fields(self, _error)
        if self.shortest > self.longest:
            raise _error(
                "prompt_lookup_min",
                f"got {self.shortest}, allowed is at most prompt_lookup_max ({self.longest})",
            )

    @property
    def longest(self) -> int:
        """How many of the last tokens are looked for together: also where only the other limit is
        given, and larger than the default.
        """
        if self.prompt_lookup_max is not None:
            return self.prompt_lookup_max
        return max(LOOKUP_MAX, self.prompt_lookup_min or 0)

    @property
    def shortest(self) -> int:
        """How many of them have to be found: also where only the other limit is given, and smaller
        than the default.
        """
        if self.prompt_lookup_min is not None:
            return self.prompt_lookup_min
        return min(LOOKUP_MIN, self.longest)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SpeculativeConfig:
        """From a mapping of its fields. Raises ConfigError."""
        values = by_name(cls, options, f"{WHERE}: ")
        if "num_speculative_tokens" not in values:
            raise _error(
                "num_speculative_tokens",
                f"is missing, allowed is an integer from 1 to {MOST_TOKENS}",
            )
        return cls(**values)


def _error(name: str, text: str) -> ConfigError:
    return config_error(f"{WHERE}.{name}", text)


def look_up(tokens: np.ndarray, config: SpeculativeConfig, most: int) -> np.ndarray:
    """Up to `most` guesses of what follows `tokens` [n] int32: what followed the last place where
    as many of the last tokens as possible stood together, and where so many follow.

    None if not even `config.shortest` of them did. Takes time in proportion to n.
    """
    last = len(tokens) - 1
    if most < 1 or last < config.shortest:
        return NO_GUESSES
    # Where the last token stands before its own place.
    is_end, dense = tokens[:last] == tokens[last], 1
    # Of a text that is much the same all places are compared: to pick many takes far longer.
    while dense < config.longest and np.count_nonzero(is_end) * MANY > last:
        longer = np.zeros_like(is_end)
        np.equal(tokens[: last - dense], tokens[last - dense], out=longer[dense:])
        longer &= is_end
        if not longer.any():
            break
        is_end, dense = longer, dense + 1
    ends = np.flatnonzero(is_end)
    for size in range(dense + 1, config.longest + 1):
        longer = ends[ends >= size - 1]
        longer = longer[tokens[longer - (size - 1)] == tokens[last - (size - 1)]]
        if not len(longer):
            if size <= config.shortest:
                return NO_GUESSES
            break
        ends = longer
    if not len(ends):
        return NO_GUESSES
    roomy = int(np.searchsorted(ends, last - most, side="right"))
    first = int(ends[max(0, roomy - 1)]) + 1
    return tokens[first : first + most].copy()


@dataclass(frozen=True, slots=True)
class Drafts:
    """The guesses of a step. Each is an entry of the step's group, behind that of its request, or
    of the guess before it.

    heads   [request]  entry of each request's own last token
    counts  [request]  entries of each request, its own among them
    places  [n]        entries of guesses
    tokens  [n] int32  what is guessed there
    """

    heads: np.ndarray
    counts: np.ndarray
    places: np.ndarray
    tokens: np.ndarray

    def kept(self, sampled: np.ndarray) -> np.ndarray:
        """How many of the tokens that were `sampled`, one for each entry, each request keeps
        [request]: all up to the first that is not what was guessed.
        """
        is_right = np.ones(int(self.counts.sum()), np.bool_)
        is_right[self.places] = sampled[self.places - 1] == self.tokens
        found: np.ndarray = np.add.reduceat(_up_to_false(is_right, self.heads), self.heads)
        return found

    def by_request(self, sampled: np.ndarray) -> np.ndarray:
        """What was sampled as [most entries, request]; behind a request's last entry that one
        again.
        """
        place = np.arange(int(self.counts.max()))[:, None]
        entries = self.heads + np.minimum(place, self.counts - 1)
        found: np.ndarray = sampled[entries]
        return found


def _up_to_false(flags: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """1 for each entry before the first False of its request, which begins at `heads`; else 0."""
    wrong = np.cumsum(~flags)
    before = np.repeat(wrong[heads] - ~flags[heads], np.diff(np.append(heads, len(flags))))
    found: np.ndarray = (wrong == before).astype(np.int64)
    return found
